//! The gradients of [attention](super).
//!
//! The gradients of keys and values are sums over queries and over the heads of a group. They follow the reduction
//! tree. Its upper levels halve the heads down to single ones; its lower levels halve the range of queries `[a, b)` at
//! `a + ceil((b - a) / 2)` down to *leaves* of at most 64 queries. Each leaf is one matrix product, whose kernel has a
//! tree of its own. The given queries are one node of the tree, so their sum is that node's value on every rank.
//!
//! A leaf of queries is also a block of queries. It adds only to the keys that one of its queries sees. Adding zeros to
//! the other keys would change no bit, because no sum is -0.

use std::ops::Range;

use smallvec::SmallVec;

use super::key_rows::{NeighbouringRows, TransposedRows};
use super::query_block::{
    BlockSum, Heads, KeySums, LEAF_ROWS, QueryBlock, ROWS, Scratch, Stripe, all_finite, masked_product,
};
use super::score_rows::{ScoreGradients, ScoreInputs, ScoreTensors, put_rows};
use super::{CpuAttention, MULTIPLICATIONS_PER_NANO, group_len};
use crate::error::Result;
use crate::tensor::cpu::{Gemm, Kernel, MatRef, RowTree, SharedRows, dispatch, for_each_part, merges};
use crate::tensor::{SplitRule, Tensor};

