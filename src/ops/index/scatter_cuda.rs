//! CUDA kernels that write by index and that count: `kernels/cuda/scatter.cu`.

use super::cuda::SCATTER_ADD;
use crate::error::{Error, Result};
use crate::tensor::cuda::fault::Fault;
use crate::tensor::cuda::{Gpu, KernelLaunch};
use crate::tensor::{DType, Dims, ReduceOp, Shape, Tensor};

static SCATTER: Fault = Fault::index(420, "scatter");
static SCATTER_MAX: Fault = Fault::index(421, "scatter_max");
static SCATTER_MIN: Fault = Fault::index(422, "scatter_min");
static LAST_WRITE: Fault = Fault::index(423, "last_write");
static LINEAR_INDEX: Fault = Fault::index(424, "linear_index");
static BINCOUNT: Fault = Fault::index(425, "bincount");

const THREADS: u32 = 256;
const DIMS: usize = 6;
/// The largest number of indices that one kernel joins.
pub(super) const JOINED: usize = 8;

/// `struct ScatterPlaces` of `kernels/cuda/scatter.cu`: an index's extents, innermost first, and for each dim the strides of
/// the result (0 along the dim of the operator), of the index, of the source, and of the position along the dim.
#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::NoUninit)]
struct ScatterPlaces {
    out: [u64; DIMS],
    index: [u64; DIMS],
    src: [u64; DIMS],
    position: [u64; DIMS],
    len: [u32; DIMS],
    dims: u32,
    unused: u32,
}

/// The destinations of an index: its elements' places, and the part of `dim` that this rank stores.
struct Destinations<'a> {
    index: &'a Tensor,
    places: ScatterPlaces,
    /// The stride of the result along the dim, and the number of its indices that this rank stores.
    stride: usize,
    held: usize,
    /// The global extent, and the first index that this rank stores.
    n: usize,
    start: usize,
}

impl<'a> Destinations<'a> {
    fn new(
        verb: &str,
        out: &Shape,
        index: &'a Tensor,
        src: &Tensor,
        dim: usize,
        (n, start): (usize, usize),
    ) -> Result<Destinations<'a>> {
        let strides = out.strides();
        let (mut places, mut dims) = (ScatterPlaces::default(), 0usize);
        for d in (0..index.shape().len()).rev().filter(|&d| index.shape()[d] != 1) {
            let along = |stride: usize| if d == dim { 0 } else { stride as u64 };
            let new =
                [along(strides[d]), index.strides()[d] as u64, src.strides()[d] as u64, u64::from(d == dim)];
            let fits = dims < DIMS && index.numel() < u32::MAX as usize;
            if !fits {
                let given = format!("{}, {}", index.notation(), src.notation());
                let rule = "tensors of more than 6 dims, or 2^32 elements or more";
                return Err(Error::unsupported(verb, rule, given, "reshape or split them"));
            }
            (places.out[dims], places.index[dims], places.src[dims]) = (new[0], new[1], new[2]);
            (places.position[dims], places.len[dims]) = (new[3], index.shape()[d] as u32);
            dims += 1;
        }
        places.dims = dims as u32;
        Ok(Destinations { index, places, stride: strides[dim], held: out[dim], n, start })
    }

    /// Adds the arguments that all kernels over an index share, and starts the kernel.
    fn run(&self, launch: KernelLaunch, fault: &'static Fault) -> Result<()> {
        let all = self.index.numel();
        let launch = launch.arg(self.places).arg(all as u64).arg(self.stride as u64).arg(self.held as u64);
        let launch = launch.arg(self.n as u64).arg(self.start as u64).arg(fault.code).may_report(&[fault]);
        launch.start(blocks(all), THREADS, 0)
    }

    /// Returns, for each element of the result, 1 plus the last position that writes to it, or 0.
    fn owners(&self, gpu: &Gpu, out: &Shape, fault: &'static Fault) -> Result<Tensor> {
        let mut owners = gpu.zeros(DType::I32, out)?;
        let launch = gpu.kernel("scatter", "claim", DType::I64)?.read(self.index).write(&mut owners);
        self.run(launch, fault)?;
        Ok(owners)
    }
}

/// Returns `x` with the elements of `src` written by index along `dim`; the last one stays. `place` is the global extent
/// of the dim and the first index that this rank stores.
///
/// # Errors
/// Refuses indices of more than 6 dims and of 2^32 elements or more. Returns an error if the device has no memory left
/// or a launch fails. The kernel records an index out of range.
pub(super) fn scatter(
    x: &Tensor,
    index: &Tensor,
    src: &Tensor,
    dim: usize,
    place: (usize, usize),
) -> Result<Tensor> {
    let (gpu, mut out) = (Gpu::of(x)?, x.to_owned_copy()?);
    let shape = x.shape().clone();
    let to = Destinations::new("scatter", &shape, index, src, dim, place)?;
    if index.numel() == 0 {
        return Ok(out);
    }
    let owners = to.owners(&gpu, &shape, &SCATTER)?;
    let launch = gpu.kernel("scatter", "put", x.dtype())?.read(index).read(&owners).read(src).write(&mut out);
    to.run(launch, &SCATTER)?;
    Ok(out)
}

