//! A call of attention: all but queries, keys and values.

use std::ops::Range;

use super::lane_windows::LANES;
use super::query_block::QueryBlock;
use super::scores::ScoreInputs;
use crate::gemm::Gemm;

/// Attention `softmax(scale * q k^T, masked) v` with a rule and operands of its scores, and its derivatives.
#[derive(Clone, Copy)]
pub struct AttentionKernel<'a, T> {
    /// The position of the first query in the sequence of keys.
    pub q_start: usize,
    /// The factor of the scores.
    pub scale: f64,
    /// Dropout on the probabilities, or `None`.
    pub dropout: Option<AttentionDropout<'a>>,
    /// The rule and the operands of the scores.
    pub scores: ScoreInputs<'a, T>,
}

/// The probabilities that dropout keeps, and their factor.
#[derive(Clone, Copy)]
pub struct AttentionDropout<'a> {
    /// The factor of the probabilities that are kept, `1 / (1 - p)`.
    pub scale: f64,
    /// Takes a row's indices `[batch, head, query]` and a key, and writes, for each key from that one on, true if its
    /// probability is kept. Must give the same result in the forward and the backward pass.
    pub keep: KeepKeys<'a>,
}

/// The function that [`AttentionDropout::keep`] is.
pub type KeepKeys<'a> = &'a (dyn Fn([usize; 3], usize, &mut [bool]) + Sync);

impl<T: Gemm> AttentionKernel<'_, T> {
    /// Divides these queries into blocks that end at multiples of `most` positions.
    pub(super) fn blocks(&self, queries: Range<usize>, keys: usize, most: usize) -> Vec<QueryBlock> {
        let (mut blocks, mut start) = (Vec::new(), queries.start);
        while start < queries.end {
            let position = self.q_start + start;
            let rows = (most - position % most).min(queries.end - start);
            blocks.push(QueryBlock::new(&self.scores.rule, start, position, rows, keys));
            start += rows;
        }
        blocks
    }

    /// Returns true if the scores of a call lie by keys: if it has queries for half a vector or more and
    /// rows of `d` and `dv` elements, and windows alone decide about them. Dropout goes along a query's keys; by keys it is
    /// slower (`benches/results/2026-11-27-xeon.md`).
    pub fn scores_by_keys(&self, [queries, keys]: [usize; 2], [d, dv]: [usize; 2]) -> bool {
        let plain = !self.scores.treat_scores && self.dropout.is_none();
        plain && d > 0 && dv > 0 && queries >= LANES / 2 && i32::try_from(keys).is_ok()
    }

    /// Applies dropout to a block's probabilities, if there is any. Those that are -0 stay -0.
    pub(super) fn drop_probabilities(&self, block: &QueryBlock, head: [usize; 2], s: &mut [T]) {
        self.each_kept(block, head, s, |p, keep, scale| *p = *p * if keep { scale } else { T::ZERO });
    }

    /// Applies dropout to the gradients of a block's probabilities, if there is any.
    pub(super) fn drop_gradients(&self, block: &QueryBlock, head: [usize; 2], s: &mut [T]) {
        self.each_kept(block, head, s, |d, keep, scale| *d = if keep { *d * scale } else { T::ZERO });
    }

    fn each_kept(
        &self,
        block: &QueryBlock,
        [b, h]: [usize; 2],
        s: &mut [T],
        apply: impl Fn(&mut T, bool, T),
    ) {
        let Some(dropout) = &self.dropout else { return };
        let scale = T::of(dropout.scale);
        let mut keep = vec![false; block.to - block.from];
        assert!(block.lanes.is_empty(), "scores lie by queries with dropout");
        for (i, row) in s.chunks_exact_mut(block.width).enumerate() {
            let span = self.scores.rule.span(block.position + i, block.keys);
            let (from, to) = (span.start.max(block.from), span.end.min(block.to));
            if from < to {
                let keep = &mut keep[..to - from];
                (dropout.keep)([b, h, block.start + i], from, keep);
                let row = &mut row[from - block.from..][..keep.len()];
                row.iter_mut().zip(keep.iter()).for_each(|(s, &keep)| apply(s, keep, scale));
            }
        }
    }
}

/// About the speed of a thread.
pub(super) const MULTIPLICATIONS_PER_NANO: usize = 10;