impl CpuAttention<'_> {
    /// Returns the gradients as buffers `[batch, length, heads, d]`.
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
        let shapes = [(h, tq, d), (groups, keys, d), (groups, keys, dv)].map(|(h, t, d)| [b, t, h, d]);
        if tq == 0 || keys == 0 {
            return Ok(shapes.map(|shape| Tensor::zeros(T::DTYPE, shape)));
        }
        let mut out = shapes.map(|shape| Tensor::uninit(T::DTYPE, shape));
        let [dq, dk, dvs] = &mut out;
        let (dq, dk, dvs) = (dq.make_mut::<T>()?, dk.make_mut::<T>()?, dvs.make_mut::<T>()?);
        let leaves = leaves(tq);
        let blocks: Vec<(QueryBlock, u8)> = leaves
            .into_iter()
            .filter(|(rows, _)| !rows.is_empty())
            .map(|(rows, joins)| (self.leaf_block(rows, keys), joins))
            .collect();
        let stripes_of = |block: &QueryBlock| -> Vec<(Stripe, KeySums<T>)> {
            let with_sums = |stripe: Stripe| {
                let sums = block.over_keys(&stripe.leaves);
                (stripe, sums)
            };
            block.stripes(&self.rule).into_iter().map(with_sums).collect()
        };
        let stripes: Vec<_> = blocks.iter().map(|(block, _)| stripes_of(block)).collect();
        let head_joins = merges(given.each, 1);
        let (dq, dk, dvs) = (SharedRows::new(dq, d), SharedRows::new(dk, d), SharedRows::new(dvs, dv));
        let pairs = blocks.iter().map(|(block, _)| block.rows * block.width).sum::<usize>();
        let nanos = (b * h * (3 * d + 2 * dv)).saturating_mul(pairs) / MULTIPLICATIONS_PER_NANO;
        for_each_part(b * groups, nanos, (), |some, ()| {
            let mut work =
                ScoreScratch::new(blocks.iter().map(|b| &b.0), [d, dv], self.rule.soft_cap.is_some());
            let (mut key_rows, mut key_rows_of) =
                (NeighbouringRows::new(blocks.iter().map(|b| &b.0), d), None);
            let (mut dk_room, mut dv_room) = (Vec::new(), Vec::new());
            let (mut dk_sum, mut dv_sum) = (Scratch::new(keys * d), Scratch::new(keys * dv));
            let mut dq_room = Scratch::new(LEAF_ROWS * d);
            let dq_room = dq_room.get();
            for (b, group) in some.map(|i| (i / groups, i % groups)) {
                let mut dk_nodes = UnfinishedNodes::new(dk_sum.get(), (keys, d), &mut dk_room);
                let mut dv_nodes = UnfinishedNodes::new(dv_sum.get(), (keys, dv), &mut dv_room);
                for (i, &head_joins) in head_joins.iter().enumerate() {
                    let head = [b, group * given.each + i];
                    for (n, (window, joins)) in blocks.iter().enumerate() {
                        let narrow = given.scores.narrow(window, head);
                        let narrow_stripes = narrow.as_ref().map(stripes_of);
                        let stripes = narrow_stripes.as_ref().unwrap_or(&stripes[n]);
                        let block = narrow.as_ref().unwrap_or(window);
                        let (p, ds, hidden) = self.block_gradients(block, head, &given, &mut work, true);
                        if key_rows_of.replace([b, group]) != Some([b, group]) {
                            key_rows.fill(given.k.at([b, group]));
                        }
                        let dq_rows = &mut dq_room[..block.rows * d];
                        for (Stripe { rows, .. }, KeySums { over, keys }) in stripes {
                            let into = &mut dq_rows[rows.start * d..rows.end * d];
                            if keys.is_empty() {
                                into.fill(T::ZERO);
                                continue;
                            }
                            let hidden = hidden.clone().map(|hidden| block.among(hidden, keys));
                            let (a, b) = (block.part(ds, rows, keys.clone()), key_rows.rows(keys.clone(), d));
                            masked_product(&hidden, BlockSum::Keys(over), a, b, (into, (d.max(1), 1)));
                        }
                        let first = (head[0] * tq + block.start) * h + head[1];
                        // SAFETY: the rows of this head's queries; its group is in one part of `for_each_part`.
                        unsafe { put_rows(dq_rows, &dq, (first, h), None) };
                        // With infinities each row is multiplied by itself, whatever it sees.
                        let masked = hidden.iter().any(|keys| !keys.is_empty());
                        let stripes: SmallVec<[Stripe; 2]> = match masked {
                            true => SmallVec::new(),
                            false => stripes.iter().map(|stripe| stripe.0.clone()).collect(),
                        };
                        let seen_by = block.leaves_by_rows(&stripes);
                        let joins = joins + if n + 1 == blocks.len() { head_joins } else { 0 };
                        let rows = (head, block.start, block.rows);
                        dk_nodes.push((block, &seen_by), (masked, ds, given.q.rows(rows)), joins);
                        dv_nodes.push((block, &seen_by), (masked, p, given.grad.rows(rows)), joins);
                    }
                }
                for (sum, to) in [(dk_sum.get(), &dk), (dv_sum.get(), &dvs)] {
                    let first = b * keys * groups + group;
                    // SAFETY: the rows of this group's keys, and a group is in one part of `for_each_part`.
                    unsafe { put_rows(sum, to, (first, groups), None) };
                }
            }
        });
        Ok(out)
    }

    /// Returns these queries as a block.
    pub(super) fn leaf_block(&self, rows: Range<usize>, keys: usize) -> QueryBlock {
        QueryBlock::new(&self.rule, rows.start, self.q_start + rows.start, rows.len(), keys)
    }

    /// Returns a block's probabilities after dropout, and the gradients of the products of queries and keys, or of the
    /// scores if `through_scale` is false; then the [keys](QueryBlock::hidden) that some row may leave out.
    pub(super) fn block_gradients<'w, T: Gemm>(
        &self,
        block: &QueryBlock,
        head: [usize; 2],
        given: &BackwardInputs<'_, T>,
        work: &'w mut ScoreScratch<T>,
        through_scale: bool,
    ) -> (&'w [T], &'w [T], [Range<usize>; 2]) {
        let [h, tq] = given.shape;
        let (own, group) = ((head, block.start, block.rows), [head[0], head[1] / given.each]);
        let len = block.rows * block.width;
        let (p, ds) = (&mut work.p.get()[..len], &mut work.ds.get()[..len]);
        if len == 0 {
            return (p, ds, [0..0, 0..0]);
        }
        if work.group.replace(group) != Some(group) {
            work.columns[0].fill(given.k.at(group));
            work.columns[1].fill(given.v.at(group));
        }
        self.scores(block, (given.q.at(head), &work.columns[0]), p);
        self.products(block, T::ONE, (given.grad.rows(own), &work.columns[1]), ds);
        self.drop_gradients(block, head, ds);
        let left_out = dispatch(ScoreGradients {
            inputs: &given.scores,
            head,
            p,
            ds,
            block,
            scale: if through_scale { T::of(self.scale) } else { T::ONE },
            slopes: work.slopes.as_mut().filter(|_| through_scale).map(Scratch::get),
            lse: &given.lse[(head[0] * h + head[1]) * tq + block.start..][..block.rows],
            o: given.o.rows(own),
            grad: given.grad.rows(own),
            dot: (&mut work.dot, work.products.get()),
            find_holes: !given.finite,
        });
        self.drop_probabilities(block, head, p);
        let hidden = match given.finite {
            true => [0..0, 0..0],
            false => block.hidden(&self.rule, left_out || given.scores.has_holes()),
        };
        (p, ds, hidden)
    }
}

