//! `attention`: scaled dot-product attention with masks, bias, soft cap, and dropout on the probabilities.
//!
//! Second derivatives follow from an expression of ordinary operators (`unfused.rs`), which stores the scores of all
//! pairs of a query and a key.
//!
//! Missing: rows that shard the keys, which are gathered instead; the probabilities as a result; second derivatives if a
//! key that a query does not see is infinite or NaN, which then are NaN.

mod bias_grad;
pub(super) mod cpu;
pub(super) mod cuda;
mod grad;
mod samples;
mod scores;
mod unfused;
mod work;

pub use bias_grad::AttentionBiasGrad;
pub use grad::AttentionGrad;
pub use scores::{ScoreOperands, ScoreRule};

use smallvec::smallvec;

use super::dropout::expect_probability;
use super::{
    AxisPlacement, Bits, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Unkeyed, Vjp, Window,
    Windows, Work, accumulator, list,
};
use crate::error::{Error, Result};
use crate::rng::{self, Draw};
use crate::tensor::{Shape, Tensor};
use cpu::{CpuAttention, CpuAttentionDropout};
use samples::{grouped_sample, sample_attributes, sample_rules};

/// Scaled dot-product attention: `(q, k, v, ..) -> (o, lse)` with `o = dropout(softmax(scale q kᵀ)) v` (Vaswani et
/// al., *Attention Is All You Need*, 2017; Ainslie et al., *GQA*, 2023). Applied by
/// [`DTensor::attention`](crate::dtensor::DTensor::attention) and
/// [`attention_with`](crate::dtensor::DTensor::attention_with).
///
/// q is `[B, H, Tq, D]`, k `[B, Hk, Tk, D]` and v `[B, Hk, Tk, Dv]`. H is a multiple of Hk: each head of k and v serves
/// H / Hk neighbouring heads of q. o is `[B, H, Tq, Dv]`. lse `[B, H, Tq]` is the logarithm of the softmax's
/// denominators, in f32 (f64 for f64). The [`ScoreRule`] says which keys a query sees, and which further operands there
/// are: the bias, the mask, the documents of queries and of keys, in this order. The result of a query that sees no key
/// is 0, and its lse is -inf. A result that is zero is +0.
///
/// Batch, heads and queries may be sharded, and the last dim of v. Nothing is communicated then. The dropout of query i
/// and key j uses element `((b H + h) Tq + i) Tk + j` of the draw. The gradients of q, k and v include the path through
/// lse; an incoming gradient of lse is dropped.
///
/// ```
/// use isoshard::ops::{Attention, Bits, ScoreRule, Unkeyed, eval_whole};
/// use isoshard::{rng::Draw, tensor::{DType, Tensor}};
/// let draw = Unkeyed(Draw { seed: 0, number: 0 }); // not used: nothing is dropped
/// let op = Attention { scale: Bits(1.0), p: Bits(0.0), q_offset: None, draw, rule: ScoreRule::CAUSAL };
/// // Equal scores: the second query averages both values.
/// let q = Tensor::zeros(DType::F64, [1, 1, 2, 3]);
/// let v = Tensor::from_vec(vec![1.0, 5.0], [1, 1, 2, 1])?;
/// let o = eval_whole(&op, &[q.clone(), q, v])?.remove(0);
/// assert_eq!(o.to_f64_vec(), [1.0, 3.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Attention {
    /// The factor of the scores, usually `1 / sqrt(D)`.
    pub scale: Bits,
    /// The probability with which a softmax probability is dropped.
    pub p: Bits,
    /// The position of the first query in the sequence of keys: query i has position `q_offset + i`, key j has position
    /// j. `None` means 0, and requires as many queries as keys if the rule has a window. Without a window it has no
    /// effect.
    pub q_offset: Option<usize>,
    /// The draw of this call.
    pub draw: Unkeyed<Draw>,
    /// The treatment of the scores.
    pub rule: ScoreRule,
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let ([q, k, v], extra) = expect_operands(self.name(), &self.rule, ins)?;
        expect_probability(self.name(), self.p)?;
        let o = expect_heads(self.name(), [q, k, v], ins)?;
        expect_times(self.name(), &self.rule, [q, k], self.q_offset)?;
        self.rule.expect_operands(self.name(), [q, k], extra)?;
        let lse = Meta::new(accumulator(q.dtype), &o.shape[..3]);
        Ok(smallvec![o, lse])
    }

    /// The batch may be sharded; the heads, if those of k and v are cut evenly; the queries, with all keys on every
    /// rank; and the last dim of v. The result, but not lse, is linear in v.
    fn rows(&self, ins: &[Meta], axis: MeshAxis) -> Vec<Row> {
        let r = AxisPlacement::R;
        let whole = vec![r; self.rule.operands_len()];
        let row = |of: [AxisPlacement; 3], extra: Vec<AxisPlacement>, outs| {
            Row::new(of.into_iter().chain(extra), outs)
        };
        let cut = |dim| cut_operands(&self.rule, ins, &ins[3..], dim);
        let mut rows = vec![
            row([AxisPlacement::S(0); 3], cut(0), [AxisPlacement::S(0); 2]),
            row([AxisPlacement::S(2), r, r], cut(2), [AxisPlacement::S(2); 2]),
            row([r, r, AxisPlacement::S(3)], whole.clone(), [AxisPlacement::S(3), r]),
            row([r, r, AxisPlacement::SUM], whole, [AxisPlacement::SUM, r]),
        ];
        if heads_split(ins, axis) {
            rows.push(row([AxisPlacement::S(1); 3], cut(1), [AxisPlacement::S(1); 2]));
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (qkv, extra) = ins.split_at(3);
        let call = self.call(self.name(), (at, &at.outs[1]), self.rule.operands(extra));
        let (o, lse) = call.with(|attention| attention.forward(&qkv[0], &qkv[1], &qkv[2]))?;
        Ok(smallvec![o, lse])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (qkv, extra) = ins.split_at(3);
        let call = self.call(self.name(), (at, &at.outs[1]), self.rule.operands(extra));
        let (o, lse) = call.cuda()?.forward(&qkv[0], &qkv[1], &qkv[2])?;
        Ok(smallvec![o, lse])
    }

    /// The two products over the pairs of a query and a key in its window, `(2D + 2Dv) T (T + 1) / 2` per causal head
    /// for T queries and T keys; and the softmax. Masks and documents are not counted, since they are not known.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        work::forward(ins, outs, &self.rule, self.p, self.q_offset.unwrap_or(0))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.constant(1, "a statistic, for the derivative of result 0");
        let &Attention { scale, p, q_offset, draw, rule } = self;
        let mut ins = vec![g.input(0), g.input(1), g.input(2), g.output(0), g.output(1), g.grad(0)];
        ins.extend((3..3 + rule.operands_len()).map(|i| g.input(i)));
        for i in 3 + usize::from(rule.bias)..3 + rule.operands_len() {
            g.none(i, "a mask and document numbers have no derivative");
        }
        if rule.bias && g.needs(3) {
            let bias = g.apply(AttentionBiasGrad { scale, p, q_offset, draw, rule }, &ins)?;
            g.set(3, bias);
        }
        if (0..3).any(|i| g.needs(i)) {
            let grads = g.apply_all(AttentionGrad { scale, p, q_offset, draw, rule }, &ins)?;
            for (i, grad) in grads.into_iter().enumerate() {
                g.set(i, grad);
            }
        }
        Ok(())
    }
}

