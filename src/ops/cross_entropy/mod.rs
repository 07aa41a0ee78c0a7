//! `cross_entropy`: the loss of a classifier. Classes may be sharded.
//!
//! The loss needs two statistics of each row: `m = max(logits)`, `s = sum_exp(logits, m)`,
//! `loss = cross_entropy(logits, target, m, s)`. `soft_cross_entropy` takes probabilities in place of a target class.

mod cuda;
mod grad;
mod rows;
mod soft_cross_entropy;
mod soft_cross_entropy_grad;

pub use grad::CrossEntropyGrad;
pub use soft_cross_entropy::SoftCrossEntropy;
pub use soft_cross_entropy_grad::SoftCrossEntropyGrad;

use smallvec::smallvec;

use super::index::cuda::HeldRange;
use super::index::rows::minus_zero;
use super::index::segments::checked_index;
use super::record::work::elements;
use super::{
    AxisPlacement, Bits, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::error::Result;
use crate::tensor::cpu::{Num, Real};
use crate::tensor::{Float, Tensor, cpu, for_dtype};
use rows::expect_loss;

/// Computes `a (ln(s) - (logits[target] - m)) + z (ln(s) + m)²` per row, with the factors `a` (1 by default) and `z` (0
/// by default) of the [terms](CrossEntropyTerms). Applied by
/// [`DTensor::cross_entropy`](crate::dtensor::DTensor::cross_entropy).
///
/// logits are `[.., C]`, target i64 `[..]`, m and s `[.., 1]`, and the result is `[..]`. m is the maximum of each row
/// and s its [`SumExp`](super::SumExp). s and the result are f32 (f64 for f64). If classes are sharded, ranks exchange
/// three numbers per row and never the logits (Shoeybi et al., *Megatron-LM*, 2019, section 3). The gradient of
/// `logits` includes the paths through m and s, which therefore have none of their own.
///
/// The largest logit is subtracted from the target's before the logarithm is added, so that large logits do not cancel:
/// both numbers of the difference are exact to their last place, and so is a loss near 0.
///
/// ```
/// use isoshard::{ops::{CrossEntropy, Max, SumExp, eval_whole}, tensor::Tensor};
/// let logits = Tensor::from_vec(vec![1.0, 1.0, 1.0, 1.0], [1, 4])?;
/// let m = eval_whole(&Max { dims: [1].into_iter().collect(), keep: true }, &[logits.clone()])?.remove(0);
/// let s = eval_whole(&SumExp, &[logits.clone(), m.clone()])?.remove(0);
/// let target = Tensor::from_vec(vec![2i64], [1])?;
/// let loss = eval_whole(&CrossEntropy::default(), &[logits, target, m, s])?[0].item()?;
/// assert!((loss - 4f64.ln()).abs() < 1e-12);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CrossEntropy {
    /// The rows to ignore, and the factors of the loss's two terms.
    pub terms: CrossEntropyTerms,
}

/// The attributes that [`CrossEntropy`](crate::ops::CrossEntropy) and its derivative share. The default is the plain loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CrossEntropyTerms {
    /// The target of rows whose loss and gradient are 0. It need not be a class.
    pub ignore_index: Option<i64>,
    /// The factor of the negative log-likelihood; 0 leaves it out.
    pub nll_factor: Bits,
    /// The factor of the squared logarithm of the softmax's denominator (*z-loss*); 0 leaves it out.
    pub z_factor: Bits,
}

impl Default for CrossEntropyTerms {
    fn default() -> CrossEntropyTerms {
        CrossEntropyTerms { ignore_index: None, nll_factor: Bits(1.0), z_factor: Bits(0.0) }
    }
}