/// Returns the maximum or minimum of `x` and the elements of `src` by destination.
///
/// # Errors
/// Returns the errors of [`scatter`].
pub(super) fn scatter_extremum(
    x: &Tensor,
    index: &Tensor,
    src: &Tensor,
    dim: usize,
    place: (usize, usize),
    op: ReduceOp,
) -> Result<Tensor> {
    let largest = op == ReduceOp::Max;
    let (verb, fault) = match largest {
        true => ("scatter_max", &SCATTER_MAX),
        false => ("scatter_min", &SCATTER_MIN),
    };
    let (gpu, x) = (Gpu::of(x)?, x.contiguous()?);
    let to = Destinations::new(verb, x.shape(), index, src, dim, place)?;
    let of_size = if x.dtype().size_bytes() == 8 { DType::I64 } else { DType::I32 };
    let mut keys = gpu.uninit(of_size, x.shape())?;
    let mut out = gpu.uninit(x.dtype(), x.shape())?;
    let (n, flag) = (x.numel(), u32::from(largest));
    let launch = gpu.kernel("scatter", "encode", x.dtype())?.read(&x).write(&mut keys);
    launch.arg(n as u64).arg(flag).start(blocks(n), THREADS, 0)?;
    let stem = if largest { "largest" } else { "smallest" };
    let launch = gpu.kernel("scatter", stem, x.dtype())?.read(index).read(src).write(&mut keys);
    to.run(launch, fault)?;
    let launch = gpu.kernel("scatter", "decode", x.dtype())?.read(&keys).write(&mut out);
    launch.arg(n as u64).arg(flag).start(blocks(n), THREADS, 0)?;
    Ok(out)
}

/// Returns zeros of shape `out` with the integers of `src` added by index along `dim`. `place` is that of [`scatter`].
///
/// # Errors
/// Returns the errors of [`scatter`].
pub(super) fn integer_sums(
    index: &Tensor,
    src: &Tensor,
    dim: usize,
    place: (usize, usize),
    out: &Shape,
) -> Result<Tensor> {
    let gpu = Gpu::of(src)?;
    let mut sums = gpu.zeros(src.dtype(), out)?;
    if index.numel() > 0 {
        let to = Destinations::new("scatter_add", out, index, src, dim, place)?;
        let launch = gpu.kernel("scatter", "add", src.dtype())?.read(index).read(src).write(&mut sums);
        to.run(launch, &SCATTER_ADD)?;
    }
    Ok(sums)
}

/// Returns true at the positions along `dim` whose index, below `extent`, no later position has.
///
/// # Errors
/// Returns the errors of [`scatter`].
pub(super) fn last_write(index: &Tensor, dim: usize, extent: usize) -> Result<Tensor> {
    let (gpu, index) = (Gpu::of(index)?, index.contiguous()?);
    let mut shape = index.shape().clone();
    shape[dim] = extent;
    let to = Destinations::new("last_write", &shape, &index, &index, dim, (extent, 0))?;
    let mut out = gpu.uninit(DType::Bool, index.shape())?;
    let owners = to.owners(&gpu, &shape, &LAST_WRITE)?;
    let launch = gpu.kernel("scatter", "last", DType::Bool)?.read(&index).read(&owners).write(&mut out);
    to.run(launch, &LAST_WRITE)?;
    Ok(out)
}

/// Joins one index per dim to the index of the flattened dims.
///
/// # Errors
/// Returns the errors of [`scatter`].
pub(super) fn linear_index(ins: &[Tensor], extents: &Dims) -> Result<Tensor> {
    let gpu = Gpu::of(&ins[0])?;
    let ins = ins.iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>()?;
    let mut out = gpu.uninit(DType::I64, ins[0].shape())?;
    let mut lens = [0u64; JOINED];
    lens.iter_mut().zip(extents).for_each(|(to, &n)| *to = n as u64);
    let all: Vec<&Tensor> = ins.iter().collect();
    let launch = gpu.kernel("scatter", "linear", DType::I64)?.read_all::<JOINED>(&all);
    let launch = launch.write(&mut out).arg(lens).arg(ins.len() as u32).arg(ins[0].numel() as u64);
    launch.arg(LINEAR_INDEX.code).may_report(&[&LINEAR_INDEX]).start(blocks(ins[0].numel()), THREADS, 0)?;
    Ok(out)
}

/// Counts the indices of `x` below `bins` that lie in the `held` ones from `start` on.
///
/// # Errors
/// Returns the errors of [`scatter`].
pub(super) fn bincount(x: &Tensor, bins: usize, (start, held): (usize, usize)) -> Result<Tensor> {
    let (gpu, x) = (Gpu::of(x)?, x.contiguous()?);
    let mut counts = gpu.zeros(DType::I64, [held])?;
    let launch = gpu.kernel("scatter", "bincount", DType::I64)?.read(&x).write(&mut counts);
    let launch = launch.arg(x.numel() as u64).arg(bins as u64).arg(start as u64).arg(held as u64);
    launch.arg(BINCOUNT.code).may_report(&[&BINCOUNT]).start(blocks(x.numel()), THREADS, 0)?;
    Ok(counts)
}

/// Returns the number of blocks with a thread per element, at most 2^20; the kernels loop over further elements.
fn blocks(elements: usize) -> u32 {
    elements.div_ceil(THREADS as usize).min(1 << 20) as u32
}