impl Attention {
    /// Returns the call of this operator or, by its `verb`, of a derivative. `lse` is the window of its result 1.
    pub(super) fn call<'a>(
        &self,
        verb: &'a str,
        (at, lse): (&'a Windows, &'a Window),
        operands: ScoreOperands<'a>,
    ) -> AttentionCall<'a> {
        let &Attention { scale, p, q_offset, draw, rule } = self;
        AttentionCall { verb, scale, p, q_offset, draw: draw.0, at, lse, rule, operands }
    }
}

/// The attributes, windows and optional operands of one call of the operator or of its derivative.
pub(super) struct AttentionCall<'a> {
    pub verb: &'a str,
    pub scale: Bits,
    pub p: Bits,
    pub q_offset: Option<usize>,
    pub draw: Draw,
    pub rule: ScoreRule,
    pub operands: ScoreOperands<'a>,
    /// The windows; operand 1 is k.
    pub at: &'a Windows,
    /// The window of lse, by batch, head and query. That of q is empty if heads have width 0.
    pub lse: &'a Window,
}

impl AttentionCall<'_> {
    /// Calls `f` with the CPU kernel for this rank's queries.
    pub fn with<T>(&self, f: impl FnOnce(&CpuAttention) -> T) -> T {
        let q = self.lse;
        let [first_b, first_h, first_i] = [0, 1, 2].map(|d| q.start(d));
        let (heads, queries, keys) = (q.global[1], q.global[2], self.at.ins[1].global[2]);
        let keep = |[b, h, i]: [usize; 3], j: usize, out: &mut [bool]| {
            let row = ((first_b + b) * heads + first_h + h) * queries + first_i + i;
            let element = (row * keys + j) as u64;
            rng::keep(self.draw, element, self.p.0, out).expect("infer checked the probability");
        };
        f(&CpuAttention {
            verb: self.verb,
            q_start: self.offset() + first_i,
            scale: self.scale.0,
            dropout: (self.p.0 > 0.0).then_some(CpuAttentionDropout { scale: self.factor(), keep: &keep }),
            rule: self.rule,
            operands: self.operands,
        })
    }

    /// Returns the CUDA kernel for this rank's queries.
    pub fn cuda(&self) -> Result<cuda::CudaAttention<'_>> {
        let (q, p) = (self.lse, self.p.0);
        let [_, _, low, high] = self.draw.counter(0, 0);
        let threshold = rng::keep_threshold(self.verb, p)?;
        let dropout = (p > 0.0).then_some(cuda::CudaAttentionDropout {
            key: self.draw.key(),
            high: u64::from(low) | u64::from(high) << 32,
            threshold,
            everything: p == 1.0,
            scale: self.factor(),
            extents: [q.global[1], q.global[2], self.at.ins[1].global[2]],
            start: [q.start(0), q.start(1), q.start(2)],
        });
        Ok(cuda::CudaAttention {
            verb: self.verb,
            q_start: self.offset() + q.start(2),
            scale: self.scale.0,
            dropout,
            exact: self.at.exact,
            rule: self.rule,
            operands: self.operands,
        })
    }

    /// Returns the first query's position; 0 without a window, where positions have no effect and may have any size.
    fn offset(&self) -> usize {
        self.q_offset.filter(|_| self.rule.has_window()).unwrap_or(0)
    }

    /// Returns the factor of the probabilities that are kept.
    fn factor(&self) -> f64 {
        if self.p.0 < 1.0 { 1.0 / (1.0 - self.p.0) } else { 0.0 }
    }
}

