//! The CPU kernels of attention and of its derivative.
//!
//! Queries are processed in blocks. A block computes the scores of the leaves of 32 keys that any of its
//! queries sees, and masks the keys that a query does not see. Sums over keys follow [`SplitRule::PowerOfTwo`], in
//! which masked keys change no sum. So an output row, and the gradient of its query, depends only on the query and on
//! the keys that it sees: sharding queries, heads or batch changes no bit, and neither do keys that are masked or
//! appended. The gradients of keys and values are sums over the given queries
//! [along the reduction tree](backward).
//!
//! The scores of a block lie [by queries](score_rows), or [by keys](score_columns) where windows alone decide what a query sees, without
//! dropout. By keys, products leave out what windows hide, in [`bands`].
//!
//! [`SplitRule::PowerOfTwo`]: crate::tensor::SplitRule::PowerOfTwo

mod backward;
mod backward_plan;
mod bands;
mod bias;
mod gradient_rows;
mod key_parts;
mod key_rows;
mod lane_windows;
mod query_block;
mod query_sums;
mod score_columns;
mod score_rows;

use std::ops::Range;

use super::scores::{ScoreOperands, ScoreRule};
use crate::error::{Error, Result};
use crate::tensor::cpu::{
    BandedProduct, BlockTree, Caches, Gemm, LeafContraction, RowsMut, SharedRows, cast, dispatch,
    expect_matching, for_each_part,
};
use crate::tensor::{DType, LEAF, Tensor};
use key_rows::{NeighbouringRows, PairOperands, Side};
use lane_windows::LANES;
use query_block::{BlockSum, Factors, Heads, LEAF_ROWS, QueryBlock, ROWS, Scratch, masked_product};
use score_columns::ColumnProbabilities;
use score_rows::{Probabilities, ScoreInputs, ScoreTensors, put_rows};

/// Computes `softmax(scale * q k^T, masked) v` on the CPU.
///
/// `q` is `[batch, heads, queries, d]`, `k` `[batch, groups, keys, d]` and `v` `[batch, groups, keys, dv]`, with any
/// strides. Each group of `heads / groups` neighbouring heads uses one head of `k` and `v`. Results are views
/// `[batch, heads, length, d]` of buffers `[batch, length, heads, d]`, so that merging the heads needs no copy; the gradients
/// of operands that are all of one buffer lie in one, so that joining them needs none. f16 and bf16 compute in f32 and
/// round once. No element of a result is -0.
///
/// ```
/// use isoshard::{ops::cpu::CpuAttention, tensor::{DType, Tensor}};
/// let attention = CpuAttention::causal("attention", 0, 1.0);
/// let q = Tensor::zeros(DType::F64, [1, 1, 2, 3]);
/// let v = Tensor::from_vec(vec![1.0, 5.0], [1, 1, 2, 1])?;
/// let (o, lse) = attention.forward(&q, &q, &v)?;
/// assert_eq!(o.to_f64_vec(), [1.0, 3.0]);
/// assert_eq!(format!("{:.3?}", lse.to_f64_vec()), "[0.000, 0.693]"); // ln 1, ln 2
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct CpuAttention<'a> {
    /// The name with which errors begin.
    pub verb: &'a str,
    /// The position of the first query in the sequence of keys.
    pub q_start: usize,
    /// The factor of the scores.
    pub scale: f64,
    /// Dropout on the probabilities, or `None`.
    pub dropout: Option<CpuAttentionDropout<'a>>,
    /// The treatment of the scores.
    pub rule: ScoreRule,
    /// The optional operands that the rule names.
    pub operands: ScoreOperands<'a>,
}

/// The probabilities that dropout keeps, and their factor.
#[derive(Clone, Copy)]
pub struct CpuAttentionDropout<'a> {
    /// The factor of the probabilities that are kept, `1 / (1 - p)`.
    pub scale: f64,
    /// Takes a row's local indices `[batch, head, query]` and a key, and writes, for each key from that one on, true if
    /// its probability is kept. Must give the same result in the forward and the backward pass.
    pub keep: KeepKeys<'a>,
}

/// The function that [`CpuAttentionDropout::keep`] is.
type KeepKeys<'a> = &'a (dyn Fn([usize; 3], usize, &mut [bool]) + Sync);

