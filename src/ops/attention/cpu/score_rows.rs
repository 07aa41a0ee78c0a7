//! Loops over the rows of a block of scores: mask, soft cap and bias; exponentials; gradients.

use std::ops::Range;

use super::query_block::QueryBlock;
use crate::error::Result;
use crate::ops::attention::scores::{ScoreOperands, ScoreRule};
use crate::tensor::cpu::{BlockTree, Gemm, Kernel, MatRef, RowTree, SumReducer, cast, row_max};
use crate::tensor::{DType, Element, LEAF, Tensor};

/// Returns one of two values. Both are computed, so that loops vectorise.
#[inline(always)]
fn pick<T>(condition: bool, yes: T, no: T) -> T {
    if condition { yes } else { no }
}

/// The optional operands of the scores, with contiguous rows and in the dtype of the computation.
pub(super) struct ScoreTensors {
    bias: Option<Tensor>,
    mask: Option<Tensor>,
    documents: Option<[Tensor; 2]>,
}

impl ScoreTensors {
    pub(super) fn of(operands: &ScoreOperands<'_>, dtype: DType) -> Result<ScoreTensors> {
        Ok(ScoreTensors {
            bias: operands
                .bias
                .map(|bias| Ok::<_, crate::Error>(cast(bias, dtype)?.contiguous_rows()))
                .transpose()?,
            mask: operands.mask.map(Tensor::contiguous_rows),
            documents: operands.documents.map(|of| of.map(Tensor::packed)),
        })
    }
}

/// A tensor `[batch, heads, queries, keys]` in which any extent may be 1, as rows.
#[derive(Clone, Copy)]
struct BroadcastRows<'a, T> {
    data: &'a [T],
    /// The strides of batch, head and query; 0 for an extent of 1.
    strides: [usize; 3],
    /// True if one element stands for all keys.
    single: bool,
}

impl<'a, T: Element> BroadcastRows<'a, T> {
    fn of(x: &'a Tensor) -> Result<Self> {
        let (shape, strides) = (x.shape(), x.strides());
        let strides = [0, 1, 2].map(|d| if shape[d] == 1 { 0 } else { strides[d] });
        Ok(BroadcastRows { data: x.data()?, strides, single: shape[3] == 1 })
    }

    /// Returns the elements for these keys of a row, or the one element for all keys.
    #[inline(always)]
    fn row(&self, [b, h, i]: [usize; 3], keys: Range<usize>) -> &'a [T] {
        let at = b * self.strides[0] + h * self.strides[1] + i * self.strides[2];
        let row = &self.data[at..];
        if self.single { &row[..1] } else { &row[keys] }
    }
}

/// Document numbers `[batch or 1, length]`.
#[derive(Clone, Copy)]
struct DocumentRows<'a> {
    data: &'a [i64],
    stride: usize,
    len: usize,
}

impl<'a> DocumentRows<'a> {
    fn of(x: &'a Tensor) -> Result<Self> {
        let len = x.shape()[1];
        Ok(DocumentRows { data: x.data()?, stride: if x.shape()[0] == 1 { 0 } else { len }, len })
    }

    fn row(&self, b: usize) -> &'a [i64] {
        &self.data[b * self.stride..][..self.len]
    }
}

/// The rule and the operands that decide the scores of a call, besides queries and keys.
#[derive(Clone, Copy)]
pub(super) struct ScoreInputs<'a, T> {
    rule: ScoreRule,
    bias: Option<BroadcastRows<'a, T>>,
    mask: Option<BroadcastRows<'a, bool>>,
    documents: Option<[DocumentRows<'a>; 2]>,
}

impl<'a, T: Gemm> ScoreInputs<'a, T> {
    pub(super) fn of(rule: ScoreRule, tensors: &'a ScoreTensors) -> Result<Self> {
        let documents = match &tensors.documents {
            Some([q, k]) => Some([DocumentRows::of(q)?, DocumentRows::of(k)?]),
            None => None,
        };
        Ok(ScoreInputs {
            rule,
            bias: tensors.bias.as_ref().map(BroadcastRows::of).transpose()?,
            mask: tensors.mask.as_ref().map(BroadcastRows::of).transpose()?,
            documents,
        })
    }

