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
use super::call::{AttentionKernel, MULTIPLICATIONS_PER_NANO};
use super::heads::{Heads, RowPlaces, group_len};
use super::key_parts::UnfinishedParts;
use super::key_rows::{NeighbouringRows, PairOperands, Side};
use super::query_block::{Factors, LEAF_ROWS, QueryBlock};
use super::query_sums::UnfinishedNodes;
use super::score_columns::ColumnGradients;
use super::score_rows::{RowDots, ScoreGradients, put_rows};
use super::scores::ScoreInputs;
use super::scratch::Scratch;
use crate::gemm::{BandedProduct, Gemm};
use crate::isa::simd::dispatch;
use crate::sums::tree::{RowTree, merges};
use crate::threads::parts::SharedRows;
use crate::threads::team::for_each_part;

/// The operands and results of the forward pass, and the gradient of its output.
#[derive(Clone, Copy)]
pub struct AttentionPass<'a, T> {
    /// The queries.
    pub q: Heads<'a, T>,
    /// The keys.
    pub k: Heads<'a, T>,
    /// The values.
    pub v: Heads<'a, T>,
    /// The output, with contiguous rows.
    pub o: Heads<'a, T>,
    /// The logarithms of the sums of exponentials `[batch, heads, queries]`.
    pub lse: &'a [T],
    /// The gradient of the output, with contiguous rows.
    pub grad: Heads<'a, T>,
}

impl<T: Gemm> AttentionKernel<'_, T> {
    /// Writes the gradients of queries, keys and values to the [places](RowPlaces) of each, in one buffer or in one of each.
    pub(super) fn backward(
        &self,
        pass: &AttentionPass<'_, T>,
        buffers: &mut [&mut [T]],
        places: [RowPlaces; 3],
    ) {
        let given = BackwardInputs::of(self, pass);
        let [b, h, tq] = [pass.q.batch, pass.q.heads, pass.q.len];
        let (groups, keys, d, dv) = (pass.k.heads, pass.k.len, pass.k.d, pass.v.d);
        let rows: Vec<SharedRows<'_, T>> =
            (buffers.iter_mut().zip([d, d, dv])).map(|(buffer, d)| SharedRows::new(buffer, d)).collect();
        let out = [0, 1, 2].map(|i| (&rows[i.min(rows.len() - 1)], places[i]));
        let by_keys = self.scores_by_keys([tq, keys], [d, dv]);
        let parts = self.parts(tq, keys, [d, dv], by_keys);
        let blocks = || parts.iter().flat_map(|part| part.leaves.iter().map(|leaf| &leaf.block));
        let pairs = blocks().map(|block| block.rows * block.width).sum::<usize>();
        let nanos = (b * h * (3 * d + 2 * dv)).saturating_mul(pairs) / MULTIPLICATIONS_PER_NANO;
        for_each_part(b * groups, nanos, (), |some, ()| {
            let mut work = HeadGroupScratch {
                scores: ScoreScratch::new(blocks(), [d, dv], self.scores.soft_cap.is_some()),
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
    }

    /// Computes the gradients of a group's queries, keys and values. Returns true if they are all finite.
    fn group_gradients<'g>(
        &self,
        [b, group]: [usize; 2],
        factors: Factors,
        (given, parts): (&BackwardInputs<'g, T>, &[KeyPart<T>]),
        work: &mut HeadGroupScratch<'g, T>,
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
                    let planned = |block| Leaf::new(&self.scores.rule, block, [d, v_d], (joins, step));
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
    pub(super) fn block_gradients<'w, 'g>(
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
struct HeadGroupScratch<'a, T> {
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
    pub(super) fn of(call: &AttentionKernel<'a, T>, pass: &AttentionPass<'a, T>) -> Self {
        let &AttentionPass { q, k, v, o, lse, grad } = pass;
        let (shape, each) = ([q.heads, q.len], group_len(q.heads, k.heads));
        BackwardInputs { q, k, v, o, grad, lse, scores: call.scores, shape, each }
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