/// Returns the leaves of the tree over `queries` in order, each with the number of joins that follow it.
pub(super) fn leaves(queries: usize) -> Vec<(Range<usize>, u8)> {
    fn halve(range: Range<usize>, list: &mut Vec<(Range<usize>, u8)>) {
        if range.len() <= LEAF_ROWS {
            return list.push((range, 0));
        }
        let mid = SplitRule::Halves.mid(range.start, range.end);
        halve(range.start..mid, list);
        halve(mid..range.end, list);
        list.last_mut().expect("just pushed").1 += 1;
    }
    let mut list = Vec::new();
    halve(0..queries, &mut list);
    list
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
    /// True if the operands that are multiplied by probabilities or their gradients have no infinity and no NaN.
    finite: bool,
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
        let (b, h, tq, groups) = (q.shape()[0], q.shape()[1], q.shape()[2], k.shape()[1]);
        let (q, k, grad) = (Heads::of(q)?, Heads::of(k)?, Heads::of(grad)?);
        let finite =
            tq >= ROWS && [(&q, h), (&k, groups), (&grad, h)].into_iter().all(|(x, n)| all_finite(x, [b, n]));
        Ok(BackwardInputs {
            q,
            k,
            v: Heads::of(v)?,
            o: Heads::of(o)?,
            grad,
            lse: lse.as_slice::<T>()?,
            scores: ScoreInputs::of(call.rule, extra)?,
            finite,
            shape: [h, tq],
            each: group_len(h, groups),
        })
    }
}

/// Buffers for the probabilities and gradients of scores, `[queries, keys]`, of one block, and for a group's keys and
/// values.
pub(super) struct ScoreScratch<T> {
    p: Scratch<T>,
    ds: Scratch<T>,
    /// One row.
    slopes: Option<Scratch<T>>,
    dot: RowTree<T>,
    products: Scratch<T>,
    columns: [TransposedRows<T>; 2],
    /// The batch and the group whose keys and values `columns` holds.
    group: Option<[usize; 2]>,
}

impl<T: Gemm> ScoreScratch<T> {
    pub(super) fn new<'b>(
        blocks: impl Iterator<Item = &'b QueryBlock> + Clone,
        [d, dv]: [usize; 2],
        soft_cap: bool,
    ) -> Self {
        let (len, width) = blocks.clone().fold((0, 0), |(l, w), b| (l.max(b.rows * b.width), w.max(b.width)));
        ScoreScratch {
            p: Scratch::new(len),
            ds: Scratch::new(len),
            slopes: soft_cap.then(|| Scratch::new(width)),
            dot: RowTree::new(dv),
            products: Scratch::new(LEAF_ROWS * dv),
            columns: [d, dv].map(|d| TransposedRows::new(blocks.clone(), d)),
            group: None,
        }
    }
}

/// The unfinished nodes of one sum, leftmost first: matrices `[keys, d]`, of whose rows only some are computed.
struct UnfinishedNodes<'a, T> {
    /// The leftmost node, which becomes the sum. All zeros at first.
    out: &'a mut [T],
    /// The other nodes.
    room: &'a mut Vec<Scratch<T>>,
    shape: (usize, usize),
    /// The computed rows of each node.
    rows: SmallVec<[Range<usize>; 16]>,
}

