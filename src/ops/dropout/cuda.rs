//! The CUDA kernel of dropout.

use crate::error::Result;
use crate::placement::Region;
use crate::rng::cuda::{DrawArg, Place, run_over};
use crate::rng::{Draw, keep_threshold};
use crate::tensor::cuda::Gpu;
use crate::tensor::{DType, Shape, Tensor};

/// Applies [`cpu::dropout`](super::cpu::dropout) to the elements of `region` of a tensor of shape `global`.
///
/// # Errors
/// Refuses a `p` outside [0, 1]. Returns an error if the device has no memory left or the launch fails.
pub(super) fn dropout(draw: Draw, p: f64, x: &Tensor, global: &Shape, region: &Region) -> Result<Tensor> {
    let (gpu, threshold) = (Gpu::of(x)?, keep_threshold("dropout", p)?);
    if p == 0.0 {
        return x.contiguous();
    }
    if p == 1.0 {
        return gpu.zeros(x.dtype(), x.shape());
    }
    let (x, scale) = (x.contiguous()?, 1.0 / (1.0 - p));
    let mut out = gpu.uninit(x.dtype(), x.shape())?;
    for place in Place::all(region, global, 4)? {
        let launch = gpu.kernel("dropout", "dropout", x.dtype())?.read(&x).write(&mut out);
        let launch = launch.arg(place).arg(DrawArg::from(draw)).arg(threshold);
        let launch = if x.dtype() == DType::F64 { launch.arg(scale) } else { launch.arg(scale as f32) };
        run_over(launch, &gpu, place.units())?;
    }
    Ok(out)
}
