//! The CPU kernels of attention and of its derivative: [`isoshard_kernels::attention`] on tensors.

#[cfg(test)]
mod backward_tests;
mod bias;
mod gradient_rows;
mod operands;
#[cfg(test)]
mod score_tests;

use isoshard_kernels::attention::{Attention, AttentionDropout, AttentionKernel, AttentionPass};

use super::scores::{ScoreOperands, ScoreRule};
use crate::error::{Error, Result};
use crate::tensor::cpu::{cast, expect_matching};
use crate::tensor::{DType, Tensor};
use gradient_rows::GradientBuffers;
use operands::{ScoreTensors, heads};

/// Computes `softmax(scale * q k^T, masked) v` on the CPU.
///
/// `q` is `[batch, heads, queries, d]`, `k` `[batch, groups, keys, d]` and `v` `[batch, groups, keys, dv]`, with any
/// strides. Each group of `heads / groups` neighbouring heads uses one head of `k` and `v`. Results are views
/// `[batch, heads, length, d]` of buffers `[batch, length, heads, d]`, so that merging the heads needs no copy; the gradients
/// of operands that are all of one buffer lie in one, so that joining them needs none. f16 and bf16 compute in f32 and
/// round once. No element of a result is -0.
///
/// ```
/// use isoshard::{ops::cpu::CpuAttention, tensor::{DType, Tensor}};
/// let attention = CpuAttention::causal("attention", 0, 1.0);
/// let q = Tensor::zeros(DType::F64, [1, 1, 2, 3]);
/// let v = Tensor::from_vec(vec![1.0, 5.0], [1, 1, 2, 1])?;
/// let (o, lse) = attention.forward(&q, &q, &v)?;
/// assert_eq!(o.to_f64_vec(), [1.0, 3.0]);
/// assert_eq!(format!("{:.3?}", lse.to_f64_vec()), "[0.000, 0.693]"); // ln 1, ln 2
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct CpuAttention<'a> {
    /// The name with which errors begin.
    pub verb: &'a str,
    /// The position of the first query in the sequence of keys.
    pub q_start: usize,
    /// The factor of the scores.
    pub scale: f64,
    /// Dropout on the probabilities, or `None`.
    pub dropout: Option<CpuAttentionDropout<'a>>,
    /// The treatment of the scores.
    pub rule: ScoreRule,
    /// The optional operands that the rule names.
    pub operands: ScoreOperands<'a>,
}

/// The probabilities that dropout keeps, and their factor.
#[derive(Clone, Copy)]
pub struct CpuAttentionDropout<'a> {
    /// The factor of the probabilities that are kept, `1 / (1 - p)`.
    pub scale: f64,
    /// Takes a row's local indices `[batch, head, query]` and a key, and writes, for each key from that one on, true if
    /// its probability is kept. Must give the same result in the forward and the backward pass.
    pub keep: KeepKeys<'a>,
}

/// The function that [`CpuAttentionDropout::keep`] is.
type KeepKeys<'a> = &'a (dyn Fn([usize; 3], usize, &mut [bool]) + Sync);

impl<'a> CpuAttention<'a> {
    /// Returns causal attention without dropout, whose first query has the position `q_start`.
    pub fn causal(verb: &'a str, q_start: usize, scale: f64) -> CpuAttention<'a> {
        let (rule, operands) = (ScoreRule::CAUSAL, ScoreOperands::default());
        CpuAttention { verb, q_start, scale, dropout: None, rule, operands }
    }

    /// Returns the output, and the logarithm of each row's sum of exponentials `[batch, heads, queries]` in f32 (f64
    /// for f64). A query without keys gives 0 and -inf.
    ///
    /// # Errors
    /// Refuses operands that do not have four dims and one floating-point dtype, or whose shapes do not fit.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        self.expect_fit(q, k, v)?;
        let (o, lse) = match q.dtype() {
            DType::F32 => self.forward_as::<f32>(q, k, v)?,
            DType::F64 => self.forward_as::<f64>(q, k, v)?,
            half => {
                let wide = |t: &Tensor| cast(t, DType::F32);
                let (o, lse) = self.forward_as::<f32>(&wide(q)?, &wide(k)?, &wide(v)?)?;
                (cast(&o, half)?, lse)
            }
        };
        Ok((o.transpose(1, 2)?, lse))
    }