    /// Returns true if keys inside a row's window may be left out.
    pub(super) fn has_holes(&self) -> bool {
        self.bias.is_some() || self.mask.is_some() || self.documents.is_some()
    }

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
            block.retain(|keys| {
                let (from, to) = bounds(&of_k[keys]);
                from <= hi && lo <= to
            });
        }
        if let Some(mask) = self.mask {
            let rows = if mask.strides[2] == 0 { block.rows.min(1) } else { block.rows };
            let start = block.start;
            block.retain(|keys| {
                (start..start + rows)
                    .any(|i| mask.row([b, h, i], keys.clone()).iter().fold(false, |any, &seen| any | seen))
            });
        }
        (block.leaves != window.leaves).then_some(block)
    }
}

/// Turns the products of row `i` of a block into scores: soft cap, bias, and -inf for keys that are left out. Writes the
/// derivative of each score by its product, divided by the scale, to `slopes` if there is a soft cap.
#[inline(always)]
fn prepare_row<T: Gemm>(
    inputs: &ScoreInputs<'_, T>,
    block: &QueryBlock,
    ([b, h], i): ([usize; 2], usize),
    row: &mut [T],
    mut slopes: Option<&mut [T]>,
) {
    let span = inputs.rule.span(block.position + i, block.keys);
    let mut done = 0;
    for run in &block.leaves {
        let from = (run.start * LEAF).max(span.start).max(block.from);
        let to = (run.end * LEAF).min(span.end);
        if from >= to {
            continue;
        }
        let (keys, at) = (from..to, from - block.from);
        row[done..at].fill(T::LOWEST);
        done = to - block.from;
        let row = &mut row[at..done];
        if let Some(cap) = inputs.rule.soft_cap {
            let cap = T::of(cap.0);
            match &mut slopes {
                Some(slopes) => {
                    for (s, slope) in row.iter_mut().zip(&mut slopes[at..]) {
                        let t = (*s / cap).tanh();
                        *s = cap * t;
                        *slope = T::ONE - t * t;
                    }
                }
                None => row.iter_mut().for_each(|s| *s = cap * (*s / cap).tanh()),
            }
        }
        let at = [b, h, block.start + i];
        if let Some(bias) = inputs.bias {
            match bias.row(at, keys.clone()) {
                &[all] if bias.single => row.iter_mut().for_each(|s| *s = *s + all),
                bias => row.iter_mut().zip(bias).for_each(|(s, &bias)| *s = *s + bias),
            }
        }
        if let Some(mask) = inputs.mask {
            match mask.row(at, keys.clone()) {
                &[all] if mask.single => {
                    if !all {
                        row.fill(T::LOWEST);
                    }
                }
                mask => {
                    for (s, &seen) in row.iter_mut().zip(mask) {
                        *s = pick(seen, *s, T::LOWEST);
                    }
                }
            }
        }
        if let Some([of_q, of_k]) = inputs.documents {
            let own = of_q.row(b)[block.start + i];
            for (s, &of_k) in row.iter_mut().zip(&of_k.row(b)[keys]) {
                *s = pick(of_k == own, *s, T::LOWEST);
            }
        }
    }
    row[done..].fill(T::LOWEST);
}

/// The kernel that turns the products of a block, row by row, into [scores](prepare_row) and exponentials, and computes
/// their sums and the logarithms of the sums. The exponential of a key that is left out is -0, which no other
/// exponential is. Returns true if `find_holes` is true and a row leaves out a key of its window.
pub(super) struct Probabilities<'a, T> {
    pub(super) inputs: &'a ScoreInputs<'a, T>,
    pub(super) head: [usize; 2],
    pub(super) s: &'a mut [T],
    pub(super) block: &'a QueryBlock,
    pub(super) tree: &'a mut BlockTree<T>,
    pub(super) sums: &'a mut [T],
    pub(super) lse: &'a mut [T],
    pub(super) find_holes: bool,
}

