//! `attention`: causal scaled dot-product attention, with dropout on the probabilities.
//!
//! Missing: masks other than the causal one.

pub(super) mod cpu;
pub(super) mod cuda;
pub(super) mod grad;
mod work;

use smallvec::smallvec;

use super::dropout::expect_probability;
use super::softmax::sum_exp::accumulator;
use super::{
    AttentionGrad, AxisPlacement, Bits, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Unkeyed, Vjp,
    Windows, Work, arity, list,
};
use crate::error::{Error, Result};
use crate::rng::{self, Draw, Generator};
use crate::tensor::{Shape, Tensor};
use cpu::{CpuAttention, CpuAttentionDropout};

/// Causal scaled dot-product attention: `(q, k, v) -> (o, lse)` with `o = dropout(softmax(scale q kᵀ)) v` (Vaswani et
/// al., *Attention Is All You Need*, 2017; Ainslie et al., *GQA*, 2023). Applied by
/// [`DTensor::attention`](crate::dtensor::DTensor::attention), [`attention_at`](crate::dtensor::DTensor::attention_at)
/// and [`attention_dropout`](crate::dtensor::DTensor::attention_dropout).
///
/// q is `[B, H, Tq, D]`, k `[B, Hk, Tk, D]` and v `[B, Hk, Tk, Dv]`. H is a multiple of Hk: each head of k and v serves
/// H / Hk neighbouring heads of q. o is `[B, H, Tq, Dv]`. lse `[B, H, Tq]` is the logarithm of the softmax's
/// denominators, in f32 (f64 for f64). Query i attends to the keys 0 to [`q_offset`](Self::q_offset) + i.
///
/// Batch, heads and queries may be sharded, and the last dim of v. Nothing is communicated then. The dropout of query i
/// and key j uses element `((b H + h) Tq + i) Tk + j` of the draw. The gradients of q, k and v include the path through
/// lse; an incoming gradient of lse is dropped.
///
/// ```
/// use isoshard::ops::{Attention, Bits, Unkeyed, eval_whole};
/// use isoshard::{rng::Draw, tensor::{DType, Tensor}};
/// let draw = Unkeyed(Draw { seed: 0, number: 0 }); // not used: nothing is dropped
/// let op = Attention { scale: Bits(1.0), p: Bits(0.0), q_offset: None, draw };
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
    /// j. `None` means 0 and requires as many queries as keys.
    pub q_offset: Option<usize>,
    /// The draw of this call.
    pub draw: Unkeyed<Draw>,
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [q, k, v] = arity(self.name(), ins)?;
        expect_probability(self.name(), self.p)?;
        let o = expect_heads(self.name(), [q, k, v], ins)?;
        expect_times(self.name(), [q, k], self.q_offset)?;
        let lse = Meta::new(accumulator(q.dtype), &o.shape[..3]);
        Ok(smallvec![o, lse])
    }

    /// The batch may be sharded; the heads, if those of k and v are cut evenly; the queries, with all keys on every
    /// rank; and the last dim of v. The result, but not lse, is linear in v.
    fn rows(&self, ins: &[Meta], axis: MeshAxis) -> Vec<Row> {
        let r = AxisPlacement::R;
        let mut rows = vec![
            Row::new([AxisPlacement::S(0); 3], [AxisPlacement::S(0); 2]),
            Row::new([AxisPlacement::S(2), r, r], [AxisPlacement::S(2); 2]),
            Row::new([r, r, AxisPlacement::S(3)], [AxisPlacement::S(3), r]),
            Row::new([r, r, AxisPlacement::SUM], [AxisPlacement::SUM, r]),
        ];
        if heads_split(ins, axis) {
            rows.push(Row::new([AxisPlacement::S(1); 3], [AxisPlacement::S(1); 2]));
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (o, lse) = self.call(at).with(|attention| attention.forward(&ins[0], &ins[1], &ins[2]))?;
        Ok(smallvec![o, lse])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (o, lse) = self.call(at).cuda()?.forward(&ins[0], &ins[1], &ins[2])?;
        Ok(smallvec![o, lse])
    }

    /// The two products over the pairs of a query and a key to which it attends, `(2D + 2Dv) T (T + 1) / 2` per head
    /// for T queries and T keys; and the softmax.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        work::forward(ins, outs, self.p, self.q_offset.unwrap_or(0))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.constant(1, "a statistic, for the derivative of result 0");
        let ins = [g.input(0), g.input(1), g.input(2), g.output(0), g.output(1), g.grad(0)];
        let &Attention { scale, p, q_offset, draw } = self;
        let grads = g.apply_all(AttentionGrad { scale, p, q_offset, draw }, &ins)?;
        for (i, grad) in grads.into_iter().enumerate() {
            g.set(i, grad);
        }
        Ok(())
    }
}