    /// Returns the gradients of `q`, `k` and `v` from the forward pass's operands and results and the gradient `grad`
    /// of `o`.
    ///
    /// The gradients of `k` and `v` are sums over the heads of a group and the given queries, along the reduction tree
    /// over both. They contain no -0. Adding the zeros of masked pairs therefore changes no bit, and the sum of the
    /// gradients of two sibling nodes of the tree has the bits of their parent's gradient.
    ///
    /// ```
    /// use isoshard::{ops::cpu::CpuAttention, tensor::{DType, Tensor}};
    /// let mut attention = CpuAttention::causal("attention", 0, 1.0);
    /// let (q, v) = (Tensor::zeros(DType::F64, [1, 1, 2, 3]), Tensor::zeros(DType::F64, [1, 1, 2, 1]));
    /// let (o, lse) = attention.forward(&q, &q, &v)?;
    /// let grad = Tensor::full(DType::F64, [1, 1, 2, 1], 1.0);
    /// let [_, _, dv] = attention.backward([&q, &q, &v], (&o, &lse), &grad)?;
    /// assert_eq!(format!("{:.3?}", dv.to_f64_vec()), "[1.500, 0.500]"); // the probabilities of each key
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`CpuAttention::forward`].
    pub fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        (o, lse): (&Tensor, &Tensor),
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        self.expect_fit(q, k, v)?;
        expect_matching(self.verb, o, &[grad])?;
        let rows = &q.shape()[..3];
        if o.shape()[..3] != *rows || o.shape()[3] != v.shape()[3] || lse.shape()[..] != *rows {
            return Err(self.misfit(&[q, v, o, lse]));
        }
        match q.dtype() {
            DType::F32 => self.backward_as::<f32>([q, k, v], (o, lse), grad),
            DType::F64 => self.backward_as::<f64>([q, k, v], (o, lse), grad),
            half => {
                let wide = |t: &Tensor| cast(t, DType::F32);
                let (qw, kw, vw) = (wide(q)?, wide(k)?, wide(v)?);
                let (o, grad) = (wide(o)?, wide(grad)?);
                let [dq, dk, dv] = self.backward_as::<f32>([&qw, &kw, &vw], (&o, lse), &grad)?;
                let narrow = |t: &Tensor| cast(&t.transpose(1, 2)?, half)?.transpose(1, 2);
                Ok([narrow(&dq)?, narrow(&dk)?, narrow(&dv)?])
            }
        }
    }

    fn expect_fit(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
        q.dtype().expect_float(self.verb)?;
        let fits = match (&q.shape()[..], &k.shape()[..], &v.shape()[..]) {
            ([qb, qh, _, qd], [kb, kh, kt, kd], [vb, vh, vt, _]) => {
                let grouped = qh == kh || (*kh > 0 && qh % kh == 0);
                (qb, qd) == (kb, kd) && grouped && (kb, kh, kt) == (vb, vh, vt)
            }
            _ => false,
        };
        if fits && q.dtype() == k.dtype() && k.dtype() == v.dtype() {
            return Ok(());
        }
        Err(self.misfit(&[q, k, v]))
    }

    fn misfit(&self, given: &[&Tensor]) -> Error {
        let given: Vec<String> = given.iter().map(|t| t.notation()).collect();
        Error::invalid(
            self.verb,
            "wants q [batch, heads, queries, d], k [batch, groups, keys, d], v [batch, groups, keys, dv] of one dtype",
            given.join(", "),
            "permute or cast them first",
        )
    }

    fn forward_as<T: Attention>(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (b, h, tq) = (q.shape()[0], q.shape()[1], q.shape()[2]);
        let mut o = Tensor::uninit(T::DTYPE, [b, tq, h, v.shape()[3]]);
        let mut lse = Tensor::full(T::DTYPE, [b, h, tq], f64::NEG_INFINITY);
        let extra = ScoreTensors::of(&self.operands, T::DTYPE)?;
        let qkv = [heads(q)?, heads(k)?, heads(v)?];
        T::attention(&self.kernel(&extra)?, qkv, o.make_mut::<T>()?, lse.make_mut::<T>()?);
        Ok((o, lse))
    }

    /// Returns the gradients, which lie as the operands do if those are all of one buffer.
    fn backward_as<T: Attention>(
        &self,
        [q, k, v]: [&Tensor; 3],
        (o, lse): (&Tensor, &Tensor),
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let (o, grad, lse) = (o.contiguous_rows(), grad.contiguous_rows(), lse.packed());
        let extra = ScoreTensors::of(&self.operands, T::DTYPE)?;
        let (kernel, pass) = (self.kernel::<T>(&extra)?, attention_pass([q, k, v], (&o, &lse), &grad)?);
        if q.shape()[2] == 0 || k.shape()[2] == 0 {
            return Ok([q, k, v].map(|x| Tensor::zeros(T::DTYPE, x.shape().clone())));
        }
        let (mut buffers, places) = GradientBuffers::of([q, k, v], T::DTYPE);
        let mut data: Vec<&mut [T]> =
            buffers.0.iter_mut().map(|buffer| buffer.make_mut::<T>()).collect::<Result<_>>()?;
        T::attention_backward(&kernel, &pass, &mut data, places);
        buffers.gradients([q, k, v])
    }

    /// Returns the call with the operands that the rule names.
    fn kernel<'t, T: Attention>(&self, tensors: &'t ScoreTensors) -> Result<AttentionKernel<'t, T>>
    where
        'a: 't,
    {
        Ok(AttentionKernel {
            q_start: self.q_start,
            scale: self.scale,
            dropout: self
                .dropout
                .map(|dropout| AttentionDropout { scale: dropout.scale, keep: dropout.keep }),
            scores: tensors.inputs(&self.rule)?,
        })
    }
}

