//! CUDA kernels of softmax over the last dim, of its logarithm, and of their derivatives: the counterpart of `cpu.rs`.

use crate::error::Result;
use crate::tensor::Tensor;
use crate::tensor::cuda::{Gpu, RowEntries, RowLaunch, entries, statistic};

/// Computes `e^x / sum(e^x)` along the last dim, as [`cpu::softmax`](super::cpu::softmax).
///
/// # Errors
/// Returns an error if the device has no memory left or the launch fails.
pub(crate) fn softmax(verb: &str, x: &Tensor) -> Result<Tensor> {
    over_rows(verb, entries!("softmax"), &[x])
}

/// Computes `x - ln(sum(e^x))` along the last dim.
///
/// # Errors
/// Returns the errors of [`softmax`].
pub(crate) fn log_softmax(verb: &str, x: &Tensor) -> Result<Tensor> {
    over_rows(verb, entries!("log_softmax"), &[x])
}

/// Computes the gradient of a softmax's input from the gradient of its output and the output.
///
/// # Errors
/// Returns the errors of [`softmax`].
pub(crate) fn softmax_backward(verb: &str, dy: &Tensor, y: &Tensor) -> Result<Tensor> {
    over_rows(verb, entries!("softmax_grad"), &[dy, y])
}

/// Computes the gradient of a log-softmax's input from the gradient of its output and the output.
///
/// # Errors
/// Returns the errors of [`softmax`].
pub(crate) fn log_softmax_backward(verb: &str, dy: &Tensor, y: &Tensor) -> Result<Tensor> {
    over_rows(verb, entries!("log_softmax_grad"), &[dy, y])
}

/// Computes `sum(e^(x - m))` along the last dim, which stays with extent 1, in f32 (f64 for f64).
///
/// # Errors
/// Returns the errors of [`softmax`].
pub(crate) fn sum_exp(verb: &str, x: &Tensor, m: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let (x, m) = (x.contiguous()?, m.contiguous()?);
    let mut sums = statistic(&gpu, &x)?;
    if x.numel() > 0 {
        let rows = RowLaunch::of(verb, &x)?;
        let launch = rows.kernel(&gpu, entries!("sum_exp"), [&x])?.read(&x).read(&m).write(&mut sums);
        rows.run(&gpu, launch, 0)?;
    }
    Ok(sums)
}

fn over_rows(verb: &str, entries: RowEntries, ins: &[&Tensor]) -> Result<Tensor> {
    let gpu = Gpu::of(ins[0])?;
    let mut out = gpu.uninit(ins[0].dtype(), ins[0].shape())?;
    if out.numel() > 0 {
        let ins = ins.iter().map(|x| x.contiguous()).collect::<Result<Vec<Tensor>>>()?;
        let rows = RowLaunch::of(verb, &ins[0])?;
        let operands = ins.iter().chain([&out]);
        let launch = ins.iter().fold(rows.kernel(&gpu, entries, operands)?, |launch, x| launch.read(x));
        rows.run(&gpu, launch.write(&mut out), ins.len())?;
    }
    Ok(out)
}