impl Attention {
    fn call<'a>(&self, at: &'a Windows) -> CausalCall<'a> {
        let &Attention { scale, p, q_offset, draw } = self;
        CausalCall { verb: "attention", scale, p, q_offset, draw: draw.0, at }
    }
}

/// The attributes and windows of one call of the operator or of its derivative.
pub(super) struct CausalCall<'a> {
    pub verb: &'a str,
    pub scale: Bits,
    pub p: Bits,
    pub q_offset: Option<usize>,
    pub draw: Draw,
    /// The windows; operands 0 and 1 are q and k.
    pub at: &'a Windows,
}

impl CausalCall<'_> {
    /// Calls `f` with the CPU kernel for this rank's queries.
    pub fn with<T>(&self, f: impl FnOnce(&CpuAttention) -> T) -> T {
        let q = &self.at.ins[0];
        let [first_b, first_h, first_i] = [0, 1, 2].map(|d| q.start(d));
        let (heads, queries, keys) = (q.global[1], q.global[2], self.at.ins[1].global[2]);
        let keep = |[b, h, i]: [usize; 3], out: &mut [bool]| {
            let row = ((first_b + b) * heads + first_h + h) * queries + first_i + i;
            rng::keep(self.draw, (row * keys) as u64, self.p.0, out).expect("infer checked the probability");
        };
        let dropout = (self.p.0 > 0.0).then_some(CpuAttentionDropout { scale: self.factor(), keep: &keep });
        f(&CpuAttention { verb: self.verb, q_start: self.offset() + first_i, scale: self.scale.0, dropout })
    }

    /// Returns the CUDA kernel for this rank's queries.
    pub fn cuda(&self) -> Result<cuda::CudaAttention<'_>> {
        let (q, p) = (&self.at.ins[0], self.p.0);
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
        })
    }

    fn offset(&self) -> usize {
        self.q_offset.unwrap_or(0)
    }

    /// Returns the factor of the probabilities that are kept.
    fn factor(&self) -> f64 {
        if self.p.0 < 1.0 { 1.0 / (1.0 - self.p.0) } else { 0.0 }
    }
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
pub(super) fn expect_times(verb: &str, [q, k]: [&Meta; 2], q_offset: Option<usize>) -> Result<()> {
    let (queries, keys) = (q.shape[2], k.shape[2]);
    match q_offset {
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

/// Returns the attributes of samples: scale, dropout probability and draw.
pub(super) fn sample_attributes(p: f64) -> (Bits, Bits, Unkeyed<Draw>) {
    (Bits(0.125), Bits(p), Unkeyed(Generator::new(5).next_draw()))
}

pub(super) fn samples() -> Vec<Sample> {
    let at = |q_offset, p: f64, q: [usize; 4], k: [usize; 4]| {
        let (scale, p, draw) = sample_attributes(p);
        let v = Shape::from([k[0], k[1], k[2], k[3] + 1]);
        Sample::new(Attention { scale, p, q_offset, draw }, [Input::ints(q), Input::ints(k), Input::ints(v)])
    };
    let sample = |p, q, k| at(None, p, q, k);
    vec![
        sample(0.0, [3, 2, 5, 3], [3, 2, 5, 3]),
        sample(0.25, [1, 3, 7, 2], [1, 3, 7, 2]),
        at(Some(0), 0.5, [2, 6, 3, 1], [2, 2, 5, 1]),
        sample(0.0, [2, 1, 0, 3], [2, 1, 0, 3]),
        sample(1.0, [1, 1, 1, 1], [1, 1, 1, 1]),
        at(Some(2), 0.25, [2, 2, 3, 2], [2, 1, 7, 2]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;
    use crate::tensor::DType;

    #[test]
    fn follows_its_definition_and_the_draw() {
        let (b, h, hk, t, d) = (2, 4, 2, 5, 3);
        let of = |shape: [usize; 4], salt| Input::ints(shape).values(DType::F64, salt);
        let (q, k, v) = (of([b, h, t, d], 1), of([b, hk, t, d], 2), of([b, hk, t, d], 3));
        let draw = Generator::new(3).next_draw();
        let op = Attention { scale: Bits(0.3), p: Bits(0.5), q_offset: None, draw: Unkeyed(draw) };
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
