//! The gradients of [attention](super).
//!
//! The gradients of keys and values are sums over queries and over the heads of a group. They follow the reduction
//! tree. Its upper levels halve the heads down to single ones; its lower levels halve the range of queries `[a, b)` at
//! `a + ceil((b - a) / 2)` down to *leaves* of at most 64 queries. Each leaf is one matrix product, whose kernel has a
//! tree of its own. The given queries are one node of the tree, so their sum is that node's value on every rank.
//!
//! A leaf of queries is also a block of queries. It adds only to the keys that one of its queries sees. Adding zeros to
//! the other keys would change no bit, because no sum is -0. All blocks of a head pass over one
//! [part of the keys](super::key_parts) before the next begins, as [planned](super::backward_plan) once per call.

use super::backward_plan::{KeyPart, Leaf, OverQueries};
use super::gradient_rows::{GradientBuffers, RowPlaces};
use super::key_parts::UnfinishedParts;
use super::key_rows::{NeighbouringRows, PairOperands, Side};
use super::query_block::{Factors, Heads, LEAF_ROWS, QueryBlock, Scratch};
use super::query_sums::UnfinishedNodes;
use super::score_columns::ColumnGradients;
use super::score_rows::{RowDots, ScoreGradients, ScoreInputs, ScoreTensors, put_rows};
use super::{CpuAttention, MULTIPLICATIONS_PER_NANO, group_len};
use crate::error::Result;
use crate::tensor::Tensor;
use crate::tensor::cpu::{BandedProduct, Gemm, RowTree, SharedRows, dispatch, for_each_part, merges};

