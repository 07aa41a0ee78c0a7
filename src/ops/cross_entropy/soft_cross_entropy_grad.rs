//! `soft_cross_entropy_grad`: the derivative of `soft_cross_entropy` with respect to the logits, in one pass.

use isoshard_kernels::rows::{CrossEntropyRows, SoftGradientRows};
use smallvec::smallvec;

use super::cuda;
use super::grad::STATISTIC;
use super::rows::{expect_soft, repeated_rows};
use crate::error::{Error, Result};
use crate::ops::record::work::elements;
use crate::ops::softmax::sum_exp::{row_maximum, statistic_shape};
use crate::ops::unfused::UnfusedExpression;
use crate::ops::{
    AxisPlacement, Bits, Input, MeshAxis, Meta, Metas, Mul, MulScalar, Op, Row, Sample, Softmax, Statistic,
    Sub, Tensors, Vjp, Windows, Work, arity, list,
};
use crate::tensor::cpu::{as_elements_mut, cast};
use crate::tensor::{DType, Tensor};

/// The derivative of [`SoftCrossEntropy`](crate::ops::SoftCrossEntropy) with respect to the logits:
/// `(logits, q, m, s, dy[, sum]) -> dy * (sum * exp(logits - m) / s - q)`, where `sum` `[.., 1]` is the sum of each row
/// of `q`. It is an operand if the attribute does not give it. Its own derivative treats m and s as functions of the
/// logits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SoftCrossEntropyGrad {
    /// The sum of every row of `q`, or `None` if it is an operand.
    pub row_sum: Option<Bits>,
}

impl Op for SoftCrossEntropyGrad {
    fn name(&self) -> &'static str {
        "soft_cross_entropy_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let ([logits, q, m, s, dy], sum) = match self.row_sum {
            Some(_) => (arity::<5>(self.name(), ins)?, None),
            None => {
                let all = arity::<6>(self.name(), ins)?;
                (all[..5].try_into().expect("five of six"), Some(&all[5]))
            }
        };
        expect_soft(self.name(), [logits, q, m, s], ins)?;
        let outer = &logits.shape[..logits.shape.len() - 1];
        if dy.shape[..] != *outer || dy.dtype != s.dtype || sum.is_some_and(|sum| sum != s) {
            let rule = "wants dy of the loss's shape and dtype, and sums like the statistics";
            return Err(Error::invalid(self.name(), rule, list(ins), ""));
        }
        Ok(smallvec![logits.clone()])
    }

    /// Linear in `dy`, and in `q` and its sums together.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let (last, count) = (ins[0].shape.len() - 1, ins.len());
        let (r, s) = (AxisPlacement::R, AxisPlacement::S(last));
        let mut rows: Vec<Row> = (0..last).map(|d| Row::same(AxisPlacement::S(d), count)).collect();
        let with = |first: [AxisPlacement; 5]| first.into_iter().chain(std::iter::repeat_n(r, count - 5));
        rows.push(Row::new(with([s, s, r, r, r]), [s]));
        let sum = AxisPlacement::SUM;
        rows.push(Row::new(with([r, r, r, r, sum]), [sum]));
        if self.row_sum.is_none() {
            rows.push(Row::new([r, sum, r, r, r, sum], [sum]));
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let number = self.row_sum.map_or(0.0, |sum| sum.0);
        Ok(smallvec![match ins[3].dtype() {
            DType::F64 => soft_gradients::<f64>(ins, number)?,
            _ => soft_gradients::<f32>(ins, number)?,
        }])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let first = [&ins[0], &ins[1], &ins[2], &ins[3], &ins[4]];
        let number = self.row_sum.map_or(0.0, |sum| sum.0);
        Ok(smallvec![cuda::soft_cross_entropy_grad(first, ins.get(5), number)?])
    }

    /// Per element: a subtraction, an exponential, two products, a subtraction. Per row: a product and a division.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(Work::SPECIAL + 4, ins, outs).plus(elements(&ins[4]).saturating_mul(2))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(2, STATISTIC);
        g.none(3, STATISTIC);
        let of: &[usize] = if self.row_sum.is_some() { &[0, 1, 4] } else { &[0, 1, 4, 5] };
        let ins: Vec<Meta> = of.iter().map(|&i| g.input_meta(i).clone()).collect();
        self.unfused(&ins)?.write_vjp(g, of)
    }

    fn statistics(&self, ins: &[Meta]) -> Vec<Statistic> {
        vec![row_maximum(2, &ins[0])]
    }
}

impl SoftCrossEntropyGrad {
    /// Returns the expression of the gradient of the logits, from the logits, q, dy and, if it is an operand, sum.
    fn unfused(&self, ins: &[Meta]) -> Result<UnfusedExpression> {
        let mut e = UnfusedExpression::of(&ins.iter().collect::<Vec<_>>());
        let (x, q, dy) = (e.wide_input(0)?, e.input(1), e.input(2));
        let probability = e.apply(Softmax { dim: ins[0].shape.len() - 1 }, &[x])?;
        let share = match self.row_sum {
            Some(sum) => e.apply(MulScalar { factor: sum }, &[probability])?,
            None => {
                let sum = e.input(3);
                let sum = e.expand(sum, x)?;
                e.apply(Mul, &[probability, sum])?
            }
        };
        let rest = e.apply(Sub, &[share, q])?;
        let dy = e.reshape(dy, statistic_shape(&ins[0]))?;
        let dy = e.expand(dy, x)?;
        let grad = e.apply(Mul, &[rest, dy])?;
        let grad = e.cast(grad, ins[0].dtype)?;
        e.returns(grad);
        Ok(e)
    }
}

/// Computes the gradients of rows. `number` is the sum of each row of `q` if there is no operand for it.
fn soft_gradients<A: CrossEntropyRows>(ins: &[Tensor], number: f64) -> Result<Tensor> {
    let wide = |x: &Tensor| cast(&x.contiguous()?, A::DTYPE);
    let logits = &ins[0];
    let mut out = Tensor::uninit(A::DTYPE, logits.shape());
    if out.numel() > 0 {
        let (x, m, s, dy) = (wide(logits)?, wide(&ins[2])?, wide(&ins[3])?, wide(&ins[4])?);
        let (q, step) = repeated_rows(&ins[1])?;
        let sums = ins.get(5).map(wide).transpose()?;
        A::soft_gradients(SoftGradientRows {
            x: x.as_slice()?,
            q: q.as_slice()?,
            step,
            statistics: [m.as_slice()?, s.as_slice()?, dy.as_slice()?],
            sums: sums.as_ref().map(Tensor::as_slice).transpose()?,
            number: A::of(number),
            len: logits.shape()[logits.shape().len() - 1],
            out: as_elements_mut(out.bytes_mut()),
        });
    }
    cast(&out, logits.dtype())
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |outer: &[usize], classes: usize, row_sum: Option<Bits>| {
        let with = |n: usize| -> Vec<usize> { outer.iter().copied().chain([n]).collect() };
        let (x, q) = (Input::ints(with(classes)), Input::unit(with(classes)));
        let (m, s) = (Input::ints(with(1)), Input::positive(with(1)));
        let sum = row_sum.is_none().then(|| Input::positive(with(1)));
        let ins = [x, q, m, s, Input::ints(outer)].into_iter().chain(sum);
        Sample::new(SoftCrossEntropyGrad { row_sum }, ins).not_smooth()
    };
    vec![sample(&[5], 3, None), sample(&[2, 3], 7, Some(Bits(0.5))), sample(&[0], 3, None)]
}
