//! The forward pass of [attention](super).

use super::call::{AttentionKernel, MULTIPLICATIONS_PER_NANO};
use super::heads::{Heads, group_len};
use super::key_rows::{NeighbouringRows, PairOperands, Side};
use super::lane_windows::LANES;
use super::query_block::{BlockSum, Factors, LEAF_ROWS, QueryBlock, ROWS, masked_product};
use super::score_columns::ColumnProbabilities;
use super::score_rows::{Probabilities, put_rows};
use super::scratch::Scratch;
use crate::gemm::{BandedProduct, Gemm, LeafContraction};
use crate::isa::caches::Caches;
use crate::isa::simd::dispatch;
use crate::summation::LEAF;
use crate::sums::tree::BlockTree;
use crate::threads::parts::{RowsMut, SharedRows};
use crate::threads::team::for_each_part;

impl<T: Gemm> AttentionKernel<'_, T> {
    /// Writes the output `[batch, queries, heads, dv]`, and the logarithm of each row's sum of exponentials `[batch, heads,
    /// queries]`, which is -inf at first.
    pub(super) fn forward(&self, [q, k, v]: [Heads<'_, T>; 3], o: &mut [T], lse: &mut [T]) {
        let [b, h, tq] = [q.batch, q.heads, q.len];
        let (dv, each) = (v.d, group_len(h, k.heads));
        let inputs = self.scores;
        let by_keys = self.scores_by_keys([tq, k.len], [k.d, dv]);
        let fits = k.len.saturating_mul(LEAF_ROWS * size_of::<T>()) <= Caches::current().second / 2;
        let mut blocks = self.blocks(0..tq, k.len, if by_keys && fits { LEAF_ROWS } else { ROWS });
        if by_keys {
            blocks.iter_mut().for_each(|block| block.lie_by_keys(&self.scores.rule));
        }
        let planned = |block| ForwardBlock::<T>::new(block, [k.d, dv]);
        let windows: Vec<ForwardBlock<T>> = blocks.into_iter().map(planned).collect();
        let blocks = || windows.iter().map(|window| &window.block);
        let width = blocks().map(|block| block.width).max().unwrap_or(0);
        let scores_len = blocks().map(|block| block.scores_len()).max().unwrap_or(0);
        let o_rows = SharedRows::new(o, dv);
        let pairs = blocks().map(|block| block.rows * block.width).sum::<usize>();
        let nanos = (b * h * (k.d + dv)).saturating_mul(pairs) / MULTIPLICATIONS_PER_NANO;
        for_each_part(b * h, nanos, RowsMut { data: lse, len: tq }, |heads, lse| {
            let (mut tree, mut sums) = (BlockTree::<T>::new(width), [T::ZERO; LEAF_ROWS]);
            let (mut scores, mut rows) = (Scratch::<T>::new(scores_len), Scratch::<T>::new(LEAF_ROWS * dv));
            let mut nodes = vec![[T::ZERO; LANES]; width / LEAF];
            let mut pairs = PairOperands::new(blocks(), k.d);
            let mut values = NeighbouringRows::new(blocks(), dv, Side::Right);
            let (all_scores, all_rows) = (scores.get(), rows.get());
            let mut filled = None;
            for (head, lse) in heads.zip(lse.data.chunks_exact_mut(tq.max(1))) {
                let head = [head / h, head % h];
                let group = [head[0], head[1] / each];
                if filled.replace(group) != Some(group) {
                    pairs.fill(k.at(group));
                    values.fill(v.at(group));
                }
                for window in &windows {
                    let narrow = inputs.narrow(&window.block, head).map(planned);
                    let ForwardBlock { block, scores, over, values: bands } =
                        narrow.as_ref().unwrap_or(window);
                    let s = &mut all_scores[..block.scores_len()];
                    let first = (head[0] * tq + block.start) * h + head[1];
                    let rows = &mut all_rows[..block.rows * dv];
                    if s.is_empty() {
                        rows.fill(T::ZERO);
                        // SAFETY: the rows of this head's queries, and a head is in one part of `for_each_part`.
                        unsafe { put_rows(rows, &o_rows, (first, h), None) };
                        continue;
                    }
                    let queries = q.at(head).rows(block.start, block.rows);
                    pairs.multiply((block, scores.as_ref()), T::of(self.scale), queries, s);
                    let (lse, sums) = (&mut lse[block.start..][..block.rows], &mut sums[..block.rows]);
                    if block.lanes.is_empty() {
                        dispatch(Probabilities {
                            inputs: &inputs,
                            head,
                            s,
                            block,
                            tree: &mut tree,
                            sums,
                            lse,
                        });
                    } else {
                        dispatch(ColumnProbabilities { s, block, nodes: &mut nodes, sums, lse });
                    }
                    self.drop_probabilities(block, head, s);
                    for factors in [Factors::Finite, Factors::Any] {
                        let probabilities = block.part(s, &(0..block.rows), block.from..block.to);
                        let values = values.rows(block.from..block.to, dv);
                        let into = (&mut *rows, (dv.max(1), 1));
                        let sum = BlockSum::Keys(over);
                        masked_product((factors, bands.as_ref()), sum, probabilities, values, into);
                        // SAFETY: as above.
                        if unsafe { put_rows(rows, &o_rows, (first, h), Some(&sums[..block.rows])) } {
                            break;
                        }
                    }
                }
            }
        });
    }
}

/// A block of queries with the plans of its products.
struct ForwardBlock<T: 'static> {
    block: QueryBlock,
    /// The products of queries and keys, if scores lie by keys.
    scores: Option<BandedProduct<T>>,
    /// The sums over keys.
    over: LeafContraction<T>,
    /// These sums in bands, if scores lie by keys and values are whole vectors.
    values: Option<BandedProduct<T>>,
}

impl<T: Gemm> ForwardBlock<T> {
    fn new(block: QueryBlock, [d, dv]: [usize; 2]) -> ForwardBlock<T> {
        let scores = (!block.lanes.is_empty()).then(|| block.pair_bands(d));
        let over = block.over_keys(&(0..usize::MAX)).over;
        let values = block.query_bands(dv);
        ForwardBlock { block, scores, over, values }
    }
}