/// Returns q, k and v, and the optional operands after them. Refuses another number of operands.
fn expect_operands<'a>(verb: &str, rule: &ScoreRule, ins: &'a [Meta]) -> Result<(&'a [Meta; 3], &'a [Meta])> {
    match ins.split_first_chunk() {
        Some((qkv, extra)) if extra.len() == rule.operands_len() => Ok((qkv, extra)),
        _ => {
            let text = format!("wants {} operands", 3 + rule.operands_len());
            Err(Error::invalid(verb, text, list(ins), "pass q, k, v and what the rule names"))
        }
    }
}

/// Returns the placements of the optional operands `extra` if dim `dim` of q is sharded: batch, heads or queries. An
/// operand that repeats along the dim is replicated.
pub(super) fn cut_operands(rule: &ScoreRule, ins: &[Meta], extra: &[Meta], dim: usize) -> Vec<AxisPlacement> {
    let len = ins[0].shape[dim];
    let of = |meta: &Meta, dim: usize| match meta.shape[dim] == len {
        true => AxisPlacement::S(dim),
        false => AxisPlacement::R,
    };
    let scores_len = usize::from(rule.bias) + usize::from(rule.mask);
    let mut cut: Vec<_> = extra[..scores_len].iter().map(|meta| of(meta, dim)).collect();
    if let [of_q, of_k] = &extra[scores_len..] {
        let (r, queries) = (AxisPlacement::R, AxisPlacement::S(1));
        cut.extend(match dim {
            0 => [of(of_q, 0), of(of_k, 0)],
            2 => [queries, r],
            _ => [r, r],
        });
    }
    cut
}

/// Returns the result's dtype and shape. Refuses queries, keys and values that do not fit each other.
pub(super) fn expect_heads(verb: &str, [q, k, v]: [&Meta; 3], ins: &[Meta]) -> Result<Meta> {
    q.dtype.expect_float(verb)?;
    if let ([b, h, t, d], [kb, kh, kt, kd], [vb, vh, vt, vd]) = (&q.shape[..], &k.shape[..], &v.shape[..]) {
        let same = (b, d) == (kb, kd) && (kb, kh, kt) == (vb, vh, vt);
        let heads = h == kh || (*kh > 0 && h % kh == 0);
        if same && heads && q.dtype == k.dtype && k.dtype == v.dtype {
            return Ok(Meta::new(q.dtype, [*b, *h, *t, *vd]));
        }
    }
    let rule = "wants q [B, H, Tq, D], k [B, Hk, Tk, D], v [B, Hk, Tk, Dv] of one dtype, H a multiple of Hk";
    Err(Error::invalid(verb, rule, list(ins), "permute or cast them first"))
}