impl Op for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [logits, target, m, s] = arity(self.name(), ins)?;
        let shape = expect_loss(self.name(), [logits, target, m, s], ins)?;
        Ok(smallvec![Meta { dtype: s.dtype, shape }])
    }

    /// If classes are sharded, the rank with the target's class computes the loss. The rank with the first class
    /// contributes the 0 of a row that is ignored.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let last = ins[0].shape.len() - 1;
        let mut rows: Vec<Row> = (0..last).map(|d| Row::same(AxisPlacement::S(d), 4)).collect();
        rows.push(
            Row::new(
                [AxisPlacement::S(last), AxisPlacement::R, AxisPlacement::R, AxisPlacement::R],
                [AxisPlacement::SUM],
            )
            .exact(),
        );
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let last = at.ins[0].global.len() - 1;
        let (classes, start) = (at.ins[0].global[last], at.ins[0].start(last));
        let held = ins[0].shape()[last];
        let (logits, target) = (ins[0].contiguous()?, ins[1].contiguous()?);
        let (m, s) = (ins[2].contiguous()?, ins[3].contiguous()?);
        let mut out = Tensor::uninit(s.dtype(), target.shape());
        for_dtype!(float self.name(), logits.dtype(), T => {
            type A = <T as Float>::Acc;
            let (logits, target) = (logits.as_slice::<T>()?, target.as_slice::<i64>()?);
            let (m, s) = (m.as_slice::<T>()?, s.as_slice::<A>()?);
            let losses = cpu::as_elements_mut::<A>(out.bytes_mut());
            for (r, (loss, &target)) in losses.iter_mut().zip(target).enumerate() {
                *loss = minus_zero();
                if self.terms.ignore_index == Some(target) {
                    if held > 0 && start == 0 {
                        *loss = A::ZERO;
                    }
                    continue;
                }
                let place = checked_index(self.name(), target, classes, last)?.wrapping_sub(start);
                if place < held {
                    *loss = self.terms.loss(logits[r * held + place].widen(), m[r].widen(), s[r]);
                }
            }
            Ok(())
        })?;
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let last = at.ins[0].global.len() - 1;
        let classes = HeldRange { n: at.ins[0].global[last], start: at.ins[0].start(last) };
        Ok(smallvec![cuda::cross_entropy([&ins[0], &ins[1], &ins[2], &ins[3]], classes, &self.terms)?])
    }

    /// A logarithm and two additions per row. One logit per row is read.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        let rows = elements(&outs[0]);
        let logits = rows.saturating_mul(ins[0].dtype.size_bytes() as u64);
        let rest = Work::new(rows.saturating_mul(Work::SPECIAL + 2), &ins[1..], outs);
        Work { bytes: rest.bytes.saturating_add(logits), ..rest }
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(1, "an index has no derivative");
        g.none(2, "a statistic: the gradient of the logits includes it");
        g.none(3, "a statistic: the gradient of the logits includes it");
        let ins = [g.input(0), g.input(1), g.input(2), g.input(3), g.grad(0)];
        let d = g.apply(CrossEntropyGrad { terms: self.terms }, &ins)?;
        g.set(0, d);
        Ok(())
    }
}

impl CrossEntropyTerms {
    /// Computes the loss of a row from the target's logit, the row's maximum and its sum of exponentials.
    fn loss<A: Real>(&self, logit: A, m: A, s: A) -> A {
        let (log, mut loss) = (s.ln(), A::ZERO);
        if self.nll_factor.0 != 0.0 {
            loss = (log - (logit - m)) * A::of(self.nll_factor.0);
        }
        if self.z_factor.0 != 0.0 {
            let lse = log + m;
            loss = loss + lse * lse * A::of(self.z_factor.0);
        }
        loss
    }

    /// Computes the factor of a row's softmax in the gradient, before the division by `s`.
    fn softmax_factor<A: Real>(&self, m: A, s: A) -> A {
        let nll = A::of(self.nll_factor.0);
        if self.z_factor.0 == 0.0 { nll } else { nll + (s.ln() + m) * A::of(2.0 * self.z_factor.0) }
    }
}

pub(super) fn samples() -> Vec<Sample> {
    let sample = |outer: &[usize], classes: usize, terms| {
        let with = |n: usize| -> Vec<usize> { outer.iter().copied().chain([n]).collect() };
        let target = Input::index(outer, classes);
        let (m, s) = (Input::ints(with(1)), Input::positive(with(1)));
        // The gradient of the logits includes the paths through m and s, which finite differences of one operand do
        // not.
        Sample::new(CrossEntropy { terms }, [Input::ints(with(classes)), target, m, s]).not_smooth()
    };
    let plain = CrossEntropyTerms::default();
    let all = CrossEntropyTerms { ignore_index: Some(2), nll_factor: Bits(0.5), z_factor: Bits(0.25) };
    let own =
        vec![sample(&[5], 3, plain), sample(&[2, 3], 7, all), sample(&[3], 1, plain), sample(&[0], 3, plain)];
    [own, grad::samples(), soft_cross_entropy::samples(), soft_cross_entropy_grad::samples()].concat()
}

#[cfg(test)]
mod tests;
