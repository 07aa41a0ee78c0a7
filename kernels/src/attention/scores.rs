//! The rule and the operands of scores.

use std::ops::Range;

use super::query_block::QueryBlock;
use super::window::WindowRule;
use crate::gemm::Gemm;

/// A tensor `[batch, heads, queries, keys]` in which any extent may be 1, as rows.
#[derive(Clone, Copy)]
pub struct BroadcastRows<'a, T> {
    data: &'a [T],
    /// The strides of batch, head and query; 0 for an extent of 1.
    strides: [usize; 3],
    /// True if one element stands for all keys.
    pub(super) single: bool,
}

impl<'a, T> BroadcastRows<'a, T> {
    /// Returns the elements of a tensor of this shape and of these strides, from the first one on. Rows are contiguous.
    pub fn new(data: &'a [T], shape: [usize; 4], strides: [usize; 4]) -> BroadcastRows<'a, T> {
        let strides = [0, 1, 2].map(|d| if shape[d] == 1 { 0 } else { strides[d] });
        BroadcastRows { data, strides, single: shape[3] == 1 }
    }

    /// Returns the elements for these keys of a row, or the one element for all keys.
    #[inline(always)]
    pub(super) fn row(&self, [b, h, i]: [usize; 3], keys: Range<usize>) -> &'a [T] {
        let at = b * self.strides[0] + h * self.strides[1] + i * self.strides[2];
        let row = &self.data[at..];
        if self.single { &row[..1] } else { &row[keys] }
    }
}

/// Document numbers `[batch or 1, length]`.
#[derive(Clone, Copy)]
pub struct DocumentRows<'a> {
    data: &'a [i64],
    stride: usize,
    len: usize,
}

impl<'a> DocumentRows<'a> {
    /// Returns contiguous numbers of this shape.
    pub fn new(data: &'a [i64], [entries, len]: [usize; 2]) -> DocumentRows<'a> {
        DocumentRows { data, stride: if entries == 1 { 0 } else { len }, len }
    }

    pub(super) fn row(&self, b: usize) -> &'a [i64] {
        &self.data[b * self.stride..][..self.len]
    }
}

/// The rule and the operands that decide the scores of a call, besides queries and keys. A score becomes `c tanh(s / c)` if there
/// is a soft cap c; then the bias is added; then keys that the query does not see are left out.
#[derive(Clone, Copy)]
pub struct ScoreInputs<'a, T> {
    pub(super) rule: WindowRule,
    pub(super) soft_cap: Option<f64>,
    pub(super) bias: Option<BroadcastRows<'a, T>>,
    pub(super) mask: Option<BroadcastRows<'a, bool>>,
    pub(super) documents: Option<[DocumentRows<'a>; 2]>,
    /// True if there is more to do to scores than to leave out those outside of the window.
    pub(super) treat_scores: bool,
}

impl<'a, T> ScoreInputs<'a, T> {
    /// Returns the inputs: the window, the bound of the scores' magnitude, what is added to the scores, true for each key that
    /// a query sees, and the documents of queries and keys, which a query sees within its own.
    pub fn new(
        rule: WindowRule,
        soft_cap: Option<f64>,
        bias: Option<BroadcastRows<'a, T>>,
        mask: Option<BroadcastRows<'a, bool>>,
        documents: Option<[DocumentRows<'a>; 2]>,
    ) -> ScoreInputs<'a, T> {
        let operands = bias.is_some() || mask.is_some() || documents.is_some();
        ScoreInputs { rule, treat_scores: operands || soft_cap.is_some(), soft_cap, bias, mask, documents }
    }
}

impl<T: Gemm> ScoreInputs<'_, T> {
    /// Returns the block without the leaves of keys that none of its queries sees in this batch and head, or `None` if
    /// there are no such leaves.
    pub(super) fn narrow(&self, window: &QueryBlock, [b, h]: [usize; 2]) -> Option<QueryBlock> {
        if self.documents.is_none() && self.mask.is_none() {
            return None;
        }
        let mut block = window.clone();
        if let Some([of_q, of_k]) = self.documents {
            let bounds =
                |x: &[i64]| x.iter().fold((i64::MAX, i64::MIN), |(lo, hi), &x| (lo.min(x), hi.max(x)));
            let (lo, hi) = bounds(&of_q.row(b)[block.start..][..block.rows]);
            let of_k = of_k.row(b);
            block.retain(&self.rule, |keys| {
                let (from, to) = bounds(&of_k[keys]);
                from <= hi && lo <= to
            });
        }
        if let Some(mask) = self.mask {
            let rows = if mask.strides[2] == 0 { block.rows.min(1) } else { block.rows };
            let start = block.start;
            block.retain(&self.rule, |keys| {
                (start..start + rows)
                    .any(|i| mask.row([b, h, i], keys.clone()).iter().fold(false, |any, &seen| any | seen))
            });
        }
        (block.leaves != window.leaves).then_some(block)
    }
}