/// Refuses queries whose positions are not known, and queries at positions that no key has.
pub(super) fn expect_times(
    verb: &str,
    rule: &ScoreRule,
    [q, k]: [&Meta; 2],
    q_offset: Option<usize>,
) -> Result<()> {
    let (queries, keys) = (q.shape[2], k.shape[2]);
    match q_offset {
        _ if !rule.has_window() => Ok(()),
        None if queries == keys => Ok(()),
        None => Err(Error::invalid(
            verb,
            "queries and keys differ in number, so the queries' positions are not known",
            format!("{queries} queries, {keys} keys in {q}, {k}"),
            "pass the first query's position, the number of keys before it, to attention_at",
        )),
        Some(offset) if offset.checked_add(queries).is_some_and(|end| end <= keys) => Ok(()),
        Some(offset) => Err(Error::invalid(
            verb,
            "a query has a position that no key has",
            format!("{queries} queries from position {offset} on, {keys} keys in {q}, {k}"),
            "append the keys of the queries' own positions first, and pass the number of keys before them",
        )),
    }
}

/// Returns true if sharding the heads gives every rank the heads of q that its heads of k and v serve.
pub(super) fn heads_split(ins: &[Meta], axis: MeshAxis) -> bool {
    let (of_q, of_k) = (ins[0].shape[1], ins[1].shape[1]);
    of_q == of_k || of_k % axis.pieces(1) == 0
}

pub(super) fn samples() -> Vec<Sample> {
    let with = |(rule, extra): (ScoreRule, Vec<Input>), q_offset, p: f64, q: [usize; 4], k: [usize; 4]| {
        let (scale, p, draw) = sample_attributes(p);
        let v = Shape::from([k[0], k[1], k[2], k[3] + 1]);
        let ins = [Input::ints(q), Input::ints(k), Input::ints(v)];
        Sample::new(Attention { scale, p, q_offset, draw, rule }, ins.into_iter().chain(extra))
    };
    let at = |q_offset, p, q, k| with((ScoreRule::CAUSAL, vec![]), q_offset, p, q, k);
    let sample = |p, q, k| at(None, p, q, k);
    let (q, k) = ([2, 3, 5, 2], [2, 3, 7, 2]);
    let [biased, packed] = sample_rules(q, k);
    let ([grouped_q, grouped_k], grouped) = grouped_sample();
    let own = vec![
        sample(0.0, [3, 2, 5, 3], [3, 2, 5, 3]),
        sample(0.25, [1, 3, 7, 2], [1, 3, 7, 2]),
        at(Some(0), 0.5, [2, 6, 3, 1], [2, 2, 5, 1]),
        sample(0.0, [2, 1, 0, 3], [2, 1, 0, 3]),
        sample(1.0, [1, 1, 1, 1], [1, 1, 1, 1]),
        at(Some(2), 0.25, [2, 2, 3, 2], [2, 1, 7, 2]),
        with(biased, None, 0.0, q, k),
        with(packed, Some(1), 0.0, q, k),
        with(grouped, Some(2), 0.25, grouped_q, grouped_k),
    ];
    [own, bias_grad::samples(), grad::samples()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;
    use crate::rng::Generator;
    use crate::tensor::DType;

    #[test]
    fn follows_its_definition_and_the_draw() {
        let (b, h, hk, t, d) = (2, 4, 2, 5, 3);
        let of = |shape: [usize; 4], salt| Input::ints(shape).values(DType::F64, salt);
        let (q, k, v) = (of([b, h, t, d], 1), of([b, hk, t, d], 2), of([b, hk, t, d], 3));
        let draw = Generator::new(3).next_draw();
        let op = Attention {
            scale: Bits(0.3),
            p: Bits(0.5),
            q_offset: None,
            draw: Unkeyed(draw),
            rule: ScoreRule::CAUSAL,
        };
        let outs = eval_whole(&op, &[q.clone(), k.clone(), v.clone()]).unwrap();
        let (q, k, v) = (q.to_f64_vec(), k.to_f64_vec(), v.to_f64_vec());
        let (o, lse) = (outs[0].to_f64_vec(), outs[1].to_f64_vec());
        let mut keep = vec![false; b * h * t * t];
        rng::keep(draw, 0, 0.5, &mut keep).unwrap();
        for row in 0..b * h * t {
            let (head, i) = (row / t, row % t);
            let of_k = head / h * hk + head % h / (h / hk);
            let at = |x: &[f64], j: usize, c: usize| x[(of_k * t + j) * d + c];
            let e: Vec<f64> = (0..=i)
                .map(|j| (0.3 * (0..d).map(|c| q[row * d + c] * at(&k, j, c)).sum::<f64>()).exp())
                .collect();
            let sum: f64 = e.iter().sum();
            assert!((lse[row] - sum.ln()).abs() < 1e-12);
            for c in 0..d {
                let kept = (0..=i).filter(|j| keep[row * t + j]);
                let want: f64 = kept.map(|j| e[j] / sum * 2.0 * at(&v, j, c)).sum();
                assert!((o[row * d + c] - want).abs() < 1e-12, "row {row} column {c}");
            }
        }
    }
}
