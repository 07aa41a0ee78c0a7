//! The CUDA kernels of `argmax` and `first_index`.

use crate::error::{Error, Result};
use crate::tensor::cuda::Gpu;
use crate::tensor::cuda::reduce::KeptDims;
use crate::tensor::{DType, Shape, Tensor};

const THREADS: u32 = 256;

/// Returns the index along `dim` of the first largest element, as [`cpu::argmax`](super::cpu::argmax). The dim is
/// removed.
///
/// # Errors
/// Returns an error if the device has no memory left or the launch fails.
pub(super) fn argmax(verb: &str, x: &Tensor, dim: usize) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let (n, stride) = (x.shape()[dim], x.strides()[dim]);
    let others: Vec<usize> = (0..x.shape().len()).filter(|&d| d != dim).collect();
    let mut out = gpu.uninit(DType::I64, others.iter().map(|&d| x.shape()[d]).collect::<Shape>())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let strides = others.iter().zip(out.strides()).map(|(&d, &to)| (x.shape()[d], x.strides()[d], to));
    // A kernel's index may pass the last element by a block's packs.
    let Some(nest) = KeptDims::new(strides).filter(|_| n <= u32::MAX as usize - (1 << 16)) else {
        if !x.is_contiguous() {
            return argmax(verb, &x.to_owned_copy()?, dim);
        }
        let given = format!("dim {dim} of {}", x.notation());
        return Err(Error::unsupported(verb, "2^32 elements or more in one kernel", given, "split it"));
    };
    let lines = out.numel();
    if stride == 1 && n > 8 {
        let team = if n > 1024 { 3u32 } else { 0 };
        let launch = gpu.kernel("argmax", "rows", x.dtype())?.read(x).write(&mut out).arg(nest);
        let launch = launch.arg(lines as u64).arg(n as u32).arg(team);
        launch.start(lines.div_ceil(8 >> team) as u32, THREADS, 0)?;
    } else {
        let launch = gpu.kernel("argmax", "columns", x.dtype())?.read(x).write(&mut out).arg(nest);
        let launch = launch.arg(lines as u64).arg(stride as u64).arg(n as u32);
        launch.start(lines.div_ceil(THREADS as usize) as u32, THREADS, 0)?;
    }
    Ok(out)
}

/// Returns the first index of a value as [`cpu::first_index`](super::cpu::first_index).
///
/// # Errors
/// Returns the errors of [`argmax`].
pub(super) fn first_index(
    verb: &str,
    x: &Tensor,
    value: &Tensor,
    dim: usize,
    start: usize,
) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let (n, stride) = (x.shape()[dim], x.strides()[dim]);
    let value = value.contiguous()?;
    let mut out = gpu.uninit(DType::I64, value.shape())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let others = (0..x.shape().len()).filter(|&d| d != dim);
    let strides = others.map(|d| (x.shape()[d], x.strides()[d], out.strides()[d]));
    let Some(nest) = KeptDims::new(strides).filter(|_| n <= u32::MAX as usize) else {
        if !x.is_contiguous() {
            return first_index(verb, &x.to_owned_copy()?, &value, dim, start);
        }
        let given = format!("dim {dim} of {}", x.notation());
        return Err(Error::unsupported(verb, "2^32 elements or more in one kernel", given, "split it"));
    };
    let (lines, by_rows) = (out.numel(), stride == 1 && n > 8);
    let stem = if by_rows { "rows" } else { "columns" };
    let launch = gpu.kernel("first_index", stem, x.dtype())?.read(x).read(&value).write(&mut out).arg(nest);
    let launch = launch.arg(lines as u64).arg(stride as u64).arg(start as u64).arg(n as u32);
    let per_block = if by_rows { THREADS as usize / 32 } else { THREADS as usize };
    launch.start(lines.div_ceil(per_block) as u32, THREADS, 0)?;
    Ok(out)
}
