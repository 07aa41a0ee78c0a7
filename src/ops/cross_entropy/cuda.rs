//! CUDA kernels of cross entropy and of its derivatives.

use bytemuck::{Pod, Zeroable};

use super::rows::repeated_rows;
use crate::error::Result;
use crate::ops::CrossEntropyTerms;
use crate::ops::index::cuda::HeldRange;
use crate::tensor::cuda::fault::Fault;
use crate::tensor::cuda::{Gpu, RowEntries, RowLaunch, entries, is_aligned, pack_len};
use crate::tensor::{Shape, Tensor};

static LOSS: Fault = Fault::index(404, "cross_entropy");
static GRADIENT: Fault = Fault::index(405, "cross_entropy_grad");

/// Computes this rank's contribution to the loss of each row; see [`CrossEntropy`](crate::ops::CrossEntropy). Copies
/// operands that are not contiguous.
///
/// # Errors
/// Returns an error if the device has no memory left or the launch fails. The kernel records a target out of range.
pub(crate) fn cross_entropy(
    [logits, target, m, s]: [&Tensor; 4],
    classes: HeldRange,
    terms: &CrossEntropyTerms,
) -> Result<Tensor> {
    let gpu = Gpu::of(logits)?;
    let (logits, target, m, s) =
        (logits.contiguous()?, target.contiguous()?, m.contiguous()?, s.contiguous()?);
    let (rows, held) = (target.numel(), logits.shape().last().map_or(0, |&n| n));
    let mut out = gpu.uninit(s.dtype(), target.shape())?;
    let launch = gpu.kernel("cross_entropy", "cross_entropy", logits.dtype())?;
    let launch = launch.read(&logits).read(&target).read(&m).read(&s).write(&mut out);
    let launch = launch.arg(rows as u64).arg(held as u64).arg(classes.n as u64).arg(classes.start as u64);
    let launch = launch.arg(TermsArg::new(terms));
    launch.arg(LOSS.code).may_report(&[&LOSS]).start(rows.div_ceil(256) as u32, 256, 0)?;
    Ok(out)
}

/// `struct Terms` in `kernels/cuda/cross_entropy.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TermsArg {
    nll: f64,
    z: f64,
    ignored: i64,
    /// 1 if rows with the target `ignored` are left out.
    ignores: u64,
}

impl TermsArg {
    fn new(terms: &CrossEntropyTerms) -> TermsArg {
        TermsArg {
            nll: terms.nll_factor.0,
            z: terms.z_factor.0,
            ignored: terms.ignore_index.unwrap_or(0),
            ignores: u64::from(terms.ignore_index.is_some()),
        }
    }
}

/// Computes the gradient of this rank's logits; see [`CrossEntropyGrad`](crate::ops::CrossEntropyGrad).
///
/// # Errors
/// Returns the errors of [`cross_entropy`].
pub(crate) fn cross_entropy_grad(
    [logits, target, m, s, dy]: [&Tensor; 5],
    classes: HeldRange,
    terms: &CrossEntropyTerms,
) -> Result<Tensor> {
    let gpu = Gpu::of(logits)?;
    let (logits, target) = (logits.contiguous()?, target.contiguous()?);
    let (m, s, dy) = (m.contiguous()?, s.contiguous()?, dy.contiguous()?);
    let (rows, held) = (target.numel(), logits.shape().last().map_or(0, |&n| n));
    let mut out = gpu.uninit(logits.dtype(), logits.shape())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let Pieces { pieces, each, blocks } = Pieces::of(&logits, &out, rows, held);
    let launch = gpu.kernel("cross_entropy_grad", "cross_entropy_grad", logits.dtype())?;
    let launch = launch.read(&logits).read(&target).read(&m).read(&s).read(&dy).write(&mut out);
    let launch = launch.arg(rows as u64).arg(held as u32).arg(classes.n as u64).arg(classes.start as u64);
    let launch = launch.arg(pieces as u32).arg(each as u32).arg(TermsArg::new(terms));
    launch.arg(GRADIENT.code).may_report(&[&GRADIENT]).start(blocks as u32, 256, 0)?;
    Ok(out)
}

