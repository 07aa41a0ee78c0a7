//! `attention_grad`: the derivative of `attention`. It computes the probabilities again, from `lse`.

use std::sync::Arc;

use smallvec::smallvec;

use super::samples::{grouped_sample, sample_attributes, sample_rules};
use super::scores::ScoreRule;
use super::unfused::unfused;
use super::{Attention, cut_operands, expect_heads, expect_times, heads_split, work};
use crate::error::{Error, Result};
use crate::ops::{
    AxisPlacement, Bits, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Statistic, Tensors, Unkeyed, Vjp,
    Windows, Work, accumulator, list,
};
use crate::placement::Leaf;
use crate::rng::Draw;
use crate::tensor::Tensor;

/// The derivative of [`Attention`](crate::ops::Attention): `(q, k, v, o, lse, do, ..) -> (dq, dk, dv)`, each with the shape
/// of its operand; `..` are the operands that the [`ScoreRule`] names. Dao et al., *FlashAttention*, 2022, appendix B.
///
/// dk and dv are sums over the query heads that share a key head, then over the queries, along the reduction tree over
/// both ranges. None of their elements is -0. Its own derivative treats o and lse as functions of the other operands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AttentionGrad {
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

impl Op for AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        expect_forward(self.name(), &self.rule, self.q_offset, ins)?;
        Ok(ins[..3].iter().cloned().collect())
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
        let whole = vec![r; self.rule.operands_len()];
        let row = |of: [AxisPlacement; 6], extra: Vec<AxisPlacement>, outs| {
            Row::new(of.into_iter().chain(extra), outs)
        };
        let cut = |dim| cut_operands(&self.rule, ins, &ins[6..], dim);
        let mut rows = vec![
            row([AxisPlacement::S(0); 6], cut(0), [AxisPlacement::S(0); 3]),
            row([queries, r, r, queries, queries, queries], cut(2), [queries, tree_sum, tree_sum]),
            row([r, r, dim, dim, r, dim], whole.clone(), [sum, sum, dim]),
            row([r, r, r, r, r, sum], whole, [sum; 3]),
        ];
        if heads_split(ins, axis) {
            rows.push(row([AxisPlacement::S(1); 6], cut(1), [AxisPlacement::S(1); 3]));
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let [q, k, v, o, lse, dy, extra @ ..] = ins else { unreachable!("infer counted the operands") };
        let call = self.forward().call(self.name(), (at, &at.ins[4]), self.rule.operands(extra));
        let [dq, dk, dv] = call.with(|attention| attention.backward([q, k, v], (o, lse), dy))?;
        Ok(smallvec![dq, dk, dv])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let [q, k, v, o, lse, dy, extra @ ..] = ins else { unreachable!("infer counted the operands") };
        let call = self.forward().call(self.name(), (at, &at.ins[4]), self.rule.operands(extra));
        let [dq, dk, dv] = call.cuda()?.backward([q, k, v], (o, lse), dy)?;
        Ok(smallvec![dq, dk, dv])
    }

    /// Five products over the operator's pairs of queries and keys, among them the scores again.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        work::backward(ins, outs, &self.rule, self.p, self.q_offset.unwrap_or(0))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        write_second_vjp(&self.forward(), g, &[true, true, true, false])
    }

    fn statistics(&self, _: &[Meta]) -> Vec<Statistic> {
        forward_statistics(self.forward())
    }
}

impl AttentionGrad {
    /// Returns the operator whose derivative this is.
    fn forward(&self) -> Attention {
        let &AttentionGrad { scale, p, q_offset, draw, rule } = self;
        Attention { scale, p, q_offset, draw, rule }
    }
}

