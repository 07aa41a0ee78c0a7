//! The gradient of the scores' bias: the gradients of the scores, summed over the dims along which the bias repeats.
//!
//! The sums follow the reduction tree over the repeated dims, in the order batch, heads, queries; leaves add neighbours.

use super::backward::{AttentionPass, BackwardInputs, ScoreScratch};
use super::backward_plan::leaves;
use super::call::AttentionKernel;
use super::query_block::QueryBlock;
use crate::gemm::Gemm;
use crate::summation::LEAF;
use crate::sums::tree::merges;

/// The sum that the gradient of a bias is: the shapes of the scores and of the bias, as a call has them.
pub struct BiasSum {
    /// The shape of the scores.
    pub shape: [usize; 4],
    /// The shape of the bias, in which any extent may be 1.
    pub bias: [usize; 4],
}

impl BiasSum {
    /// Returns true for each dim along which the bias repeats.
    pub fn repeats(&self) -> [bool; 3] {
        [0, 1, 2].map(|d| self.bias[d] != self.shape[d])
    }

    /// Returns the number of joins after each element of the repeated dims, in order.
    pub fn joins(&self) -> Vec<u8> {
        let dims: Vec<usize> = (0..3).filter(|&d| self.repeats()[d]).map(|d| self.shape[d]).collect();
        let Some((&last, outer)) = dims.split_last() else { return vec![0] };
        let mut joins = merges(last, LEAF);
        for &len in outer.iter().rev() {
            let inner = joins;
            joins = Vec::with_capacity(len * inner.len());
            for more in merges(len, 1) {
                joins.extend_from_slice(&inner);
                if let Some(last) = joins.last_mut() {
                    *last += more;
                }
            }
        }
        joins
    }
}

impl<T: Gemm> AttentionKernel<'_, T> {
    /// Adds the gradient of a bias with all keys to `data`, which is 0 at first.
    pub(super) fn bias_backward(&self, pass: &AttentionPass<'_, T>, sum: &BiasSum, data: &mut [T]) {
        let given = BackwardInputs::of(self, pass);
        let BiasSum { shape: [.., tq, keys], bias } = *sum;
        let blocks: Vec<QueryBlock> = leaves(tq)
            .into_iter()
            .filter(|(rows, _)| !rows.is_empty())
            .map(|(rows, _)| self.leaf_block(rows, keys))
            .collect();
        let repeats = sum.repeats();
        let joins = sum.joins();
        let outer = |d: usize| if repeats[d] { 0..1 } else { 0..sum.shape[d] };
        let inner = |d: usize, at: usize| if repeats[d] { 0..sum.shape[d] } else { at..at + 1 };
        // The blocks whose elements are one node's: all of a head if the bias repeats along the queries, else one.
        let parts: Vec<&[QueryBlock]> =
            if repeats[2] { vec![&blocks[..]] } else { blocks.chunks(1).collect() };
        for (ob, oh) in outer(0).flat_map(|b| outer(1).map(move |h| (b, h))) {
            for part in &parts {
                let Some(first) = part.first() else { continue };
                let mut work = ScoreScratch::new(part.iter(), [pass.k.d, pass.v.d], false);
                let entry = if repeats[2] { keys } else { first.rows * keys };
                let row = if repeats[2] { 0 } else { first.start };
                let at = ((ob * bias[1] + oh) * bias[2] + row) * keys;
                let mut nodes = NodeStack::new(&mut data[at..][..entry], &joins);
                let heads = inner(0, ob).flat_map(|b| inner(1, oh).map(move |h| [b, h]));
                for (head, block) in heads.flat_map(|head| part.iter().map(move |block| (head, block))) {
                    let narrow = given.scores.narrow(block, head);
                    let block = narrow.as_ref().unwrap_or(block);
                    let (_, ds) = self.block_gradients((block, None), head, &given, &mut work, false);
                    let per_push = if repeats[2] { 1 } else { block.rows };
                    for first in (0..block.rows).step_by(per_push) {
                        nodes.push(|entry| {
                            entry.fill(T::ZERO);
                            for (i, entry) in entry.chunks_exact_mut(keys).enumerate() {
                                let len = block.to - block.from;
                                if len > 0 {
                                    let row = &ds[(first + i) * block.width..][..len];
                                    entry[block.from..block.to].copy_from_slice(row);
                                }
                            }
                        });
                    }
                }
            }
        }
        // -0 becomes 0.
        data.iter_mut().for_each(|x| *x = *x + T::ZERO);
    }
}

/// The unfinished nodes of a sum of slices: the first one in the result, the others in buffers.
struct NodeStack<'a, T> {
    out: &'a mut [T],
    room: Vec<Vec<T>>,
    /// The number of unfinished nodes.
    top: usize,
    joins: std::slice::Iter<'a, u8>,
}

impl<'a, T: Gemm> NodeStack<'a, T> {
    fn new(out: &'a mut [T], joins: &'a [u8]) -> Self {
        NodeStack { out, room: Vec::new(), top: 0, joins: joins.iter() }
    }

    /// Adds the next element, which `write` stores.
    fn push(&mut self, write: impl FnOnce(&mut [T])) {
        match self.top.checked_sub(1) {
            None => write(self.out),
            Some(i) => {
                if i == self.room.len() {
                    self.room.push(vec![T::ZERO; self.out.len()]);
                }
                write(&mut self.room[i]);
            }
        }
        self.top += 1;
        for _ in 0..*self.joins.next().expect("as many elements as joins") {
            self.top -= 1;
            let (below, above) = self.room.split_at_mut(self.top - 1);
            let left = below.last_mut().map_or(&mut *self.out, |node| &mut node[..]);
            left.iter_mut().zip(&above[0]).for_each(|(l, &r)| *l = *l + r);
        }
    }
}