/// The work of the gradient kernels' threads; see `kernels/cuda/pieces.cuh`.
struct Pieces {
    /// The number of pieces of a row, one per block; 0 if several rows share a block.
    pieces: usize,
    /// The number of elements per thread if several rows share a block.
    each: usize,
    blocks: usize,
}

impl Pieces {
    fn of(logits: &Tensor, out: &Tensor, rows: usize, held: usize) -> Pieces {
        // Several rows shorter than this share a block of threads.
        const SHORT: usize = 512;
        const PIECE: usize = 2048;
        if held >= SHORT {
            let pieces = held.div_ceil(PIECE);
            return Pieces { pieces, each: 1, blocks: rows * pieces };
        }
        let pack = pack_len(logits.dtype());
        let packed = held.is_multiple_of(pack) && is_aligned(logits) && is_aligned(out);
        let each = if packed { pack } else { 1 };
        Pieces { pieces: 0, each, blocks: (rows * held / each).div_ceil(256) }
    }
}

/// Computes `sum(q (ln(s) - (logits - m)))` per row; see [`SoftCrossEntropy`](crate::ops::SoftCrossEntropy).
///
/// # Errors
/// Returns an error if the device has no memory left or the launch fails.
pub(super) fn soft_cross_entropy(
    verb: &str,
    [logits, q, m, s]: [&Tensor; 4],
    shape: &Shape,
) -> Result<Tensor> {
    let gpu = Gpu::of(logits)?;
    if logits.numel() == 0 {
        return gpu.zeros(s.dtype(), shape.clone());
    }
    let mut out = gpu.uninit(s.dtype(), shape.clone())?;
    let (logits, m, s) = (logits.contiguous()?, m.contiguous()?, s.contiguous()?);
    let (q, step) = repeated_rows(q)?;
    let step = step as u64;
    let rows = RowLaunch::of(verb, &logits)?;
    let launch = rows.kernel(&gpu, entries!("soft_cross_entropy"), [&logits, &q])?;
    let launch = launch.read(&logits).read(&q).read(&m).read(&s);
    rows.run(&gpu, launch.write(&mut out).arg(step), 0)?;
    Ok(out)
}

/// Computes `dy (sum e^(logits - m) / s - q)` for this rank's classes. `row_sum` is a number for all rows, or a tensor
/// `[.., 1]`.
///
/// # Errors
/// Returns the errors of [`soft_cross_entropy`].
pub(super) fn soft_cross_entropy_grad(
    [logits, q, m, s, dy]: [&Tensor; 5],
    row_sums: Option<&Tensor>,
    row_sum: f64,
) -> Result<Tensor> {
    let gpu = Gpu::of(logits)?;
    let mut out = gpu.uninit(logits.dtype(), logits.shape())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let logits = logits.contiguous()?;
    let (m, s, dy) = (m.contiguous()?, s.contiguous()?, dy.contiguous()?);
    let row_sums = row_sums.map(Tensor::contiguous).transpose()?;
    let (q, step) = repeated_rows(q)?;
    let step = step as u64;
    let (rows, held) = (dy.numel(), logits.shape().last().map_or(0, |&n| n));
    let Pieces { pieces, each, blocks } = Pieces::of(&logits, &out, rows, held);
    let launch = gpu.kernel("soft_cross_entropy_grad", "soft_cross_entropy_grad", logits.dtype())?;
    let launch = launch.read(&logits).read(&q).read(&m).read(&s).read(&dy).read_or_null(row_sums.as_ref());
    let launch = launch.write(&mut out).arg(row_sum).arg(step).arg(rows as u64).arg(held as u32);
    launch.arg(pieces as u32).arg(each as u32).start(blocks as u32, 256, 0)?;
    Ok(out)
}
