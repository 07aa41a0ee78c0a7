//! `attention_bias_grad`: the derivative of `attention` by the bias of its scores.

use smallvec::smallvec;

use super::grad::{expect_forward, forward_statistics, sample_operands, write_second_vjp};
use super::samples::{grouped_sample, sample_attributes, sample_rules};
use super::scores::ScoreRule;
use super::{Attention, cut_operands, heads_split, work};
use crate::error::{Error, Result};
use crate::ops::{
    AxisPlacement, Bits, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Statistic, Tensors, Unkeyed, Vjp,
    Windows, Work, list,
};
use crate::placement::Leaf;
use crate::rng::Draw;
use crate::tensor::Tensor;

/// The derivative of [`Attention`](crate::ops::Attention) by the bias of its scores:
/// `(q, k, v, o, lse, do, bias, ..) -> dbias`, where `..` are the other operands that the [`ScoreRule`] names.
///
/// dbias is a sum over the dims along which the bias repeats, along the reduction tree over them, and 0 if the bias
/// repeats along the keys. Its own derivative treats o and lse as functions of the other operands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AttentionBiasGrad {
    /// The factor of the products, that of the forward call.
    pub scale: Bits,
    /// The probability with which the forward call drops a probability.
    pub p: Bits,
    /// The position of query 0 in the forward call.
    pub q_offset: Option<usize>,
    /// The draw of the forward call, from which the dropout mask is computed again.
    pub draw: Unkeyed<Draw>,
    /// The forward call's treatment of the scores.
    pub rule: ScoreRule,
}

impl Op for AttentionBiasGrad {
    fn name(&self) -> &'static str {
        "attention_bias_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        expect_forward(self.name(), &self.rule, self.q_offset, ins)?;
        if !self.rule.bias {
            return Err(Error::invalid(self.name(), "wants a bias", list(ins), ""));
        }
        Ok(smallvec![ins[6].clone()])
    }

    /// The result is sharded with the bias, and a sum along the reduction tree over a sharded dim along which the bias
    /// repeats. If several query heads share a key head and the bias repeats over heads, a shard is no node of that
    /// tree. Linear in do.
    fn rows(&self, ins: &[Meta], axis: MeshAxis) -> Vec<Row> {
        let (r, sum, dim) = (AxisPlacement::R, AxisPlacement::SUM, AxisPlacement::S(3));
        let whole = vec![r; self.rule.operands_len()];
        let row = |of: [AxisPlacement; 6], extra: Vec<AxisPlacement>, out| {
            Row::new(of.into_iter().chain(extra), [out])
        };
        // The tree's levels are batch, heads, queries. If heads are not levels of it, batch and queries are not either.
        let grouped = ins[0].shape[1] != ins[1].shape[1] && ins[6].shape[1] != ins[0].shape[1];
        let cut = |of: [AxisPlacement; 6], dim: usize| {
            let extra = cut_operands(&self.rule, ins, &ins[6..], dim);
            let out = match extra[0] {
                AxisPlacement::R if grouped => sum,
                AxisPlacement::R => AxisPlacement::TreeSum(Leaf::Pairs),
                AxisPlacement::S(_)
                | AxisPlacement::P(_)
                | AxisPlacement::TreeSum(_)
                | AxisPlacement::Ragged
                | AxisPlacement::RaggedOver(_) => extra[0],
            };
            row(of, extra, out)
        };
        let queries = AxisPlacement::S(2);
        let mut rows = vec![cut([AxisPlacement::S(0); 6], 0)];
        if heads_split(ins, axis) {
            rows.push(cut([AxisPlacement::S(1); 6], 1));
        }
        rows.push(cut([queries, r, r, queries, queries, queries], 2));
        rows.push(row([r, r, dim, dim, r, dim], whole.clone(), sum));
        rows.push(row([r, r, r, r, r, sum], whole, sum));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let [q, k, v, o, lse, dy, extra @ ..] = ins else { unreachable!("infer counted the operands") };
        let call = self.forward().call(self.name(), (at, &at.ins[4]), self.rule.operands(extra));
        Ok(smallvec![call.with(|attention| attention.bias_backward([q, k, v], (o, lse), dy))?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let [q, k, v, o, lse, dy, extra @ ..] = ins else { unreachable!("infer counted the operands") };
        let call = self.forward().call(self.name(), (at, &at.ins[4]), self.rule.operands(extra));
        Ok(smallvec![call.cuda()?.bias_backward([q, k, v], (o, lse), dy)?])
    }

    /// Two products over the operator's pairs of queries and keys: the scores again, and the probabilities' gradients.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        work::bias_backward(ins, outs, &self.rule, self.p, self.q_offset.unwrap_or(0))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        write_second_vjp(&self.forward(), g, &[false, false, false, true])
    }

    fn statistics(&self, _: &[Meta]) -> Vec<Statistic> {
        forward_statistics(self.forward())
    }
}

impl AttentionBiasGrad {
    /// Returns the operator whose derivative this is.
    fn forward(&self) -> Attention {
        let &AttentionBiasGrad { scale, p, q_offset, draw, rule } = self;
        Attention { scale, p, q_offset, draw, rule }
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let (q, k) = ([2, 3, 5, 2], [2, 3, 7, 2]);
    let [(biased, extra), _] = sample_rules(q, k);
    let causal = ScoreRule { bias: true, ..ScoreRule::CAUSAL };
    let with = |[q, k]: [[usize; 4]; 2], rule, q_offset, p: f64, extra: Vec<Input>| {
        let (scale, p, draw) = sample_attributes(p);
        Sample::new(AttentionBiasGrad { scale, p, q_offset, draw, rule }, sample_operands(q, k, extra))
            .rounded(q[0] * q[1] * q[2])
            .not_smooth()
    };
    let of = |rule, q_offset, p, extra| with([q, k], rule, q_offset, p, extra);
    let (grouped, (capped, operands)) = grouped_sample();
    vec![
        of(biased, None, 0.0, extra),
        of(causal, Some(1), 0.25, vec![Input::ints([2, 1, 1, 7])]),
        of(causal, Some(2), 0.0, vec![Input::ints([1, 1, 5, 7])]),
        // Grouped heads, with a bias that repeats over heads and queries, and one that only batch entries share.
        with(grouped, capped, Some(2), 0.0, operands),
        with(grouped, causal, Some(1), 0.0, vec![Input::ints([1, 4, 3, 5])]),
    ]
}
