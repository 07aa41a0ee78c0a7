//! Sums of rows by destination, used by `embedding_grad` and `scatter_add`.

use crate::error::{Error, Result};
use crate::tensor::{DType, Float, Leaf, SplitRule};

use crate::ops::Meta;

/// Returns the index as `usize`, or an error that begins with `verb` if it is not one of the `n` indices of `dim`.
pub(in crate::ops) fn checked_index(verb: &str, index: i64, n: usize, dim: usize) -> Result<usize> {
    usize::try_from(index).ok().filter(|&i| i < n).ok_or_else(|| {
        Error::invalid(
            verb,
            format!("an index leaves dim {dim}"),
            format!("index {index} for {n} indices"),
            format!("indices run from 0 to below {n}"),
        )
    })
}

/// Refuses indices that are not i64.
pub(in crate::ops) fn expect_indices(verb: &str, index: &Meta) -> Result<()> {
    if index.dtype == DType::I64 {
        return Ok(());
    }
    Err(Error::invalid(verb, "indices are i64", index.to_string(), "cast them first"))
}

/// Adds rows of `src` to rows of `out`, each `width` long. `hits` lists pairs (row of `out`, row of `src`) in any
/// order.
///
/// Rows with the same destination are added along the reduction tree over the positions of `src`'s rows, which are
/// row-major indices over `extents`. It is the tree of [`cpu::reduce`](crate::tensor::cpu::reduce) without the
/// positions that have another destination. `out` must be zero; a sum of zeros is +0.
pub(in crate::ops) fn add_rows<T: Float>(
    extents: &[usize],
    hits: &mut [(usize, usize)],
    width: usize,
    src: &[T],
    out: &mut [T],
) {
    hits.sort_unstable();
    let mut sums = DestinationSums { extents, width, src, rows: Vec::new() };
    for run in hits.chunk_by(|a, b| a.0 == b.0) {
        let out = &mut out[run[0].0 * width..][..width];
        let node = IndexNode { dim: 0, base: 0, lo: 0, hi: extents.first().copied().unwrap_or(1) };
        sums.node(run, node, 0);
        for (o, &x) in out.iter_mut().zip(&sums.rows[0]) {
            *o = T::narrow(o.widen() + x);
        }
    }
}

/// A node of the tree: indices `lo..hi` of dim `dim`, at position `base` of the outer dims.
struct IndexNode {
    dim: usize,
    base: usize,
    lo: usize,
    hi: usize,
}

/// The sum for one destination while it is computed.
struct DestinationSums<'a, T: Float> {
    extents: &'a [usize],
    width: usize,
    src: &'a [T],
    /// One row per level of the tree whose right half is not added yet.
    rows: Vec<Vec<T::Acc>>,
}

impl<T: Float> DestinationSums<'_, T> {
    /// Writes the sum over the positions of `hits`, which all belong to the node, to row `level`.
    fn node(&mut self, hits: &[(usize, usize)], mut node: IndexNode, level: usize) {
        if self.rows.len() == level {
            self.rows.push(vec![T::Acc::default(); self.width]);
        }
        if let [(_, position)] = hits {
            let src = &self.src[position * self.width..][..self.width];
            self.rows[level].iter_mut().zip(src).for_each(|(row, x)| *row = x.widen());
            return;
        }
        let (at, mid) = loop {
            let stride: usize = self.extents[node.dim + 1..].iter().product();
            if node.hi - node.lo == 1 {
                let hi = self.extents[node.dim + 1];
                node = IndexNode { dim: node.dim + 1, base: node.base + node.lo * stride, lo: 0, hi };
                continue;
            }
            let mid = split(node.lo, node.hi, node.dim + 1 == self.extents.len());
            match hits.partition_point(|&(_, p)| p < node.base + mid * stride) {
                0 => node.lo = mid,
                at if at == hits.len() => node.hi = mid,
                at => break (at, mid),
            }
        };
        let IndexNode { dim, base, lo, hi } = node;
        self.node(&hits[..at], IndexNode { dim, base, lo, hi: mid }, level);
        self.node(&hits[at..], IndexNode { dim, base, lo: mid, hi }, level + 1);
        let (left, right) = self.rows.split_at_mut(level + 1);
        left[level].iter_mut().zip(&right[0]).for_each(|(a, &b)| *a = *a + b);
    }
}

/// Returns the position at which the tree splits a range of two or more indices.
fn split(lo: usize, hi: usize, innermost: bool) -> usize {
    if !innermost {
        return SplitRule::Halves.mid(lo, hi);
    }
    lo + Leaf::Pairs.left_of(SplitRule::Halves, hi - lo).expect("pairs can be cut")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{ReduceOp, Tensor, cpu};

    #[test]
    fn one_destination_gives_the_bits_of_a_reduction() {
        for extents in [&[1][..], &[2], &[31], &[32], &[33], &[100], &[257], &[3, 5], &[7, 1, 45]] {
            let n: usize = extents.iter().product();
            let src: Vec<f32> = (0..n).map(|i| ((i * 7919 + 13) as f32).sin() * 1e3).collect();
            let mut hits: Vec<_> = (0..n).rev().map(|i| (1, i)).collect();
            let mut out = [0.0; 3];
            add_rows(extents, &mut hits, 1, &src, &mut out);
            let x = Tensor::from_slice(&src, extents).unwrap();
            let dims: Vec<usize> = (0..extents.len()).collect();
            let sum = cpu::reduce("sum", &x, &dims, ReduceOp::Sum, false).unwrap();
            assert_eq!(out, [0.0, sum.item().unwrap() as f32, 0.0], "{extents:?}");
        }
    }
}