impl<T: Gemm> Kernel for Probabilities<'_, T> {
    type Out = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let (block, rule) = (self.block, &self.inputs.rule);
        let mut left_out = false;
        let rows = self.s.chunks_exact_mut(block.width).zip(self.sums.iter_mut().zip(self.lse));
        for (i, (row, (sum, lse))) in rows.enumerate() {
            prepare_row(self.inputs, block, (self.head, i), row, None);
            left_out = left_out || self.find_holes && block.leaves_out(rule, i, row);
            // The other leaves add nothing.
            let leaves = block.seen_leaves(rule, i);
            let (seen, after) = row.split_at_mut(leaves.end * LEAF);
            let (before, seen) = seen.split_at_mut(leaves.start * LEAF);
            before.fill(T::SUM_PAD);
            after.fill(T::SUM_PAD);
            let max = row_max(seen);
            // Scores of NaN alone, which are ignored, or no score at all.
            let max = pick(max == T::LOWEST, T::ZERO, max);
            for s in seen.iter_mut() {
                *s = pick(*s == T::LOWEST, T::SUM_PAD, (*s - max).exp());
            }
            *sum = self.tree.fold::<SumReducer>(block.from / LEAF + leaves.start, seen);
            *lse = pick(*sum == T::ZERO, T::LOWEST, sum.ln() + max);
        }
        left_out
    }
}

/// The kernel that turns products `p` of queries and keys into [scores](prepare_row) and probabilities, and gradients
/// `ds` of the probabilities into those of the products. Entries of keys that are left out become -0; no other entry is
/// -0. Returns true if `find_holes` is true and a row leaves out a key of its window.
pub(super) struct ScoreGradients<'a, T> {
    pub(super) inputs: &'a ScoreInputs<'a, T>,
    pub(super) head: [usize; 2],
    pub(super) p: &'a mut [T],
    pub(super) ds: &'a mut [T],
    pub(super) block: &'a QueryBlock,
    pub(super) scale: T,
    /// A row for the derivatives of the scores, divided by the scale, if they are wanted and there is a soft cap.
    pub(super) slopes: Option<&'a mut [T]>,
    pub(super) lse: &'a [T],
    pub(super) o: MatRef<'a, T>,
    pub(super) grad: MatRef<'a, T>,
    pub(super) dot: &'a mut RowTree<T>,
    pub(super) find_holes: bool,
}

impl<T: Gemm> Kernel for ScoreGradients<'_, T> {
    type Out = bool;
    #[inline(always)]
    fn run(mut self) -> bool {
        let (block, rule) = (self.block, &self.inputs.rule);
        let mut left_out = false;
        let d = self.o.shape().1;
        let mut products = vec![T::ZERO; d];
        let width = block.width;
        let rows = self.p.chunks_exact_mut(width).zip(self.ds.chunks_exact_mut(width));
        for (i, ((p, ds), &lse)) in rows.zip(self.lse).enumerate() {
            prepare_row(self.inputs, block, (self.head, i), p, self.slopes.as_deref_mut());
            left_out = left_out || self.find_holes && block.leaves_out(rule, i, p);
            let (o, grad) = (self.o.row(i), self.grad.row(i));
            for (s, (&o, &grad)) in products.iter_mut().zip(o.iter().zip(grad)) {
                *s = o * grad;
            }
            let delta = self.dot.fold::<SumReducer>(&products);
            let lse = pick(lse == T::LOWEST, T::ZERO, lse);
            let leaves = block.seen_leaves(rule, i);
            let seen = leaves.start * LEAF..leaves.end * LEAF;
            for x in [&mut *p, &mut *ds] {
                x[..seen.start].fill(T::SUM_PAD);
                x[seen.end..].fill(T::SUM_PAD);
            }
            let (p, ds) = (&mut p[seen.clone()], &mut ds[seen.clone()]);
            if let Some(slopes) = &self.slopes {
                for ((p, ds), &slope) in p.iter_mut().zip(ds).zip(&slopes[seen]) {
                    let (seen, e) = (*p != T::LOWEST, (*p - lse).exp());
                    *p = pick(seen, e, T::SUM_PAD);
                    *ds = pick(seen, self.scale * (slope * (e * (*ds - delta))) + T::ZERO, T::SUM_PAD);
                }
                continue;
            }
            for (p, ds) in p.iter_mut().zip(ds) {
                let (seen, e) = (*p != T::LOWEST, (*p - lse).exp());
                *p = pick(seen, e, T::SUM_PAD);
                *ds = pick(seen, self.scale * (e * (*ds - delta)) + T::ZERO, T::SUM_PAD);
            }
        }
        left_out
    }
}

/// The kernel that replaces -0 by 0.
pub(super) struct ClearMinusZero<'a, T>(pub(super) &'a mut [T]);

impl<T: Gemm> Kernel for ClearMinusZero<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        self.0.iter_mut().for_each(|x| *x = *x + T::ZERO);
    }
}
