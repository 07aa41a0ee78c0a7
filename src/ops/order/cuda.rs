//! CUDA kernels of sorting and of the largest or smallest elements of rows: `kernels/cuda/sort.cu`.

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::Tensors;
use crate::ops::index::lines::{rows_along, rows_back};
use crate::ops::index::radix;
use crate::tensor::cuda::Gpu;
use crate::tensor::{DType, Tensor};

const THREADS: u32 = 256;

/// Returns the first `k` elements along `dim` in order, and their indices.
///
/// # Errors
/// Refuses tensors of 2^32 elements or more. Returns an error if the device has no memory left or a launch fails.
pub(super) fn first_of_rows(
    verb: &str,
    x: &Tensor,
    dim: usize,
    descending: bool,
    k: usize,
) -> Result<Tensors> {
    let block = x.shape()[dim].max(1);
    first_of_blocks(verb, x, dim, descending, (k, block, 0))
}

/// Returns the first `k` elements of each block of `block` indices of `dim` in order, and their indices plus `base`.
///
/// # Errors
/// Returns the errors of [`first_of_rows`].
pub(super) fn first_of_blocks(
    verb: &str,
    x: &Tensor,
    dim: usize,
    descending: bool,
    (k, block, base): (usize, usize, usize),
) -> Result<Tensors> {
    let (gpu, n) = (Gpu::of(x)?, x.shape()[dim]);
    let rows = rows_along(x, dim)?;
    let (last, all) = (rows.shape().len() - 1, n.div_ceil(block) * k);
    let mut shape = rows.shape().clone();
    shape[last] = all;
    let (mut values, mut indices) = (gpu.uninit(x.dtype(), &shape)?, gpu.uninit(DType::I64, &shape)?);
    if values.numel() > 0 {
        if rows.numel() >= u32::MAX as usize {
            let rule = "2^32 elements or more in one kernel";
            return Err(Error::unsupported(verb, rule, x.notation(), "split it"));
        }
        for (b, start) in (0..n).step_by(block).enumerate() {
            let part = rows.narrow(last, start, block.min(n - start))?.contiguous()?;
            let sorted = sorted_positions(&gpu, &part, descending)?;
            let (len, taken) = (part.shape()[last], part.numel() / part.shape()[last] * k);
            let launch = gpu.kernel("sort", "take", x.dtype())?.read(&part).read(&sorted);
            let launch = launch.write(&mut values).write(&mut indices).arg(taken as u64).arg(len as u32);
            let launch = launch.arg(k as u32).arg(all as u32).arg((b * k) as u32).arg((base + start) as u64);
            launch.start(taken.div_ceil(THREADS as usize) as u32, THREADS, 0)?;
        }
    }
    Ok(smallvec![rows_back(&values, dim)?, rows_back(&indices, dim)?])
}

/// Returns the positions of the elements of contiguous rows, each row's in order: a stable radix sort by the keys' 32-bit
/// words, the lower first, then by rows.
fn sorted_positions(gpu: &Gpu, x: &Tensor, descending: bool) -> Result<Tensor> {
    let (hits, n) = (x.numel(), *x.shape().last().expect("rows have a dim"));
    let (words, bits) = match x.dtype().size_bytes() {
        8 => (2, 32),
        size => (1, 8 * size as u32),
    };
    let blocks = hits.div_ceil(THREADS as usize) as u32;
    let mut positions: Option<Tensor> = None;
    for word in 0..words {
        let mut keys = gpu.uninit(DType::I32, [hits])?;
        let launch = gpu.kernel("sort", "keys", x.dtype())?.read(x).read_or_null(positions.as_ref());
        let launch =
            launch.write(&mut keys).arg(hits as u64).arg(u32::from(descending)).arg(32 * word as u32);
        launch.start(blocks, THREADS, 0)?;
        positions = Some(radix::sort(gpu, keys, positions, bits)?.1);
    }
    let positions = positions.expect("a key has a word");
    if hits == n {
        return Ok(positions);
    }
    let mut keys = gpu.uninit(DType::I32, [hits])?;
    let launch = gpu.kernel("sort", "rows", DType::I64)?.read(&positions).write(&mut keys);
    launch.arg(hits as u64).arg(n as u32).start(blocks, THREADS, 0)?;
    let row_bits = usize::BITS - (hits / n - 1).leading_zeros();
    Ok(radix::sort(gpu, keys, Some(positions), row_bits)?.1)
}