impl<'a> CpuAttention<'a> {
    /// Returns causal attention without dropout, whose first query has the position `q_start`.
    pub fn causal(verb: &'a str, q_start: usize, scale: f64) -> CpuAttention<'a> {
        let (rule, operands) = (ScoreRule::CAUSAL, ScoreOperands::default());
        CpuAttention { verb, q_start, scale, dropout: None, rule, operands }
    }

    /// Returns the output, and the logarithm of each row's sum of exponentials `[batch, heads, queries]` in f32 (f64
    /// for f64). A query without keys gives 0 and -inf.
    ///
    /// # Errors
    /// Refuses operands that do not have four dims and one floating-point dtype, or whose shapes do not fit.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        self.expect_fit(q, k, v)?;
        let (o, lse) = match q.dtype() {
            DType::F32 => self.forward_as::<f32>(q, k, v)?,
            DType::F64 => self.forward_as::<f64>(q, k, v)?,
            half => {
                let wide = |t: &Tensor| cast(t, DType::F32);
                let (o, lse) = self.forward_as::<f32>(&wide(q)?, &wide(k)?, &wide(v)?)?;
                (cast(&o, half)?, lse)
            }
        };
        Ok((o.transpose(1, 2)?, lse))
    }

    /// Returns the gradients of `q`, `k` and `v` from the forward pass's operands and results and the gradient `grad`
    /// of `o`.
    ///
    /// The gradients of `k` and `v` are sums over the heads of a group and the given queries, along the reduction tree
    /// over both. They contain no -0. Adding the zeros of masked pairs therefore changes no bit, and the sum of the
    /// gradients of two sibling nodes of the tree has the bits of their parent's gradient.
    ///
    /// ```
    /// use isoshard::{ops::cpu::CpuAttention, tensor::{DType, Tensor}};
    /// let attention = CpuAttention::causal("attention", 0, 1.0);
    /// let (q, v) = (Tensor::zeros(DType::F64, [1, 1, 2, 3]), Tensor::zeros(DType::F64, [1, 1, 2, 1]));
    /// let (o, lse) = attention.forward(&q, &q, &v)?;
    /// let grad = Tensor::full(DType::F64, [1, 1, 2, 1], 1.0);
    /// let [_, _, dv] = attention.backward([&q, &q, &v], (&o, &lse), &grad)?;
    /// assert_eq!(format!("{:.3?}", dv.to_f64_vec()), "[1.500, 0.500]"); // the probabilities of each key
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`CpuAttention::forward`].
    pub fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        (o, lse): (&Tensor, &Tensor),
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        self.expect_fit(q, k, v)?;
        expect_matching(self.verb, o, &[grad])?;
        let rows = &q.shape()[..3];
        if o.shape()[..3] != *rows || o.shape()[3] != v.shape()[3] || lse.shape()[..] != *rows {
            return Err(self.misfit(&[q, v, o, lse]));
        }
        match q.dtype() {
            DType::F32 => self.backward_as::<f32>([q, k, v], (o, lse), grad),
            DType::F64 => self.backward_as::<f64>([q, k, v], (o, lse), grad),
            half => {
                let wide = |t: &Tensor| cast(t, DType::F32);
                let (qw, kw, vw) = (wide(q)?, wide(k)?, wide(v)?);
                let (o, grad) = (wide(o)?, wide(grad)?);
                let [dq, dk, dv] = self.backward_as::<f32>([&qw, &kw, &vw], (&o, lse), &grad)?;
                let narrow = |t: &Tensor| cast(&t.transpose(1, 2)?, half)?.transpose(1, 2);
                Ok([narrow(&dq)?, narrow(&dk)?, narrow(&dv)?])
            }
        }
    }

    fn expect_fit(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
        q.dtype().expect_float(self.verb)?;
        let fits = match (&q.shape()[..], &k.shape()[..], &v.shape()[..]) {
            ([qb, qh, _, qd], [kb, kh, kt, kd], [vb, vh, vt, _]) => {
                let grouped = qh == kh || (*kh > 0 && qh % kh == 0);
                (qb, qd) == (kb, kd) && grouped && (kb, kh, kt) == (vb, vh, vt)
            }
            _ => false,
        };
        if fits && q.dtype() == k.dtype() && k.dtype() == v.dtype() {
            return Ok(());
        }
        Err(self.misfit(&[q, k, v]))
    }

    fn misfit(&self, given: &[&Tensor]) -> Error {
        let given: Vec<String> = given.iter().map(|t| t.notation()).collect();
        Error::invalid(
            self.verb,
            "wants q [batch, heads, queries, d], k [batch, groups, keys, d], v [batch, groups, keys, dv] of one dtype",
            given.join(", "),
            "permute or cast them first",
        )
    }

    fn forward_as<T: Gemm>(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (b, h, tq) = (q.shape()[0], q.shape()[1], q.shape()[2]);
        let (dv, each) = (v.shape()[3], group_len(h, k.shape()[1]));
        let mut o = Tensor::uninit(T::DTYPE, [b, tq, h, dv]);
        let mut lse = Tensor::full(T::DTYPE, [b, h, tq], f64::NEG_INFINITY);
        let extra = ScoreTensors::of(&self.operands, T::DTYPE)?;
        let inputs = ScoreInputs::<T>::of(self.rule, &extra)?;
        let (q, k, v) = (Heads::<T>::of(q)?, Heads::<T>::of(k)?, Heads::<T>::of(v)?);
        let (o_data, lse_data) = (o.make_mut::<T>()?, lse.make_mut::<T>()?);
        let by_keys = self.scores_by_keys(&inputs, [tq, k.len], [k.d, dv]);
        let fits = k.len.saturating_mul(LEAF_ROWS * size_of::<T>()) <= Caches::current().second / 2;
        let mut blocks = self.blocks(0..tq, k.len, if by_keys && fits { LEAF_ROWS } else { ROWS });
        if by_keys {
            blocks.iter_mut().for_each(|block| block.lie_by_keys(&self.rule));
        }
        let planned = |block| ForwardBlock::<T>::new(block, [k.d, dv]);
        let windows: Vec<ForwardBlock<T>> = blocks.into_iter().map(planned).collect();
        let blocks = || windows.iter().map(|window| &window.block);
        let width = blocks().map(|block| block.width).max().unwrap_or(0);
        let scores_len = blocks().map(|block| block.scores_len()).max().unwrap_or(0);
        let o_rows = SharedRows::new(o_data, dv);
        let pairs = blocks().map(|block| block.rows * block.width).sum::<usize>();
        let nanos = (b * h * (k.d + dv)).saturating_mul(pairs) / MULTIPLICATIONS_PER_NANO;
        for_each_part(b * h, nanos, RowsMut { data: lse_data, len: tq }, |heads, lse| {
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
        Ok((o, lse))
    }

    /// Divides these queries into blocks that end at multiples of `most` positions.
    fn blocks(&self, queries: Range<usize>, keys: usize, most: usize) -> Vec<QueryBlock> {
        let (mut blocks, mut start) = (Vec::new(), queries.start);
        while start < queries.end {
            let position = self.q_start + start;
            let rows = (most - position % most).min(queries.end - start);
            blocks.push(QueryBlock::new(&self.rule, start, position, rows, keys));
            start += rows;
        }
        blocks
    }

    /// Returns true if the scores of a call [lie by keys](QueryBlock::lie_by_keys): if it has queries for half a vector or more and
    /// rows of `d` and `dv` elements, and windows alone decide about them. Dropout goes along a query's keys. (By keys, in steps, a GPT
    /// trained with dropout at 0.96 to 0.97 of the speed.)
    fn scores_by_keys<T: Gemm>(
        &self,
        inputs: &ScoreInputs<'_, T>,
        [queries, keys]: [usize; 2],
        [d, dv]: [usize; 2],
    ) -> bool {
        let plain = !inputs.treat_scores && self.dropout.is_none();
        plain && d > 0 && dv > 0 && queries >= LANES / 2 && i32::try_from(keys).is_ok()
    }

    /// Applies dropout to a block's probabilities, if there is any. Those that are -0 stay -0.
    fn drop_probabilities<T: Gemm>(&self, block: &QueryBlock, head: [usize; 2], s: &mut [T]) {
        self.each_kept(block, head, s, |p, keep, scale| *p = *p * if keep { scale } else { T::ZERO });
    }

    /// Applies dropout to the gradients of a block's probabilities, if there is any.
    fn drop_gradients<T: Gemm>(&self, block: &QueryBlock, head: [usize; 2], s: &mut [T]) {
        self.each_kept(block, head, s, |d, keep, scale| *d = if keep { *d * scale } else { T::ZERO });
    }

    fn each_kept<T: Gemm>(
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
            let span = self.rule.span(block.position + i, block.keys);
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

/// About the speed of a thread.
const MULTIPLICATIONS_PER_NANO: usize = 10;

/// Returns the number of query heads that share one of `groups` key heads.
fn group_len(heads: usize, groups: usize) -> usize {
    heads.checked_div(groups).unwrap_or(0)
}

impl Tensor {
    /// Returns this tensor if its last dim is contiguous, else a contiguous copy.
    fn contiguous_rows(&self) -> Tensor {
        let last = self.shape().len() - 1;
        if self.strides()[last] == 1 || self.shape()[last] <= 1 { self.clone() } else { self.packed_copy() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Shape;
    use crate::tensor::cpu::{Isa, with_isa};

    fn noise(shape: impl Into<Shape>, seed: usize) -> Tensor {
        let shape = shape.into();
        let value = |i: usize| ((i * 7919 + seed * 131) % 1009) as f64 * 0.003 - 1.5;
        Tensor::from_vec((0..shape.numel()).map(value).collect::<Vec<f64>>(), shape).unwrap()
    }

    fn plain(q_start: usize) -> CpuAttention<'static> {
        CpuAttention::causal("attention", q_start, 0.3)
    }

    fn keep([b, h, i]: [usize; 3], from: usize, keep: &mut [bool]) {
        let kept = |j: usize| (b * 7 + h * 5 + i * 3 + j * j) % 4 != 1;
        keep.iter_mut().enumerate().for_each(|(j, k)| *k = kept(from + j));
    }

    fn by_definition(q: &Tensor, k: &Tensor, v: &Tensor, a: &CpuAttention<'_>) -> Vec<f64> {
        let at = |t: &Tensor, i: [usize; 4]| t.to_ndarray_view::<f64>().unwrap()[ndarray::IxDyn(&i)];
        let (s, t, dv) = (q.shape(), k.shape()[2], v.shape()[3]);
        let mut out = Vec::new();
        for (b, h, i) in
            (0..s[0]).flat_map(|b| (0..s[1]).flat_map(move |h| (0..s[2]).map(move |i| (b, h, i))))
        {
            let seen = (a.q_start + i + 1).min(t);
            let score =
                |j| (0..s[3]).map(|d| at(q, [b, h, i, d]) * at(k, [b, h, j, d])).sum::<f64>() * a.scale;
            let e: Vec<f64> = (0..seen).map(|j| f64::exp(score(j))).collect();
            let sum: f64 = e.iter().sum();
            let mut kept = vec![true; seen];
            let factor = a.dropout.map_or(1.0, |d| {
                (d.keep)([b, h, i], 0, &mut kept);
                d.scale
            });
            for d in 0..dv {
                let p = |j: usize| if kept[j] { e[j] / sum * factor } else { 0.0 };
                out.push((0..seen).map(|j| p(j) * at(v, [b, h, j, d])).sum());
            }
        }
        out
    }

    #[test]
    fn against_the_definition_with_strides_offsets_and_dropout() {
        for (tq, tk, q_start) in [(1, 1, 0), (5, 5, 0), (70, 70, 0), (3, 67, 64), (7, 40, 60), (2, 9, 3)] {
            let q = noise([2, tq, 3, 4], 1).transpose(1, 2).unwrap();
            let (k, v) = (noise([2, 3, 4, tk], 2).transpose(2, 3).unwrap(), noise([2, 3, tk, 5], 3));
            let dropout = Some(CpuAttentionDropout { scale: 1.25, keep: &keep });
            for attention in [plain(q_start), CpuAttention { dropout, ..plain(q_start) }] {
                let (o, lse) = attention.forward(&q, &k, &v).unwrap();
                assert_eq!((&o.shape()[..], &lse.shape()[..]), (&[2, 3, tq, 5][..], &[2, 3, tq][..]));
                assert!(o.transpose(1, 2).unwrap().is_contiguous(), "merging heads is free");
                for (got, want) in o.to_f64_vec().iter().zip(by_definition(&q, &k, &v, &attention)) {
                    assert!((got - want).abs() < 1e-12, "{tq} {tk} {q_start}: {got} {want}");
                }
            }
        }
        let (o, lse) = plain(0)
            .forward(&noise([1, 1, 2, 3], 0), &noise([1, 1, 0, 3], 0), &noise([1, 1, 0, 2], 0))
            .unwrap();
        assert_eq!((o.to_f64_vec(), lse.to_f64_vec()), (vec![0.0; 4], vec![f64::NEG_INFINITY; 2]));
    }

    #[test]
    fn derivatives_by_differences() {
        let dropout = Some(CpuAttentionDropout { scale: 1.25, keep: &keep });
        for attention in [plain(1), CpuAttention { dropout, ..plain(1) }] {
            let inputs = [noise([1, 2, 4, 3], 1), noise([1, 2, 5, 3], 2), noise([1, 2, 5, 2], 3)];
            let grad = noise([1, 2, 4, 2], 4);
            let loss = |t: &[Tensor; 3]| -> f64 {
                let (o, _) = attention.forward(&t[0], &t[1], &t[2]).unwrap();
                o.to_f64_vec().iter().zip(grad.to_f64_vec()).map(|(o, g)| o * g).sum()
            };
            let (o, lse) = attention.forward(&inputs[0], &inputs[1], &inputs[2]).unwrap();
            let [q, k, v] = &inputs;
            let got = attention.backward([q, k, v], (&o, &lse), &grad).unwrap();
            for (which, got) in got.iter().enumerate() {
                assert_eq!(got.shape(), inputs[which].shape());
                for (i, got) in got.to_f64_vec().iter().enumerate() {
                    let nudge = |by: f64| {
                        let mut t = inputs.clone();
                        t[which].make_mut::<f64>().unwrap()[i] += by;
                        loss(&t)
                    };
                    let want = (nudge(1e-5) - nudge(-1e-5)) / 2e-5;
                    assert!((got - want).abs() < 1e-8, "input {which}, {i}: {got} {want}");
                }
            }
        }
    }

    #[test]
    fn parts_have_the_bits_of_the_whole() {
        let f32s = |t: Tensor| cast(&t, DType::F32).unwrap();
        let [q, k, v] = [1, 2, 3].map(|seed| f32s(noise([1, 2, 200, 16], seed)));
        let bits = |t: &Tensor| t.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let (o, lse) = plain(0).forward(&q, &k, &v).unwrap();
        for (start, len) in [(0, 50), (50, 100), (50, 3), (199, 1), (64, 64)] {
            let part = |t: &Tensor| t.narrow(2, start, len).unwrap();
            let (po, pl) = plain(start).forward(&part(&q), &k, &v).unwrap();
            assert_eq!((bits(&po), bits(&pl)), (bits(&part(&o)), bits(&part(&lse))), "{start} {len}");
            let whole = plain(0).backward([&q, &k, &v], (&o, &lse), &q).unwrap();
            let dq = plain(start).backward([&part(&q), &k, &v], (&po, &pl), &part(&q)).unwrap();
            assert_eq!(bits(&dq[0]), bits(&part(&whole[0])));
        }
        for &isa in Isa::available() {
            let again = with_isa(isa, || plain(0).forward(&q, &k, &v).unwrap());
            assert_eq!((bits(&again.0), bits(&again.1)), (bits(&o), bits(&lse)), "{isa:?}");
        }
    }

    #[test]
    fn halves_and_refusals() {
        let q = cast(&noise([1, 1, 3, 4], 1), DType::BF16).unwrap();
        let (o, lse) = plain(0).forward(&q, &q, &q).unwrap();
        assert_eq!((o.dtype(), lse.dtype()), (DType::BF16, DType::F32));
        let [dq, ..] = plain(0).backward([&q, &q, &q], (&o, &lse), &q).unwrap();
        assert_eq!((dq.dtype(), dq.shape()), (DType::BF16, q.shape()));
        assert!(plain(0).forward(&q, &q.narrow(3, 0, 2).unwrap(), &q).is_err());
        assert!(plain(0).forward(&q, &noise([1, 1, 3, 4], 1), &q).is_err());
    }
}
