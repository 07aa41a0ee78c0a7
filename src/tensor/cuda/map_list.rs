//! Pointwise kernels over lists: one launch computes a formula for up to 48 calls.

use bytemuck::NoUninit;

use super::gpu::Gpu;
use super::map::{PACK_BYTES, THREADS, blocks};
use crate::error::Result;
use crate::tensor::cuda_device::sources::KernelSource;
use crate::tensor::{DType, Tensor, sort_by_key};

/// The maximum number of calls of one launch, as in `kernels/cuda/pointwise.cuh`.
const CALLS: usize = 48;

/// The kernels that compute a formula for lists of operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListKernels {
    pub source: KernelSource,
    pub entry: &'static str,
}

/// `struct ListCalls` of `kernels/cuda/pointwise.cuh`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct ListCalls {
    len: [u64; CALLS],
    block: [u32; CALLS],
    calls: u32,
    blocks: u32,
}

/// Returns the formula of each call's operands, in order. The operands of a call have one dtype and shape and are
/// contiguous. A result overwrites the call's first operand that nothing else holds, if there is one.
///
/// # Errors
/// Returns an error if the device is out of memory or a kernel fails.
pub(crate) fn map_list(
    kernels: ListKernels,
    calls: &mut [&mut [Tensor]],
    attributes: [f64; 2],
) -> Result<Vec<Tensor>> {
    let mut outs: Vec<Option<Tensor>> = vec![None; calls.len()];
    let mut order: Vec<usize> = (0..calls.len()).collect();
    // A launch takes one dtype. The sort is stable.
    let dtypes: Vec<DType> = calls.iter().map(|ins| ins[0].dtype()).collect();
    sort_by_key(&mut order, |&k| dtypes[k]);
    for same in order.chunk_by(|&a, &b| dtypes[a] == dtypes[b]) {
        for some in same.chunks(CALLS) {
            launch(kernels, calls, some, &mut outs, attributes)?;
        }
    }
    Ok(outs.into_iter().map(|out| out.expect("every call is in one launch")).collect())
}

/// Launches the calls `some`, all of one dtype, and sets their results.
fn launch(
    kernels: ListKernels,
    calls: &mut [&mut [Tensor]],
    some: &[usize],
    outs: &mut [Option<Tensor>],
    attributes: [f64; 2],
) -> Result<()> {
    let first = &calls[some[0]];
    let (gpu, dtype, arity) = (Gpu::of(&first[0])?, first[0].dtype(), first.len());
    let mut list = ListCalls { len: [0; CALLS], block: [0; CALLS], calls: some.len() as u32, blocks: 0 };
    let mut own = Vec::with_capacity(some.len());
    let mut fresh = Vec::with_capacity(some.len());
    for (at, &k) in some.iter().enumerate() {
        let n = calls[k][0].numel();
        list.len[at] = n as u64;
        list.block[at] = list.blocks;
        list.blocks += blocks(n.div_ceil(PACK_BYTES / dtype.size_bytes()));
        own.push((0..arity).find(|&i| calls[k][i].is_unique()));
        fresh.push(match own[at] {
            Some(_) => Tensor::default(),
            None => gpu.uninit_bools(dtype, calls[k][0].shape().clone())?,
        });
    }
    let mut launch = gpu.kernel(kernels.source, kernels.entry, dtype)?;
    launch = (0..arity).fold(launch, |launch, operand| {
        let all: Vec<&Tensor> = some.iter().map(|&call| &calls[call][operand]).collect();
        launch.read_all::<CALLS>(&all)
    });
    let mut results: Vec<&mut Tensor> = Vec::with_capacity(some.len());
    let mut of_call: Vec<Option<&mut &mut [Tensor]>> = calls.iter_mut().map(Some).collect();
    for ((&k, own), fresh) in some.iter().zip(&own).zip(&mut fresh) {
        let operands = of_call[k].take().expect("a call is in a launch once");
        results.push(match own {
            Some(i) => &mut operands[*i],
            None => fresh,
        });
    }
    let launch = launch.write_all::<CALLS>(&mut results);
    launch.arg(list).arg(attributes).start(list.blocks, THREADS, 0)?;
    for (result, &k) in results.into_iter().zip(some) {
        outs[k] = Some(result.clone());
    }
    Ok(())
}