impl CpuAttention<'_> {
    /// Returns the gradients, which lie as the operands do if those are all of one buffer.
    pub(super) fn backward_as<T: Gemm>(
        &self,
        [q, k, v]: [&Tensor; 3],
        (o, lse): (&Tensor, &Tensor),
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let (b, h, tq) = (q.shape()[0], q.shape()[1], q.shape()[2]);
        let (groups, keys, d, dv) = (k.shape()[1], k.shape()[2], k.shape()[3], v.shape()[3]);
        let (o, grad, lse) = (o.contiguous_rows(), grad.contiguous_rows(), lse.packed());
        let extra = ScoreTensors::of(&self.operands, T::DTYPE)?;
        let given = BackwardInputs::of(self, [q, k, v], [&o, &grad], &lse, &extra)?;
        if tq == 0 || keys == 0 {
            return Ok([q, k, v].map(|x| Tensor::zeros(T::DTYPE, x.shape().clone())));
        }
        let (mut buffers, places) = GradientBuffers::of([q, k, v], T::DTYPE);
        let rows: Vec<SharedRows<'_, T>> = (buffers.0.iter_mut().zip([d, d, dv]))
            .map(|(buffer, d)| Ok(SharedRows::new(buffer.make_mut::<T>()?, d)))
            .collect::<Result<_>>()?;
        let out = [0, 1, 2].map(|i| (&rows[i.min(rows.len() - 1)], places[i]));
        let by_keys = self.scores_by_keys(&given.scores, [tq, keys], [d, dv]);
        let parts = self.parts::<T>(tq, keys, [d, dv], by_keys);
        let blocks = || parts.iter().flat_map(|part| part.leaves.iter().map(|leaf| &leaf.block));
        let pairs = blocks().map(|block| block.rows * block.width).sum::<usize>();
        let nanos = (b * h * (3 * d + 2 * dv)).saturating_mul(pairs) / MULTIPLICATIONS_PER_NANO;
        for_each_part(b * groups, nanos, (), |some, ()| {
            let mut work = GroupScratch {
                scores: ScoreScratch::new(blocks(), [d, dv], self.rule.soft_cap.is_some()),
                keys: NeighbouringRows::new(blocks(), d, Side::Right),
                dq: Scratch::new(LEAF_ROWS * d),
                unfinished: UnfinishedParts::new(tq * d),
                sums: [d, dv].map(|d| Scratch::new(keys * d)),
                nodes: [(); 2].map(|()| parts.iter().map(|_| Vec::new()).collect()),
            };
            for group in some.map(|i| [i / groups, i % groups]) {
                work.keys.fill(given.k.at(group));
                let done = |factors| self.group_gradients(group, factors, (&given, &parts), &mut work, &out);
                [Factors::Finite, Factors::Any].into_iter().any(done);
            }
        });
        drop(rows);
        buffers.gradients([q, k, v])
    }

    /// Computes the gradients of a group's queries, keys and values. Returns true if they are all finite.
    fn group_gradients<'g, T: Gemm>(
        &self,
        [b, group]: [usize; 2],
        factors: Factors,
        (given, parts): (&BackwardInputs<'g, T>, &[KeyPart<T>]),
        work: &mut GroupScratch<'g, T>,
        [dq, dk, dv]: &[(&SharedRows<'_, T>, RowPlaces); 3],
    ) -> bool {
        let (d, v_d) = (given.k.d, given.v.d);
        let ([dk_sum, dv_sum], [dk_room, dv_room]) = (&mut work.sums, &mut work.nodes);
        let mut dk_nodes = part_nodes(dk_sum.get(), parts, d, dk_room);
        let mut dv_nodes = part_nodes(dv_sum.get(), parts, v_d, dv_room);
        let mut finite = true;
        for (i, head_joins) in merges(given.each, 1).into_iter().enumerate() {
            let head = [b, group * given.each + i];
            for (part, (dk_nodes, dv_nodes)) in parts.iter().zip(dk_nodes.iter_mut().zip(&mut dv_nodes)) {
                for (n, window) in part.leaves.iter().enumerate() {
                    let (step, joins) = (window.step, window.joins);
                    let planned = |block| Leaf::new(&self.rule, block, [d, v_d], (joins, step));
                    let narrow = given.scores.narrow(&window.block, head).map(planned);
                    let leaf = narrow.as_ref().unwrap_or(window);
                    let block = &leaf.block;
                    let with_plan = (block, leaf.pairs.as_ref());
                    let (p, ds) = self.block_gradients(with_plan, head, given, &mut work.scores, true);
                    if let Some(step) = step {
                        let rows = &mut work.dq.get()[..block.rows * d];
                        leaf.query_gradients(factors, ds, &work.keys, rows);
                        let start = block.start * d;
                        work.unfinished.push(step, start..start + rows.len(), rows);
                        if step.last {
                            // SAFETY: the rows of this head's queries; its group is in one part of `for_each_part`.
                            finite &= unsafe { put_rows(rows, dq.0, dq.1.at(head, block.start), None) };
                        }
                    }
                    // With infinities each row is multiplied by itself, whatever it sees.
                    let by_all = (factors == Factors::Any).then(|| block.leaves_by_rows(&[]));
                    let [of_dk, of_dv] =
                        leaf.over_queries.each_ref().map(|OverQueries { seen_by, bands }| {
                            (by_all.as_ref().unwrap_or(seen_by).as_slice(), factors, bands.as_ref())
                        });
                    let joins = joins + if n + 1 == part.leaves.len() { head_joins } else { 0 };
                    let rows = (head, block.start, block.rows);
                    dk_nodes.push(block, of_dk, (ds, given.q.rows(rows)), joins);
                    dv_nodes.push(block, of_dv, (p, given.grad.rows(rows)), joins);
                }
            }
        }
        for (sum, to) in [(dk_sum.get(), dk), (dv_sum.get(), dv)] {
            // SAFETY: the rows of this group's keys, and a group is in one part of `for_each_part`.
            finite &= unsafe { put_rows(sum, to.0, to.1.at([b, group], 0), None) };
        }
        finite
    }

    /// Returns a block's probabilities after dropout, and the gradients of the products of queries and keys, or of the
    /// scores if `through_scale` is false.
    pub(super) fn block_gradients<'w, 'g, T: Gemm>(
        &self,
        (block, pairs): (&QueryBlock, Option<&[BandedProduct<T>; 2]>),
        head: [usize; 2],
        given: &BackwardInputs<'g, T>,
        work: &'w mut ScoreScratch<'g, T>,
        through_scale: bool,
    ) -> (&'w [T], &'w [T]) {
        let [h, tq] = given.shape;
        let (own, group) = ((head, block.start, block.rows), [head[0], head[1] / given.each]);
        let len = block.scores_len();
        let (p, ds) = (&mut work.p.get()[..len], &mut work.ds.get()[..len]);
        if len == 0 {
            return (p, ds);
        }
        let [scores, gradients] = &mut work.pairs;
        if work.group.replace(group) != Some(group) {
            scores.fill(given.k.at(group));
            gradients.fill(given.v.at(group));
        }
        let [of_scores, of_gradients] = [0, 1].map(|i| (block, pairs.map(|pairs| &pairs[i])));
        scores.multiply(of_scores, T::of(self.scale), given.q.rows(own), p);
        gradients.multiply(of_gradients, T::ONE, given.grad.rows(own), ds);
        self.drop_gradients(block, head, ds);
        let scale = if through_scale { T::of(self.scale) } else { T::ONE };
        let lse = &given.lse[(head[0] * h + head[1]) * tq + block.start..][..block.rows];
        let (mut deltas, products) = ([T::ZERO; LEAF_ROWS], work.products.get());
        let deltas = &mut deltas[..block.rows];
        let (o, grad) = (given.o.rows(own), given.grad.rows(own));
        dispatch(RowDots { x: o, y: grad, tree: &mut work.dot, products, dots: deltas });
        if !block.lanes.is_empty() {
            dispatch(ColumnGradients { p, ds, block, scale, lse, deltas });
            return (p, ds);
        }
        dispatch(ScoreGradients {
            inputs: &given.scores,
            head,
            p,
            ds,
            block,
            scale,
            slopes: work.slopes.as_mut().filter(|_| through_scale).map(Scratch::get),
            lse,
            deltas,
        });
        self.drop_probabilities(block, head, p);
        (p, ds)
    }
}

/// Returns the nodes of the gradients of each part's keys or values.
fn part_nodes<'a, T: Gemm>(
    mut out: &'a mut [T],
    parts: &[KeyPart<T>],
    d: usize,
    rooms: &'a mut [Vec<Scratch<T>>],
) -> Vec<UnfinishedNodes<'a, T>> {
    let nodes = parts.iter().zip(rooms).map(|(part, room)| {
        let (own, rest) = std::mem::take(&mut out).split_at_mut(part.keys.len() * d);
        out = rest;
        UnfinishedNodes::new(own, &part.keys, d, room)
    });
    nodes.collect()
}