/// Returns the operands and results of the forward pass, and the gradient of its output.
fn attention_pass<'t, T: Attention>(
    [q, k, v]: [&'t Tensor; 3],
    (o, lse): (&'t Tensor, &'t Tensor),
    grad: &'t Tensor,
) -> Result<AttentionPass<'t, T>> {
    let (q, k, v) = (heads(q)?, heads(k)?, heads(v)?);
    Ok(AttentionPass { q, k, v, o: heads(o)?, lse: lse.as_slice::<T>()?, grad: heads(grad)? })
}

impl Tensor {
    /// Returns this tensor if its last dim is contiguous, else a contiguous copy.
    fn contiguous_rows(&self) -> Tensor {
        let last = self.shape().len() - 1;
        if self.strides()[last] == 1 || self.shape()[last] <= 1 { self.clone() } else { self.packed_copy() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Shape;
    use crate::tensor::cpu::{Isa, with_isa};

    fn noise(shape: impl Into<Shape>, seed: usize) -> Tensor {
        let shape = shape.into();
        let value = |i: usize| ((i * 7919 + seed * 131) % 1009) as f64 * 0.003 - 1.5;
        Tensor::from_vec((0..shape.numel()).map(value).collect::<Vec<f64>>(), shape).unwrap()
    }

    fn plain(q_start: usize) -> CpuAttention<'static> {
        CpuAttention::causal("attention", q_start, 0.3)
    }

    fn keep([b, h, i]: [usize; 3], from: usize, keep: &mut [bool]) {
        let kept = |j: usize| (b * 7 + h * 5 + i * 3 + j * j) % 4 != 1;
        keep.iter_mut().enumerate().for_each(|(j, k)| *k = kept(from + j));
    }

    fn by_definition(q: &Tensor, k: &Tensor, v: &Tensor, a: &CpuAttention<'_>) -> Vec<f64> {
        let at = |t: &Tensor, i: [usize; 4]| t.to_ndarray_view::<f64>().unwrap()[ndarray::IxDyn(&i)];
        let (s, t, dv) = (q.shape(), k.shape()[2], v.shape()[3]);
        let mut out = Vec::new();
        for (b, h, i) in
            (0..s[0]).flat_map(|b| (0..s[1]).flat_map(move |h| (0..s[2]).map(move |i| (b, h, i))))
        {
            let seen = (a.q_start + i + 1).min(t);
            let score =
                |j| (0..s[3]).map(|d| at(q, [b, h, i, d]) * at(k, [b, h, j, d])).sum::<f64>() * a.scale;
            let e: Vec<f64> = (0..seen).map(|j| f64::exp(score(j))).collect();
            let sum: f64 = e.iter().sum();
            let mut kept = vec![true; seen];
            let factor = a.dropout.map_or(1.0, |d| {
                (d.keep)([b, h, i], 0, &mut kept);
                d.scale
            });
            for d in 0..dv {
                let p = |j: usize| if kept[j] { e[j] / sum * factor } else { 0.0 };
                out.push((0..seen).map(|j| p(j) * at(v, [b, h, j, d])).sum());
            }
        }
        out
    }

    #[test]
    fn against_the_definition_with_strides_offsets_and_dropout() {
        for (tq, tk, q_start) in [(1, 1, 0), (5, 5, 0), (70, 70, 0), (3, 67, 64), (7, 40, 60), (2, 9, 3)] {
            let q = noise([2, tq, 3, 4], 1).transpose(1, 2).unwrap();
            let (k, v) = (noise([2, 3, 4, tk], 2).transpose(2, 3).unwrap(), noise([2, 3, tk, 5], 3));
            let dropout = Some(CpuAttentionDropout { scale: 1.25, keep: &keep });
            for attention in [plain(q_start), CpuAttention { dropout, ..plain(q_start) }] {
                let (o, lse) = attention.forward(&q, &k, &v).unwrap();
                assert_eq!((&o.shape()[..], &lse.shape()[..]), (&[2, 3, tq, 5][..], &[2, 3, tq][..]));
                assert!(o.transpose(1, 2).unwrap().is_contiguous(), "merging heads is free");
                for (got, want) in o.to_f64_vec().iter().zip(by_definition(&q, &k, &v, &attention)) {
                    assert!((got - want).abs() < 1e-12, "{tq} {tk} {q_start}: {got} {want}");
                }
            }
        }
        let (o, lse) = plain(0)
            .forward(&noise([1, 1, 2, 3], 0), &noise([1, 1, 0, 3], 0), &noise([1, 1, 0, 2], 0))
            .unwrap();
        assert_eq!((o.to_f64_vec(), lse.to_f64_vec()), (vec![0.0; 4], vec![f64::NEG_INFINITY; 2]));
    }

    #[test]
    fn derivatives_by_differences() {
        let dropout = Some(CpuAttentionDropout { scale: 1.25, keep: &keep });
        for attention in [plain(1), CpuAttention { dropout, ..plain(1) }] {
            let inputs = [noise([1, 2, 4, 3], 1), noise([1, 2, 5, 3], 2), noise([1, 2, 5, 2], 3)];
            let grad = noise([1, 2, 4, 2], 4);
            let loss = |t: &[Tensor; 3]| -> f64 {
                let (o, _) = attention.forward(&t[0], &t[1], &t[2]).unwrap();
                o.to_f64_vec().iter().zip(grad.to_f64_vec()).map(|(o, g)| o * g).sum()
            };
            let (o, lse) = attention.forward(&inputs[0], &inputs[1], &inputs[2]).unwrap();
            let [q, k, v] = &inputs;
            let got = attention.backward([q, k, v], (&o, &lse), &grad).unwrap();
            for (which, got) in got.iter().enumerate() {
                assert_eq!(got.shape(), inputs[which].shape());
                for (i, got) in got.to_f64_vec().iter().enumerate() {
                    let nudge = |by: f64| {
                        let mut t = inputs.clone();
                        t[which].make_mut::<f64>().unwrap()[i] += by;
                        loss(&t)
                    };
                    let want = (nudge(1e-5) - nudge(-1e-5)) / 2e-5;
                    assert!((got - want).abs() < 1e-8, "input {which}, {i}: {got} {want}");
                }
            }
        }
    }

    #[test]
    fn parts_have_the_bits_of_the_whole() {
        let f32s = |t: Tensor| cast(&t, DType::F32).unwrap();
        let [q, k, v] = [1, 2, 3].map(|seed| f32s(noise([1, 2, 200, 16], seed)));
        let bits = |t: &Tensor| t.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let (o, lse) = plain(0).forward(&q, &k, &v).unwrap();
        for (start, len) in [(0, 50), (50, 100), (50, 3), (199, 1), (64, 64)] {
            let part = |t: &Tensor| t.narrow(2, start, len).unwrap();
            let (po, pl) = plain(start).forward(&part(&q), &k, &v).unwrap();
            assert_eq!((bits(&po), bits(&pl)), (bits(&part(&o)), bits(&part(&lse))), "{start} {len}");
            let whole = plain(0).backward([&q, &k, &v], (&o, &lse), &q).unwrap();
            let dq = plain(start).backward([&part(&q), &k, &v], (&po, &pl), &part(&q)).unwrap();
            assert_eq!(bits(&dq[0]), bits(&part(&whole[0])));
        }
        for &isa in Isa::available() {
            let again = with_isa(isa, || plain(0).forward(&q, &k, &v).unwrap());
            assert_eq!((bits(&again.0), bits(&again.1)), (bits(&o), bits(&lse)), "{isa:?}");
        }
    }

    #[test]
    fn halves_and_refusals() {
        let q = cast(&noise([1, 1, 3, 4], 1), DType::BF16).unwrap();
        let (o, lse) = plain(0).forward(&q, &q, &q).unwrap();
        assert_eq!((o.dtype(), lse.dtype()), (DType::BF16, DType::F32));
        let [dq, ..] = plain(0).backward([&q, &q, &q], (&o, &lse), &q).unwrap();
        assert_eq!((dq.dtype(), dq.shape()), (DType::BF16, q.shape()));
        assert!(plain(0).forward(&q, &q.narrow(3, 0, 2).unwrap(), &q).is_err());
        assert!(plain(0).forward(&q, &noise([1, 1, 3, 4], 1), &q).is_err());
    }
}
