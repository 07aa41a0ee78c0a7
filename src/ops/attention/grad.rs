//! `attention_grad`: the derivative of `attention`. It computes the probabilities again, from `lse`.

use std::sync::Arc;

use smallvec::smallvec;

use super::{Attention, CausalCall, expect_heads, expect_times, heads_split, sample_attributes, work};
use crate::error::{Error, Result};
use crate::ops::softmax::sum_exp::accumulator;
use crate::ops::{
    AttentionGrad, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Statistic, Tensors, Vjp,
    Windows, Work, arity, list,
};
use crate::placement::Leaf;
use crate::tensor::Tensor;

impl Op for AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [q, k, v, o, lse, dy] = arity(self.name(), ins)?;
        let result = expect_heads(self.name(), [q, k, v], ins)?;
        expect_times(self.name(), [q, k], self.q_offset)?;
        let statistic = Meta::new(accumulator(q.dtype), &result.shape[..3]);
        if *o != result || *dy != result || *lse != statistic {
            let rule = format!("wants o and its gradient {result}, and lse {statistic}");
            return Err(Error::invalid(self.name(), rule, list(ins), ""));
        }
        Ok(smallvec![q.clone(), k.clone(), v.clone()])
    }

    /// Like the operator's rows. If the queries are sharded, dk and dv are partial sums; if the last dim of v is
    /// sharded, dq and dk are. Linear in do.
    fn rows(&self, ins: &[Meta], axis: MeshAxis) -> Vec<Row> {
        let (r, sum, queries, dim) =
            (AxisPlacement::R, AxisPlacement::SUM, AxisPlacement::S(2), AxisPlacement::S(3));
        // The outer levels of the tree are the query heads that share a key head; only without sharing is a shard of
        // the queries a set of the tree's nodes.
        let tree_sum =
            if ins[0].shape[1] == ins[1].shape[1] { AxisPlacement::TreeSum(Leaf::Chain) } else { sum };
        let mut rows = vec![
            Row::new([AxisPlacement::S(0); 6], [AxisPlacement::S(0); 3]),
            Row::new([queries, r, r, queries, queries, queries], [queries, tree_sum, tree_sum]),
            Row::new([r, r, dim, dim, r, dim], [sum, sum, dim]),
            Row::new([r, r, r, r, r, sum], [sum; 3]),
        ];
        if heads_split(ins, axis) {
            rows.push(Row::new([AxisPlacement::S(1); 6], [AxisPlacement::S(1); 3]));
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let [q, k, v, o, lse, dy] = ins else { unreachable!("infer counted the operands") };
        let [dq, dk, dv] = self.call(at).with(|attention| attention.backward([q, k, v], (o, lse), dy))?;
        Ok(smallvec![dq, dk, dv])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let [q, k, v, o, lse, dy] = ins else { unreachable!("infer counted the operands") };
        let [dq, dk, dv] = self.call(at).cuda()?.backward([q, k, v], (o, lse), dy)?;
        Ok(smallvec![dq, dk, dv])
    }

    /// Five products over the operator's pairs of queries and keys, among them the scores again.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        work::backward(ins, outs, self.p, self.q_offset.unwrap_or(0))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.refuse("the second derivative of attention is not written")
    }

    fn statistics(&self, _: &[Meta]) -> Vec<Statistic> {
        let &AttentionGrad { scale, p, q_offset, draw } = self;
        let forward = Arc::new(Attention { scale, p, q_offset, draw });
        let result =
            |k: usize| Statistic { operand: 3 + k, op: forward.clone(), of: vec![0, 1, 2], result: k };
        vec![result(0), result(1)]
    }

    fn adds(&self) -> bool {
        true
    }
}

impl AttentionGrad {
    fn call<'a>(&self, at: &'a Windows) -> CausalCall<'a> {
        let &AttentionGrad { scale, p, q_offset, draw } = self;
        CausalCall { verb: "attention_grad", scale, p, q_offset, draw: draw.0, at }
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let at = |q_offset, p: f64, q: [usize; 4], k: [usize; 4]| {
        let (scale, p, draw) = sample_attributes(p);
        let [q, k] = [q, k].map(Input::ints);
        let o = q.clone();
        let lse = Input::positive(&q.meta.shape[..3]);
        let ins = [q.clone(), k.clone(), k, o.clone(), lse, o];
        Sample::new(AttentionGrad { scale, p, q_offset, draw }, ins)
            .rounded(q.meta.shape[2] * q.meta.shape[3])
            .not_smooth()
    };
    let sample = |p, q, k| at(None, p, q, k);
    vec![
        sample(0.0, [3, 2, 5, 3], [3, 2, 5, 3]),
        sample(0.25, [1, 3, 7, 2], [1, 3, 7, 2]),
        at(Some(0), 0.5, [2, 6, 3, 1], [2, 2, 5, 1]),
        sample(0.0, [2, 1, 0, 3], [2, 1, 0, 3]),
        at(Some(2), 0.25, [2, 2, 3, 2], [2, 1, 7, 2]),
    ]
}