impl<'a, T: Gemm> UnfinishedNodes<'a, T> {
    fn new(out: &'a mut [T], shape: (usize, usize), room: &'a mut Vec<Scratch<T>>) -> UnfinishedNodes<'a, T> {
        out.fill(T::ZERO);
        UnfinishedNodes { out, room, shape, rows: SmallVec::new() }
    }

    /// Adds the leaf `aᵀ b` of a block of queries, then joins the two topmost nodes `joins` times. The product itself
    /// performs the first join.
    ///
    /// Each range of leaves of keys comes with the rows that it is summed over: a node of the tree over the block's rows,
    /// since the others add zeros.
    fn push(
        &mut self,
        (block, seen_by): (&QueryBlock, &[Stripe]),
        (masked, a, b): (bool, &[T], MatRef<'_, T>),
        joins: u8,
    ) {
        let d = self.shape.1;
        if d == 0 {
            return;
        }
        if joins == 0 {
            self.rows.push(0..0);
        }
        let top = self.rows.len() - 1;
        let data = match top.checked_sub(1) {
            None => &mut *self.out,
            Some(i) => {
                if i == self.room.len() {
                    self.room.push(Scratch::new(self.shape.0 * d));
                }
                self.room[i].get()
            }
        };
        // The leftmost node has zeros in rows that are not computed.
        let zeroed = if top == 0 { None } else { Some(d) };
        let whole = extend_rows(&mut self.rows[top], block.from..block.to, |rows| {
            if let Some(d) = zeroed {
                data[rows.start * d..rows.end * d].fill(T::ZERO);
            }
        });
        let onto = if whole { T::ONE } else { T::ZERO };
        let gaps = block.leaves.len() > 1;
        if !whole && gaps && top > 0 {
            data[block.from * d..block.to * d].fill(T::ZERO);
        }
        let hidden = 0..if masked { block.rows } else { 0 };
        for Stripe { rows, leaves } in seen_by {
            let keys = block.keys_of(leaves.clone());
            let into = (&mut data[keys.start * d..], (d, 1));
            let (a, b) = (block.part(a, rows, keys).t(), b.rows(rows.start, rows.len()));
            masked_product(std::slice::from_ref(&hidden), BlockSum::Queries(onto), a, b, into);
        }
        (1..joins).for_each(|_| self.join());
    }

    /// Joins the two topmost nodes.
    fn join(&mut self) {
        let d = self.shape.1;
        let rows = self.rows.pop().expect("two nodes");
        let left = self.rows.len() - 1;
        let (below, above) = self.room.split_at_mut(left);
        let data = match left.checked_sub(1) {
            None => &mut *self.out,
            Some(i) => below[i].get(),
        };
        let mut clear = |rows: Range<usize>| {
            if left > 0 {
                data[rows.start * d..rows.end * d].fill(T::ZERO);
            }
        };
        if !extend_rows(&mut self.rows[left], rows.clone(), &mut clear) {
            clear(rows.clone());
        }
        let right = &above[0].get()[rows.start * d..rows.end * d];
        dispatch(JoinNodes { left: &mut data[rows.start * d..], right });
    }
}

/// Widens the computed rows of a node so that they contain `more`, and calls `clear` with the rows that become new.
/// Returns false, and does not call it, if no row was computed before.
fn extend_rows(rows: &mut Range<usize>, more: Range<usize>, mut clear: impl FnMut(Range<usize>)) -> bool {
    if more.is_empty() {
        return !Range::is_empty(rows);
    }
    if Range::is_empty(rows) {
        *rows = more;
        return false;
    }
    if more.start < rows.start {
        clear(more.start..rows.start);
        rows.start = more.start;
    }
    if more.end > rows.end {
        clear(rows.end..more.end);
        rows.end = more.end;
    }
    true
}

/// The kernel that joins two nodes: adds the rows of `right` to those of `left`.
struct JoinNodes<'a, T> {
    left: &'a mut [T],
    right: &'a [T],
}

impl<T: Gemm> Kernel for JoinNodes<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        self.left.iter_mut().zip(self.right).for_each(|(l, &r)| *l = *l + r);
    }
}

#[cfg(test)]
mod tests {
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
