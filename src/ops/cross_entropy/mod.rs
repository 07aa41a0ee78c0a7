//! `cross_entropy`: the loss of a classifier. Classes may be sharded.
//!
//! The loss needs two statistics of each row: `m = max(logits)`, `s = sum_exp(logits, m)`,
//! `loss = cross_entropy(logits, target, m, s)`.

mod cuda;
pub(super) mod grad;

use smallvec::smallvec;

use super::index::cuda::HeldRange;
use super::index::embedding::minus_zero;
use super::index::segments::{checked_index, expect_indices};
use super::softmax::sum_exp::{accumulator, statistic_shape};
use super::work::elements;
use super::{
    AxisPlacement, CrossEntropyGrad, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows,
    Work, arity, list,
};
use crate::error::{Error, Result};
use crate::tensor::{Float, Shape, Tensor, cpu, for_dtype};

/// Computes `log(s) + m - logits[target]` per row. Applied by
/// [`DTensor::cross_entropy`](crate::dtensor::DTensor::cross_entropy).
///
/// logits are `[.., C]`, target i64 `[..]`, m and s `[.., 1]`, and the result is `[..]`. m is the maximum of each row
/// and s its [`SumExp`](super::SumExp). s and the result are f32 (f64 for f64). If classes are sharded, ranks exchange
/// three numbers per row and never the logits (Shoeybi et al., *Megatron-LM*, 2019, section 3). The gradient of
/// `logits` includes the paths through m and s, which therefore have none of their own.
///
/// ```
/// use isoshard::{ops::{CrossEntropy, Max, SumExp, eval_whole}, tensor::Tensor};
/// let logits = Tensor::from_vec(vec![1.0, 1.0, 1.0, 1.0], [1, 4])?;
/// let m = eval_whole(&Max { dims: [1].into_iter().collect(), keep: true }, &[logits.clone()])?.remove(0);
/// let s = eval_whole(&SumExp, &[logits.clone(), m.clone()])?.remove(0);
/// let target = Tensor::from_vec(vec![2i64], [1])?;
/// let loss = eval_whole(&CrossEntropy, &[logits, target, m, s])?[0].item()?;
/// assert!((loss - 4f64.ln()).abs() < 1e-12);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CrossEntropy;

impl Op for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [logits, target, m, s] = arity(self.name(), ins)?;
        let shape = expect_loss(self.name(), [logits, target, m, s], ins)?;
        Ok(smallvec![Meta { dtype: s.dtype, shape }])
    }

    /// If classes are sharded, the rank with the first class contributes `log(s) + m`, and the rank with the target's
    /// class subtracts the logit.
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
            for (r, o) in cpu::as_elements_mut::<A>(out.bytes_mut()).iter_mut().enumerate() {
                let place = checked_index(self.name(), target[r], classes, last)?.wrapping_sub(start);
                *o = minus_zero();
                if held > 0 && start == 0 {
                    *o = cpu::Real::ln(s[r]) + m[r].widen();
                }
                if place < held {
                    *o -= logits[r * held + place].widen();
                }
            }
            Ok(())
        })?;
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let last = at.ins[0].global.len() - 1;
        let classes = HeldRange { n: at.ins[0].global[last], start: at.ins[0].start(last) };
        Ok(smallvec![cuda::cross_entropy([&ins[0], &ins[1], &ins[2], &ins[3]], classes)?])
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
        let d = g.apply(CrossEntropyGrad, &ins)?;
        g.set(0, d);
        Ok(())
    }
}

/// Returns the loss's shape. Refuses operands whose shapes or dtypes do not fit.
pub(super) fn expect_loss(verb: &str, [logits, target, m, s]: [&Meta; 4], ins: &[Meta]) -> Result<Shape> {
    let bad = |rule: &str| Err(Error::invalid(verb, rule, list(ins), ""));
    logits.dtype.expect_float(verb)?;
    expect_indices(verb, target)?;
    let Some((_, outer)) = logits.shape.split_last() else { return bad("the logits have no dim of classes") };
    if *outer != *target.shape {
        return bad("wants one target for each row of logits");
    }
    let kept = statistic_shape(logits);
    if m.shape != kept || s.shape != kept || m.dtype != logits.dtype || s.dtype != accumulator(logits.dtype) {
        return bad("the statistics are not those of max and sum_exp, kept with extent 1");
    }
    Ok(target.shape.clone())
}

pub(super) fn samples() -> Vec<Sample> {
    let sample = |outer: &[usize], classes: usize| {
        let with = |n: usize| -> Vec<usize> { outer.iter().copied().chain([n]).collect() };
        let target = Input::index(outer, classes);
        let (m, s) = (Input::ints(with(1)), Input::positive(with(1)));
        // The gradient of the logits includes the paths through m and s, which finite differences of one operand do
        // not.
        Sample::new(CrossEntropy, [Input::ints(with(classes)), target, m, s]).not_smooth()
    };
    vec![sample(&[5], 3), sample(&[2, 3], 7), sample(&[3], 1), sample(&[], 5), sample(&[0], 3)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Max, SumExp, eval_whole};

    fn loss(logits: &[f64], target: i64) -> (Vec<Tensor>, f64) {
        let x = Tensor::from_slice(logits, [1, logits.len()]).unwrap();
        let max = Max { dims: [1].into_iter().collect(), keep: true };
        let m = eval_whole(&max, std::slice::from_ref(&x)).unwrap()[0].clone();
        let s = eval_whole(&SumExp, &[x.clone(), m.clone()]).unwrap()[0].clone();
        let ins = vec![x, Tensor::from_vec(vec![target], [1]).unwrap(), m, s];
        let loss = eval_whole(&CrossEntropy, &ins).unwrap()[0].item().unwrap();
        (ins, loss)
    }

    #[test]
    fn loss_and_total_gradient_follow_the_definition() {
        let logits = [1.5, -0.25, 1000.0, 998.5, 1000.5];
        for (target, chosen) in logits.iter().enumerate() {
            let (mut ins, loss) = loss(&logits, target as i64);
            let sum: f64 = logits.iter().map(|x| (x - 1000.5f64).exp()).sum();
            assert!((loss - (sum.ln() + 1000.5 - chosen)).abs() < 1e-12);
            ins.push(Tensor::from_vec(vec![2.0], [1]).unwrap());
            let grad = eval_whole(&CrossEntropyGrad, &ins).unwrap()[0].to_f64_vec();
            for (c, g) in grad.iter().enumerate() {
                let want = 2.0 * ((logits[c] - 1000.5).exp() / sum - f64::from(u8::from(c == target)));
                assert!((g - want).abs() < 1e-14, "{g} {want}");
            }
        }
        let ins = loss(&[0.0; 3], 0).0;
        let bad =
            [ins[0].clone(), Tensor::from_vec(vec![3i64], [1]).unwrap(), ins[2].clone(), ins[3].clone()];
        let error = eval_whole(&CrossEntropy, &bad).unwrap_err().to_string();
        assert!(
            error.starts_with("cross_entropy: an index leaves dim 1; got index 3 for 3 indices"),
            "{error}"
        );
    }
}
