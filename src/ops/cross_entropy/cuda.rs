//! CUDA kernels of cross entropy and of its derivative.

use crate::error::Result;
use crate::ops::index::cuda::HeldRange;
use crate::tensor::Tensor;
use crate::tensor::cuda::Gpu;
use crate::tensor::cuda::fault::FaultCode;

/// Computes this rank's contribution to `ln(s) + m - logits[target]` per row; see
/// [`CrossEntropy`](crate::ops::CrossEntropy). Copies operands that are not contiguous.
///
/// # Errors
/// Returns an error if the device has no memory left or the launch fails. The kernel records a target out of range.
pub(crate) fn cross_entropy([logits, target, m, s]: [&Tensor; 4], classes: HeldRange) -> Result<Tensor> {
    let gpu = Gpu::of(logits)?;
    let (logits, target, m, s) =
        (logits.contiguous()?, target.contiguous()?, m.contiguous()?, s.contiguous()?);
    let (rows, held) = (target.numel(), logits.shape().last().map_or(0, |&n| n));
    let mut out = gpu.uninit(s.dtype(), target.shape())?;
    let launch = gpu.kernel("cross_entropy", "cross_entropy", logits.dtype())?;
    let launch = launch.read(&logits).read(&target).read(&m).read(&s).write(&mut out);
    let launch = launch.arg(rows as u64).arg(held as u64).arg(classes.n as u64).arg(classes.start as u64);
    launch.arg(FaultCode::CrossEntropy as u32).faults().run(rows.div_ceil(256) as u32, 256, 0)?;
    Ok(out)
}

/// Computes `dy (e^(logits - m) / s - onehot(target))` for this rank's classes.
///
/// # Errors
/// Returns the errors of [`cross_entropy`].
pub(crate) fn cross_entropy_grad(
    [logits, target, m, s, dy]: [&Tensor; 5],
    classes: HeldRange,
) -> Result<Tensor> {
    // Several rows shorter than this share a block of threads.
    const SHORT: usize = 512;
    // Longer rows are cut into pieces of this length, one per block.
    const PIECE: usize = 2048;
    let gpu = Gpu::of(logits)?;
    let (logits, target) = (logits.contiguous()?, target.contiguous()?);
    let (m, s, dy) = (m.contiguous()?, s.contiguous()?, dy.contiguous()?);
    let (rows, held) = (target.numel(), logits.shape().last().map_or(0, |&n| n));
    let mut out = gpu.uninit(logits.dtype(), logits.shape())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let (pieces, blocks) = match held {
        ..SHORT => (0, (rows * held).div_ceil(256)),
        _ => (held.div_ceil(PIECE), rows * held.div_ceil(PIECE)),
    };
    let launch = gpu.kernel("cross_entropy_grad", "cross_entropy_grad", logits.dtype())?;
    let launch = launch.read(&logits).read(&target).read(&m).read(&s).read(&dy).write(&mut out);
    let launch = launch.arg(rows as u64).arg(held as u32).arg(classes.n as u64).arg(classes.start as u64);
    launch.arg(pieces as u32).arg(FaultCode::CrossEntropyGrad as u32).faults().run(blocks as u32, 256, 0)?;
    Ok(out)
}
