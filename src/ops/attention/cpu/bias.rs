//! The gradient of the scores' bias: the gradients of the scores, summed over the dims along which the bias repeats.
//!
//! The sums follow the reduction tree over the repeated dims, in the order batch, heads, queries; leaves add neighbours.

use super::backward::{BackwardInputs, ScoreScratch};
use super::backward_plan::leaves;
use super::score_rows::ScoreTensors;
use super::{CpuAttention, QueryBlock};
use crate::error::Result;
use crate::ops::attention::scores::BiasSum;
use crate::tensor::cpu::{Gemm, cast};
use crate::tensor::{DType, Tensor};

impl CpuAttention<'_> {
    /// Returns the gradient of the bias from the forward pass's operands and results and the gradient `grad` of `o`. A
    /// bias that repeats along the keys shifts all scores of a query, so its gradient is 0.
    ///
    /// # Errors
    /// Returns the errors of [`CpuAttention::forward`]. Refuses a call without a bias.
    pub fn bias_backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        (o, lse): (&Tensor, &Tensor),
        grad: &Tensor,
    ) -> Result<Tensor> {
        self.expect_fit(q, k, v)?;
        let Some(bias) = self.operands.bias else {
            return Err(crate::Error::invalid(self.verb, "has no bias", q.notation(), ""));
        };
        let given = BiasSum::of([q, k], bias);
        match q.dtype() {
            DType::F32 => self.bias_backward_as::<f32>([q, k, v], (o, lse), grad, &given),
            DType::F64 => self.bias_backward_as::<f64>([q, k, v], (o, lse), grad, &given),
            half => {
                let [q, k, v, o, grad] = [q, k, v, o, grad].map(|x| cast(x, DType::F32));
                let (q, k, v, o, grad) = (q?, k?, v?, o?, grad?);
                cast(&self.bias_backward_as::<f32>([&q, &k, &v], (&o, lse), &grad, &given)?, half)
            }
        }
    }

    fn bias_backward_as<T: Gemm>(
        &self,
        [q, k, v]: [&Tensor; 3],
        (o, lse): (&Tensor, &Tensor),
        grad: &Tensor,
        call: &BiasSum,
    ) -> Result<Tensor> {
        let BiasSum { shape: [.., tq, keys], bias } = *call;
        let mut out = Tensor::zeros(T::DTYPE, bias);
        if bias[3] != keys || out.numel() == 0 {
            return Ok(out);
        }
        let (o, grad, lse) = (o.contiguous_rows(), grad.contiguous_rows(), lse.packed());
        let extra = ScoreTensors::of(&self.operands, T::DTYPE)?;
        let given = BackwardInputs::<T>::of(self, [q, k, v], [&o, &grad], &lse, &extra)?;
        let blocks: Vec<QueryBlock> = leaves(tq)
            .into_iter()
            .filter(|(rows, _)| !rows.is_empty())
            .map(|(rows, _)| self.leaf_block(rows, keys))
            .collect();
        let data = out.make_mut::<T>()?;
        let repeats = call.repeats();
        let joins = call.joins();
        let outer = |d: usize| if repeats[d] { 0..1 } else { 0..call.shape[d] };
        let inner = |d: usize, at: usize| if repeats[d] { 0..call.shape[d] } else { at..at + 1 };
        // The blocks whose elements are one node's: all of a head if the bias repeats along the queries, else one.
        let parts: Vec<&[QueryBlock]> =
            if repeats[2] { vec![&blocks[..]] } else { blocks.chunks(1).collect() };
        for (ob, oh) in outer(0).flat_map(|b| outer(1).map(move |h| (b, h))) {
            for part in &parts {
                let Some(first) = part.first() else { continue };
                let mut work = ScoreScratch::new(part.iter(), [k.shape()[3], v.shape()[3]], false);
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
        Ok(out)
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