/// Buffers for the gradients of a group.
struct GroupScratch<'a, T> {
    scores: ScoreScratch<'a, T>,
    keys: NeighbouringRows<'a, T>,
    /// The gradients of a leaf's queries.
    dq: Scratch<T>,
    /// The gradients of queries over some parts of the keys.
    unfinished: UnfinishedParts<T>,
    /// The gradients of the keys and of the values, and their trees' other nodes, for each part of the keys.
    sums: [Scratch<T>; 2],
    nodes: [Vec<Vec<Scratch<T>>>; 2],
}

/// The operands.
pub(super) struct BackwardInputs<'a, T> {
    q: Heads<'a, T>,
    k: Heads<'a, T>,
    v: Heads<'a, T>,
    o: Heads<'a, T>,
    grad: Heads<'a, T>,
    lse: &'a [T],
    pub(super) scores: ScoreInputs<'a, T>,
    /// The numbers of heads and queries.
    shape: [usize; 2],
    /// The number of query heads per key head.
    each: usize,
}

impl<'a, T: Gemm> BackwardInputs<'a, T> {
    pub(super) fn of(
        call: &CpuAttention<'_>,
        [q, k, v]: [&'a Tensor; 3],
        [o, grad]: [&'a Tensor; 2],
        lse: &'a Tensor,
        extra: &'a ScoreTensors,
    ) -> Result<Self> {
        let (h, tq, groups) = (q.shape()[1], q.shape()[2], k.shape()[1]);
        Ok(BackwardInputs {
            q: Heads::of(q)?,
            k: Heads::of(k)?,
            v: Heads::of(v)?,
            o: Heads::of(o)?,
            grad: Heads::of(grad)?,
            lse: lse.as_slice::<T>()?,
            scores: ScoreInputs::of(call.rule, extra)?,
            shape: [h, tq],
            each: group_len(h, groups),
        })
    }
}

/// Buffers for the probabilities and gradients of scores, `[queries, keys]`, of one block, and for a group's keys and
/// values.
pub(super) struct ScoreScratch<'a, T> {
    p: Scratch<T>,
    ds: Scratch<T>,
    /// One row.
    slopes: Option<Scratch<T>>,
    dot: RowTree<T>,
    products: Scratch<T>,
    /// The operands of the products with keys and with values.
    pairs: [PairOperands<'a, T>; 2],
    /// The batch and the group whose keys and values `pairs` has.
    group: Option<[usize; 2]>,
}

impl<'a, T: Gemm> ScoreScratch<'a, T> {
    pub(super) fn new<'b>(
        blocks: impl Iterator<Item = &'b QueryBlock> + Clone,
        [d, dv]: [usize; 2],
        soft_cap: bool,
    ) -> Self {
        let (len, width) = blocks.clone().fold((0, 0), |(l, w), b| (l.max(b.scores_len()), w.max(b.width)));
        ScoreScratch {
            p: Scratch::new(len),
            ds: Scratch::new(len),
            slopes: soft_cap.then(|| Scratch::new(width)),
            dot: RowTree::new(dv),
            products: Scratch::new(LEAF_ROWS * dv),
            pairs: [d, dv].map(|d| PairOperands::new(blocks.clone(), d)),
            group: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::super::CpuAttentionDropout;
    use super::*;
    use crate::tensor::cpu::{Isa, map2, with_isa};
    use crate::tensor::{DType, Shape};

    fn noise(shape: impl Into<Shape>, seed: usize) -> Tensor {
        Tensor::build(shape, |out: &mut [f32]| {
            for (i, x) in out.iter_mut().enumerate() {
                *x = ((i * 7919 + seed * 131) % 1009) as f32 * 0.003_1 - 1.5;
            }
        })
    }

    fn bits(x: &Tensor) -> Vec<u32> {
        x.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect()
    }

    /// Operands of a call, which the tests repeat on some of the queries and heads.
    struct AttentionCase {
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropped: bool,
    }

    impl AttentionCase {
        fn new(heads: usize, groups: usize, queries: usize, keys: usize, dropped: bool) -> AttentionCase {
            let (q, k) = (noise([2, queries, heads, 8], 1), noise([2, groups, keys, 8], 2));
            AttentionCase { q: q.transpose(1, 2).unwrap(), k, v: noise([2, groups, keys, 5], 3), dropped }
        }

        /// Returns output, lse, and the gradients of q, k and v for the queries and heads in these ranges.
        fn at(&self, queries: Range<usize>, heads: Range<usize>) -> [Tensor; 5] {
            let cut = |t: &Tensor| {
                let t = t.narrow(1, heads.start, heads.len()).unwrap();
                t.narrow(2, queries.start, queries.len()).unwrap()
            };
            let each = self.q.shape()[1] / self.k.shape()[1];
            let groups = heads.start / each..heads.end.div_ceil(each);
            let [k, v] = [&self.k, &self.v].map(|t| t.narrow(1, groups.start, groups.len()).unwrap());
            let keep = |[b, h, i]: [usize; 3], from: usize, keep: &mut [bool]| {
                let (h, i) = (h + heads.start, i + queries.start);
                let kept = |j: usize| (b * 7 + h * 5 + i * 3 + j * j) % 4 != 1;
                keep.iter_mut().enumerate().for_each(|(j, k)| *k = kept(from + j));
            };
            let dropout = CpuAttentionDropout { scale: 1.25, keep: &keep };
            let dropout = self.dropped.then_some(dropout);
            let call = CpuAttention { dropout, ..CpuAttention::causal("attention", queries.start, 0.3) };
            let q = cut(&self.q);
            let (o, lse) = call.forward(&q, &k, &v).unwrap();
            let grad = noise([2, self.q.shape()[1], self.q.shape()[2], 5], 4);
            let [dq, dk, dv] = call.backward([&q, &k, &v], (&o, &lse), &cut(&grad)).unwrap();
            [o, lse, dq, dk, dv]
        }

        fn whole(&self) -> [Tensor; 5] {
            self.at(0..self.q.shape()[2], 0..self.q.shape()[1])
        }

        /// Returns the gradients of k and v of a node of the tree, added from separately computed leaves.
        fn by_leaves(&self, queries: Range<usize>, heads: Range<usize>, leaf: usize) -> [Tensor; 2] {
            let cut = |r: &Range<usize>| r.start + r.len().div_ceil(2);
            let parts = if heads.len() > 1 {
                let mid = cut(&heads);
                [heads.start..mid, mid..heads.end].map(|heads| self.by_leaves(queries.clone(), heads, leaf))
            } else if queries.len() > leaf {
                let mid = cut(&queries);
                [queries.start..mid, mid..queries.end].map(|q| self.by_leaves(q, heads.clone(), leaf))
            } else {
                let [.., dk, dv] = self.at(queries, heads);
                return [dk, dv];
            };
            let [[a, b], [c, d]] = parts;
            let add = |x: &Tensor, y: &Tensor| map2::<f32, _>(x, y, |x, y| x + y).unwrap();
            [add(&a, &c), add(&b, &d)]
        }
    }

    #[test]
    fn nodes_computed_apart_add_up_to_the_whole_by_bits() {
        for (heads, queries, keys) in
            [(1, 65, 65), (1, 70, 70), (1, 128, 128), (3, 150, 150), (2, 200, 231), (5, 130, 70), (4, 1, 1)]
        {
            for dropped in [false, true] {
                let call = AttentionCase::new(heads, 1, queries, keys, dropped);
                let [.., dk, dv] = call.whole();
                for leaf in [LEAF_ROWS, 100] {
                    let [k, v] = call.by_leaves(0..queries, 0..heads, leaf);
                    let same = bits(&k) == bits(&dk) && bits(&v) == bits(&dv);
                    assert!(same, "{heads} heads, {queries} queries, {keys} keys, apart from {leaf} on");
                }
            }
        }
    }

    #[test]
    fn what_belongs_to_a_query_does_not_depend_on_the_others() {
        let cuts = |n: usize| (0..n).flat_map(move |a| (a + 1..=n).map(move |b| a..b));
        let some = [0..63, 0..64, 1..66, 60..70, 63..129, 64..130, 64..128, 65..66, 127..130, 129..130];
        for (queries, ranges) in [(9, cuts(9).collect()), (130, some.to_vec())] {
            let call = AttentionCase::new(4, 2, queries, queries, true);
            let whole = call.whole();
            for range in ranges {
                for heads in [0..4, 2..4] {
                    let part = call.at(range.clone(), heads.clone());
                    for (part, whole) in part.iter().zip(&whole).take(3) {
                        let want = whole.narrow(1, heads.start, heads.len()).unwrap();
                        let want = want.narrow(2, range.start, range.len()).unwrap();
                        assert_eq!(bits(part), bits(&want), "queries {range:?}, heads {heads:?}");
                    }
                }
            }
        }
    }

    /// An infinite key gives some queries the score -inf, which leaves out the key and its infinite value.
    #[test]
    fn an_infinite_key_is_left_out_whatever_the_other_queries_are() {
        let mut call = AttentionCase::new(2, 2, 70, 70, false);
        call.k.make_mut::<f32>().unwrap()[20 * 8 + 1] = f32::INFINITY;
        call.v.make_mut::<f32>().unwrap()[20 * 5 + 2] = f32::INFINITY;
        let bits = |x: &Tensor| -> Vec<u32> {
            let values = x.to_vec::<f32>().unwrap();
            values.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect()
        };
        let whole = call.whole();
        let mut finite = 0;
        for i in 0..70 {
            for (part, whole) in call.at(i..i + 1, 0..2).iter().zip(&whole).take(3) {
                assert_eq!(bits(part), bits(&whole.narrow(2, i, 1).unwrap()), "query {i}");
            }
            let row = whole[0].narrow(2, i, 1).unwrap().to_f64_vec();
            finite += usize::from(i > 20 && row.iter().all(|x| x.is_finite()));
        }
        assert!((1..49).contains(&finite), "{finite} later queries leave the key out");
    }

    #[test]
    fn groups_are_heads_repeated_and_instruction_sets_agree() {
        let call = AttentionCase::new(6, 2, 97, 97, true);
        let repeat = |t: &Tensor| {
            let &[b, h, t_len, d] = &t.shape()[..] else { unreachable!("four dims") };
            let t = t.unsqueeze(2).unwrap().expand([b, h, 3, t_len, d]).unwrap();
            t.reshape([b, 3 * h, t_len, d]).unwrap()
        };
        let wide = AttentionCase { q: call.q.clone(), k: repeat(&call.k), v: repeat(&call.v), dropped: true };
        let (got, want) = (call.whole(), wide.whole());
        for i in 0..3 {
            assert_eq!(bits(&got[i]), bits(&want[i]));
        }
        for i in 3..5 {
            let (got, want) = (got[i].to_f64_vec(), want[i].to_f64_vec());
            let len = 97 * [8, 5][i - 3];
            for (at, got) in got.iter().enumerate() {
                let of = |head: usize| want[(at / len * 3 + head) * len + at % len];
                assert!((got - of(0) - of(1) - of(2)).abs() < 1e-4, "{at}");
            }
        }
        for &isa in Isa::available() {
            let again = with_isa(isa, || call.whole());
            assert!(again.iter().zip(&got).all(|(a, b)| bits(a) == bits(b)), "{isa:?}");
        }
    }

    #[test]
    fn no_sum_is_minus_zero_and_empty_ones_are_zero() {
        let call = AttentionCase::new(2, 1, 3, 5, false);
        let [.., dk, dv] = call.whole();
        for x in [&dk, &dv] {
            let unseen = x.narrow(2, 3, 2).unwrap();
            assert!(bits(&unseen).iter().all(|&b| b == 0), "keys that no query sees");
        }
        let none = AttentionCase::new(2, 2, 0, 4, false).whole();
        assert_eq!(none[3].to_f64_vec(), [0.0; 2 * 2 * 4 * 8]);
        let tiny = Tensor::full(DType::F32, [1, 1, 2, 1], 1e-30);
        let grad = Tensor::full(DType::F32, [1, 1, 2, 1], -1e-30);
        let call = CpuAttention::causal("attention", 0, 1.0);
        let (o, lse) = call.forward(&tiny, &tiny, &tiny).unwrap();
        let [_, dk, _] = call.backward([&tiny; 3], (&o, &lse), &grad).unwrap();
        assert!(bits(&dk).iter().all(|&b| b != 0x8000_0000), "{:?}", dk.to_f64_vec());
    }
}
