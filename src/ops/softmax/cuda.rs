//! Softmax over the last dim, its logarithm, and their derivatives: the twin of `cpu::softmax`.

use crate::error::Result;
use crate::tensor::Tensor;
use crate::tensor::cuda::{Gpu, RowEntries, RowLaunch, entries, statistic};

/// `e^x / sum(e^x)` along the last dim, as [`cpu::softmax`](super::cpu::softmax).
///
/// # Errors
/// A device without room, a kernel that fails.
pub(crate) fn softmax(verb: &str, x: &Tensor) -> Result<Tensor> {
    over_rows(verb, entries!("softmax"), &[x])
}

/// `x - ln(sum(e^x))` along the last dim.
///
/// # Errors
/// As [`softmax`].
pub(crate) fn log_softmax(verb: &str, x: &Tensor) -> Result<Tensor> {
    over_rows(verb, entries!("log_softmax"), &[x])
}

/// The gradient of the input of a softmax, from that of its output and the output.
///
/// # Errors
/// As [`softmax`].
pub(crate) fn softmax_backward(verb: &str, dy: &Tensor, y: &Tensor) -> Result<Tensor> {
    over_rows(verb, entries!("softmax_grad"), &[dy, y])
}

/// The gradient of the input of a log-softmax, from that of its output and the output.
///
/// # Errors
/// As [`softmax`].
pub(crate) fn log_softmax_backward(verb: &str, dy: &Tensor, y: &Tensor) -> Result<Tensor> {
    over_rows(verb, entries!("log_softmax_grad"), &[dy, y])
}

/// `sum(e^(x - m))` along the last dim, kept with extent 1, in f32 (f64 for f64).
///
/// # Errors
/// As [`softmax`].
pub(crate) fn sum_exp(verb: &str, x: &Tensor, m: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let (x, m) = (x.contiguous()?, m.contiguous()?);
    let mut sums = statistic(&gpu, &x)?;
    if x.numel() > 0 {
        let rows = RowLaunch::of(verb, &x)?;
        let launch = rows.kernel(&gpu, entries!("sum_exp"))?.read(&x).read(&m).write(&mut sums);
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
        let launch = ins.iter().fold(rows.kernel(&gpu, entries)?, |launch, x| launch.read(x));
        rows.run(&gpu, launch.write(&mut out), ins.len())?;
    }
    Ok(out)
}