/// Writes the derivative of a derivative of `forward`, by q, k, v and the bias as `by` says. The operands are
/// `(q, k, v, o, lse, do, ..)`.
pub(super) fn write_second_vjp(forward: &Attention, g: &mut Vjp, by: &[bool; 4]) -> Result<()> {
    g.none(3, STATISTIC);
    g.none(4, STATISTIC);
    let rule = &forward.rule;
    for i in 6 + usize::from(rule.bias)..g.ins_len() {
        g.none(i, "a mask and document numbers have no derivative");
    }
    let mut of: Vec<usize> = (0..3).chain(6..g.ins_len()).collect();
    let ins: Vec<Meta> = of.iter().map(|&i| g.input_meta(i).clone()).collect();
    let wrt: Vec<bool> = (0..ins.len()).map(|i| by[i.min(3)] && (i <= 3)).collect();
    of.push(5);
    unfused(forward, &ins)?.gradient(&wrt)?.write_vjp(g, &of)
}

/// The reason why an operand that is a statistic has no gradient.
const STATISTIC: &str = "a statistic: the gradients of q, k, v and the bias include it";

/// Refuses operands `(q, k, v, o, lse, do, ..)` that do not fit each other.
pub(super) fn expect_forward(
    verb: &str,
    rule: &ScoreRule,
    q_offset: Option<usize>,
    ins: &[Meta],
) -> Result<()> {
    let Some((first, extra)) =
        ins.split_first_chunk().filter(|(_, extra)| extra.len() == rule.operands_len())
    else {
        let text = format!("wants {} operands", 6 + rule.operands_len());
        return Err(Error::invalid(verb, text, list(ins), ""));
    };
    let [q, k, v, o, lse, dy] = first;
    let result = expect_heads(verb, [q, k, v], ins)?;
    expect_times(verb, rule, [q, k], q_offset)?;
    rule.expect_operands(verb, [q, k], extra)?;
    let statistic = Meta::new(accumulator(q.dtype), &result.shape[..3]);
    if *o != result || *dy != result || *lse != statistic {
        let rule = format!("wants o and its gradient {result}, and lse {statistic}");
        return Err(Error::invalid(verb, rule, list(ins), ""));
    }
    Ok(())
}

/// Returns the operands o and lse of a derivative as results of the forward operator.
pub(super) fn forward_statistics(forward: Attention) -> Vec<Statistic> {
    let of: Vec<usize> = (0..3).chain(6..6 + forward.rule.operands_len()).collect();
    let forward = Arc::new(forward);
    let result = |k: usize| Statistic { operand: 3 + k, op: forward.clone(), of: of.clone(), result: k };
    vec![result(0), result(1)]
}

/// Returns the operands of a derivative's sample.
pub(super) fn sample_operands(q: [usize; 4], k: [usize; 4], extra: Vec<Input>) -> Vec<Input> {
    let [q, k] = [q, k].map(Input::ints);
    let o = q.clone();
    let lse = Input::positive(&q.meta.shape[..3]);
    [q, k.clone(), k, o.clone(), lse, o].into_iter().chain(extra).collect()
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let with = |(rule, extra): (ScoreRule, Vec<Input>), q_offset, p: f64, q: [usize; 4], k: [usize; 4]| {
        let (scale, p, draw) = sample_attributes(p);
        Sample::new(AttentionGrad { scale, p, q_offset, draw, rule }, sample_operands(q, k, extra))
            .rounded(q[2] * q[3])
            .not_smooth()
    };
    let at = |q_offset, p, q, k| with((ScoreRule::CAUSAL, vec![]), q_offset, p, q, k);
    let sample = |p, q, k| at(None, p, q, k);
    let (q, k) = ([2, 3, 5, 2], [2, 3, 7, 2]);
    let [biased, packed] = sample_rules(q, k);
    let ([grouped_q, grouped_k], grouped) = grouped_sample();
    vec![
        sample(0.0, [3, 2, 5, 3], [3, 2, 5, 3]),
        sample(0.25, [1, 3, 7, 2], [1, 3, 7, 2]),
        at(Some(0), 0.5, [2, 6, 3, 1], [2, 2, 5, 1]),
        sample(0.0, [2, 1, 0, 3], [2, 1, 0, 3]),
        at(Some(2), 0.25, [2, 2, 3, 2], [2, 1, 7, 2]),
        with(biased, None, 0.0, q, k),
        with(packed, Some(1), 0.25, q, k),
        with(grouped, Some(2), 0.0, grouped_q, grouped_k),
    ]
}
