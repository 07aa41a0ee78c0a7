//! CUDA kernels of `prod` and its derivative: the counterpart of `cpu.rs`.

use super::cpu::{computed, reduced_last};
use crate::error::{Error, Result};
use crate::tensor::cuda::Gpu;
use crate::tensor::cuda::reduce::product_of_rows;
use crate::tensor::{DType, Dims, Shape, Tensor};

/// Multiplies as [`cpu::prod`](super::cpu::prod).
///
/// # Errors
/// Returns an error if the device has no memory left or the launch fails.
pub(super) fn prod(verb: &str, x: &Tensor, dims: &[usize], to: DType) -> Result<Tensor> {
    let n: usize = dims.iter().map(|&d| x.shape()[d]).product();
    let kept: Shape = (0..x.shape().len()).filter(|d| !dims.contains(d)).map(|d| x.shape()[d]).collect();
    if kept.numel() == 0 || n == 0 {
        return Tensor::full_on(x.device(), to, kept, 1.0);
    }
    let rows = x.permute(&reduced_last(dims, x.shape().len()))?.cast(computed(x.dtype()))?.contiguous()?;
    product_of_rows(verb, &rows.reshape([kept.numel(), n])?)?.reshape(kept)?.cast(to)
}

/// Returns `dy` times the product of the other elements, as [`cpu::prod_grad`](super::cpu::prod_grad).
///
/// # Errors
/// Returns the errors of [`prod`].
pub(super) fn prod_grad(dy: &Tensor, x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    // The reduced dims first, so that neighbouring threads read neighbouring elements.
    let order: Dims =
        dims.iter().copied().chain((0..x.shape().len()).filter(|d| !dims.contains(d))).collect();
    let (gpu, wide) = (Gpu::of(x)?, computed(x.dtype()));
    let n: usize = dims.iter().map(|&d| x.shape()[d]).product();
    let columns = x.permute(&order)?.cast(wide)?.contiguous()?;
    let dy = dy.permute(&order)?.cast(wide)?.contiguous()?;
    let mut out = gpu.uninit(wide, columns.shape())?;
    if out.numel() > 0 {
        let count = dy.numel();
        if n > u32::MAX as usize {
            let rule = "2^32 elements or more in one kernel";
            return Err(Error::unsupported("prod_grad", rule, x.notation(), "split it"));
        }
        let launch = gpu.kernel("prod", "others", wide)?.read(&dy).read(&columns).write(&mut out);
        launch.arg(count as u64).arg(n as u32).start(count.div_ceil(256) as u32, 256, 0)?;
    }
    let mut back = Dims::from_elem(0, order.len());
    order.iter().enumerate().for_each(|(k, &d)| back[d] = k);
    out.cast(x.dtype())?.permute(&back)?.contiguous()
}
