//! `soft_cross_entropy`: cross entropy with a weight for every class. Classes may be sharded.

use isoshard_kernels::rows::{CrossEntropyRows, SoftRows};
use smallvec::smallvec;

use super::cuda;
use super::rows::{expect_soft, repeated_rows};
use crate::error::Result;
use crate::ops::record::work::elements;
use crate::ops::softmax::sum_exp::{row_maximum, statistic_shape};
use crate::ops::{
    AxisPlacement, Bits, Cast, Expand, Input, Log, MeshAxis, Meta, Metas, Mul, Op, Reshape, Row, Sample,
    SoftCrossEntropyGrad, Statistic, Sub, SumExp, Tensors, Vjp, VjpValue, Windows, Work, arity,
};
use crate::placement::Leaf;
use crate::tensor::cpu::cast;
use crate::tensor::{DType, Tensor};

/// Computes `sum(q (ln(s) - (logits - m)))` over the last dim: the cross entropy of the softmax with the probabilities
/// `q`. Applied by [`DTensor::cross_entropy_with`](crate::dtensor::DTensor::cross_entropy_with).
///
/// logits and q are `[.., C]`, m and s `[.., 1]`, and the result is `[..]`. m is the maximum of each row of logits and s
/// its [`SumExp`]. q, s and the result are f32 (f64 for f64). A class with `q = 0` contributes 0, also if its logit is
/// -inf. Sharded classes give a partial sum, so ranks exchange one number per row. The gradient of `logits` includes the
/// paths through m and s, which therefore have none of their own.
///
/// ```
/// use isoshard::{ops::{Max, SoftCrossEntropy, SumExp, eval_whole}, tensor::Tensor};
/// let logits = Tensor::from_vec(vec![3.0, 3.0], [1, 2])?;
/// let m = eval_whole(&Max { dims: [1].into_iter().collect(), keep: true }, &[logits.clone()])?.remove(0);
/// let s = eval_whole(&SumExp, &[logits.clone(), m.clone()])?.remove(0);
/// let q = Tensor::from_vec(vec![0.25, 0.75], [1, 2])?;
/// let loss = eval_whole(&SoftCrossEntropy { row_sum: None }, &[logits, q, m, s])?[0].item()?;
/// assert!((loss - 2f64.ln()).abs() < 1e-12);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SoftCrossEntropy {
    /// The sum of every row of q if it is known. Otherwise the backward pass computes it; if classes are sharded, that
    /// costs one more number per row.
    pub row_sum: Option<Bits>,
}

