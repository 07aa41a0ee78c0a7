//! Sums of terms, block by block: a block's terms are written to a small tensor and summed while they are in the cache.

use super::dims::kept_shape;
use crate::error::Result;
use crate::tensor::{DType, LEAF, ReduceOp, SplitRule, Tensor, cpu};

/// The most elements of a block.
const BLOCK: usize = 1 << 16;
/// The fewest columns of a block, if elements of a row are neighbours in memory.
const COLUMNS: usize = 256;

/// The function that computes a block's terms.
pub(super) type Terms<'a> = &'a dyn Fn(&Tensor, Option<&Tensor>) -> Result<Tensor>;

/// Sums `terms` of `x` over `dims`, which are ascending and stay with extent 1, along the tree of
/// [`cpu::reduce`](crate::tensor::cpu::reduce). `with` has extent 1 at `dims`. The terms have dtype `to`.
///
/// # Errors
/// Returns the first error of `terms`.
pub(in crate::ops) fn sum_blocks(
    x: &Tensor,
    with: Option<&Tensor>,
    dims: &[usize],
    to: DType,
    terms: Terms,
) -> Result<Tensor> {
    let kept = kept_shape(x.shape(), dims);
    let mut out = Tensor::zeros(to, kept);
    if x.numel() > 0 {
        write_sums(x, with, dims, terms, &mut out, 0)?;
    }
    Ok(out)
}

/// Writes the sums of `x`, which belong at `offset` of `out`, after dividing the kept dims into blocks.
fn write_sums(
    x: &Tensor,
    with: Option<&Tensor>,
    dims: &[usize],
    terms: Terms,
    out: &mut Tensor,
    offset: usize,
) -> Result<()> {
    let last = x.shape().len().saturating_sub(1);
    let least = |d: usize| if d == last && x.strides()[d] == 1 { COLUMNS } else { 1 };
    let kept = (0..x.shape().len()).filter(|d| !dims.contains(d));
    let split = kept.into_iter().find(|&d| x.shape()[d] > least(d) && x.numel() > BLOCK);
    let Some(d) = split else {
        let sums = sum_node(x, with, dims, terms)?;
        let to = out.strides().to_vec();
        return sums.copy_block(out, sums.shape(), (0, sums.strides()), (offset, &to));
    };
    let half = (x.shape()[d] / 2).next_multiple_of(least(d).min(16)).min(x.shape()[d] - 1);
    for (start, len) in [(0, half), (half, x.shape()[d] - half)] {
        let with = with.map(|with| with.narrow(d, start, len)).transpose()?;
        let offset = offset + start * out.strides()[d];
        write_sums(&x.narrow(d, start, len)?, with.as_ref(), dims, terms, out, offset)?;
    }
    Ok(())
}

/// Returns the sums of `x`: of one block, or of the two nodes below.
fn sum_node(x: &Tensor, with: Option<&Tensor>, dims: &[usize], terms: Terms) -> Result<Tensor> {
    let outermost = dims.iter().copied().find(|&d| x.shape()[d] > 1);
    let least = |d: usize| if dims.last() == Some(&d) { LEAF } else { 1 };
    match outermost.filter(|&d| x.shape()[d] > least(d) && x.numel() > BLOCK) {
        None => cpu::reduce("sum", &terms(x, with)?, dims, ReduceOp::Sum, true),
        Some(d) => {
            let (n, mid) = (x.shape()[d], SplitRule::Halves.mid(0, x.shape()[d]));
            let mut left = sum_node(&x.narrow(d, 0, mid)?, with, dims, terms)?;
            let right = sum_node(&x.narrow(d, mid, n - mid)?, with, dims, terms)?;
            ReduceOp::Sum.fold(&mut left, &right)?;
            Ok(left)
        }
    }
}