impl Op for SoftCrossEntropy {
    fn name(&self) -> &'static str {
        "soft_cross_entropy"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [logits, q, m, s] = arity(self.name(), ins)?;
        expect_soft(self.name(), [logits, q, m, s], ins)?;
        let shape = logits.shape[..logits.shape.len() - 1].into();
        Ok(smallvec![Meta { dtype: s.dtype, shape }])
    }

    /// Linear in `q`.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let last = ins[0].shape.len() - 1;
        let (r, s) = (AxisPlacement::R, AxisPlacement::S(last));
        let mut rows: Vec<Row> = (0..last).map(|d| Row::same(AxisPlacement::S(d), 4)).collect();
        rows.push(Row::new([s, s, r, r], [AxisPlacement::TreeSum(Leaf::Pairs)]));
        rows.push(Row::new([r, AxisPlacement::SUM, r, r], [AxisPlacement::SUM]));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let shape = at.outs[0].local();
        Ok(smallvec![match ins[3].dtype() {
            DType::F64 => soft_losses::<f64>(ins)?.reshape(shape.clone())?,
            _ => soft_losses::<f32>(ins)?.reshape(shape.clone())?,
        }])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let ins = [&ins[0], &ins[1], &ins[2], &ins[3]];
        Ok(smallvec![cuda::soft_cross_entropy(self.name(), ins, at.outs[0].local())?])
    }

    /// Per element: two subtractions, a product, a comparison, an addition. Per row: a logarithm.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(5, ins, outs).plus(elements(&outs[0]).saturating_mul(Work::SPECIAL))
    }

    /// The gradient of `q` is `dy (ln(s) - (logits - m))`.
    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(2, "a statistic: the gradient of the logits includes it");
        g.none(3, "a statistic: the gradient of the logits includes it");
        let [logits, q, m] = [0, 1, 2].map(|i| g.input(i));
        let (dy, row_sum) = (g.grad(0), self.row_sum);
        if g.needs(0) {
            let mut ins = vec![logits, q, m, g.input(3), dy];
            if row_sum.is_none() {
                let last = g.input_meta(1).shape.len() - 1;
                let sum = crate::ops::Sum { dims: [last].into_iter().collect(), keep: true };
                ins.push(g.apply(sum, &[q])?);
            }
            let d = g.apply(SoftCrossEntropyGrad { row_sum }, &ins)?;
            g.set(0, d);
        }
        if g.needs(1) {
            let Meta { dtype, shape } = g.input_meta(1).clone();
            let wide = |g: &mut Vjp, x: VjpValue| {
                if g.meta(x).dtype == dtype { Ok(x) } else { g.apply(Cast { dtype }, &[x]) }
            };
            // s has no history, but the derivative of this expression by the logits goes through it: it is computed
            // again. The part of the derivative that goes through m is 0.
            let s = g.apply(SumExp, &[logits, m])?;
            let all = |g: &mut Vjp, x: VjpValue| g.apply(Expand { shape: shape.clone() }, &[x]);
            let (x, m) = (wide(g, logits)?, wide(g, m)?);
            let (m, log) = (all(g, m)?, g.apply(Log, &[s])?);
            let log = all(g, log)?;
            let below = g.apply(Sub, &[x, m])?;
            let nll = g.apply(Sub, &[log, below])?;
            let dy = g.apply(Reshape { shape: statistic_shape(&g.input_meta(0).clone()) }, &[dy])?;
            let dy = all(g, dy)?;
            let d = g.apply(Mul, &[nll, dy])?;
            g.set(1, d);
        }
        Ok(())
    }

    fn statistics(&self, ins: &[Meta]) -> Vec<Statistic> {
        let sum = Statistic { operand: 3, op: std::sync::Arc::new(SumExp), of: vec![0, 2], result: 0 };
        vec![row_maximum(2, &ins[0]), sum]
    }
}

/// Computes the losses of rows along the last dim, in the dtype of sums.
fn soft_losses<A: CrossEntropyRows>(ins: &[Tensor]) -> Result<Tensor> {
    let [logits, q, m, s] = ins else { unreachable!("infer counted the operands") };
    let mut out = Tensor::zeros(A::DTYPE, [s.numel()]);
    let (Some(&len), true) = (logits.shape().last(), logits.numel() > 0) else { return Ok(out) };
    let wide = |x: &Tensor| cast(&x.contiguous()?, A::DTYPE);
    let (x, m, s) = (wide(logits)?, wide(m)?, s.contiguous()?);
    let (q, step) = repeated_rows(q)?;
    A::soft_losses(SoftRows {
        x: x.as_slice()?,
        q: q.as_slice()?,
        step,
        m: m.as_slice()?,
        s: s.as_slice()?,
        len,
        out: out.make_mut()?,
    });
    Ok(out)
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |outer: &[usize], classes: usize, row_sum| {
        let with = |n: usize| -> Vec<usize> { outer.iter().copied().chain([n]).collect() };
        let (x, q) = (Input::ints(with(classes)), Input::unit(with(classes)));
        let (m, s) = (Input::ints(with(1)), Input::positive(with(1)));
        // The gradient of the logits includes the paths through m and s.
        Sample::new(SoftCrossEntropy { row_sum }, [x, q, m, s]).rounded(2 * classes).not_smooth()
    };
    vec![
        sample(&[5], 3, None),
        sample(&[2, 3], 7, Some(Bits(1.0))),
        sample(&[], 5, None),
        sample(&[0], 3, None),
    ]
}
