//! `add_layer_norm` and `add_rms_norm`: a sum and its norm in one pass.
//!
//! On a CUDA device, the sum and the norm are separate launches with the bits of the CPU.

use smallvec::{SmallVec, smallvec};

use super::layer_norm::expect_norm;
use super::{cpu, cuda};
use crate::error::{Error, Result};
use crate::ops::record::work::elements;
use crate::ops::{
    Add, AxisPlacement, Bits, Input, LayerNormGrad, MeshAxis, Meta, Metas, Op, RmsNormGrad, Row, Sample,
    Tensors, Vjp, VjpValue, Windows, Work, accumulator, arity, list,
};
use crate::tensor::Tensor;

/// A residual addition with a layer norm: `(x, residual, w[, b]) -> (y, sum, mean, rstd)`, where `sum` is
/// `x + residual` and the others are the results of [`LayerNorm`](crate::ops::LayerNorm) of it. Applied by
/// [`DTensor::add_layer_norm`](crate::dtensor::DTensor::add_layer_norm).
///
/// x, residual, y and sum are `[.., C]`, w and b `[C]`, mean and rstd `[.., 1]` in f32 (f64 for f64). f16 and bf16
/// normalise the sum before it is rounded; the derivative reads the rounded sum.
///
/// ```
/// use isoshard::{ops::{AddLayerNorm, Bits, eval_whole}, tensor::{DType, Tensor}};
/// let (x, residual) = (Tensor::from_vec(vec![1.0, 1.0], [1, 2])?, Tensor::from_vec(vec![0.0, 2.0], [1, 2])?);
/// let w = Tensor::full(DType::F64, [2], 10.0);
/// let outs = eval_whole(&AddLayerNorm { eps: Bits(0.0), bias: false }, &[x, residual, w])?;
/// assert_eq!((outs[0].to_f64_vec(), outs[1].to_f64_vec()), (vec![-10.0, 10.0], vec![1.0, 3.0]));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AddLayerNorm {
    /// The number added to the variance.
    pub eps: Bits,
    /// True if there is an operand b.
    pub bias: bool,
}

/// A residual addition with an RMS norm: `(x, residual, w) -> (y, sum, rstd)`, where `sum` is `x + residual` and the
/// others are the results of [`RmsNorm`](crate::ops::RmsNorm) of it. Applied by
/// [`DTensor::add_rms_norm`](crate::dtensor::DTensor::add_rms_norm).
///
/// Shapes, dtypes and roundings are those of [`AddLayerNorm`].
///
/// ```
/// use isoshard::{ops::{AddRmsNorm, Bits, eval_whole}, tensor::{DType, Tensor}};
/// let (x, residual) = (Tensor::from_vec(vec![4.0, -4.0], [1, 2])?, Tensor::full(DType::F64, [1, 2], 0.0));
/// let outs = eval_whole(&AddRmsNorm { eps: Bits(0.0) }, &[x, residual, Tensor::full(DType::F64, [2], 3.0)])?;
/// assert_eq!((outs[0].to_f64_vec(), outs[2].to_f64_vec()), (vec![3.0, -3.0], vec![0.25]));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AddRmsNorm {
    /// The number added to the mean of squares.
    pub eps: Bits,
}

impl Op for AddLayerNorm {
    fn name(&self) -> &'static str {
        "add_layer_norm"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let x = if self.bias { &arity::<4>(self.name(), ins)?[0] } else { &arity::<3>(self.name(), ins)?[0] };
        let statistic = expect_added(self.name(), x, ins)?;
        Ok(smallvec![x.clone(), x.clone(), statistic.clone(), statistic])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        rows(&ins[0], 1 + usize::from(self.bias), 4)
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let added = [&ins[0], &ins[1]];
        let (y, sum, mean, rstd) =
            cpu::add_layer_norm(self.name(), added, Some(&ins[2]), ins.get(3), self.eps.0)?;
        Ok(smallvec![y, sum, mean, rstd])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let dtype = ins[0].dtype();
        let (sum, weights) = wide_sum(ins, at)?;
        let (y, mean, rstd) =
            cuda::layer_norm(self.name(), &sum, weights.first(), weights.get(1), self.eps.0)?;
        Ok(smallvec![y.cast(dtype)?, sum.cast(dtype)?, mean, rstd])
    }

    /// Per element: 1 for the sum and 7 for the norm, and 1 for the bias. Per row: 4.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        work(8 + u64::from(self.bias), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.constant(2, "a statistic, for the derivative of result 0");
        g.constant(3, "a statistic, for the derivative of result 0");
        let ins = [g.grad(0), g.output(1), g.input(2), g.output(2), g.output(3)];
        let grads = g.apply_all(LayerNormGrad { eps: self.eps, weight: true, bias: self.bias }, &ins)?;
        set_gradients(g, &grads)
    }
}

impl Op for AddRmsNorm {
    fn name(&self) -> &'static str {
        "add_rms_norm"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, ..] = arity::<3>(self.name(), ins)?;
        let statistic = expect_added(self.name(), x, ins)?;
        Ok(smallvec![x.clone(), x.clone(), statistic])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        rows(&ins[0], 1, 3)
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (y, sum, rstd) = cpu::add_rms_norm(self.name(), [&ins[0], &ins[1]], Some(&ins[2]), self.eps.0)?;
        Ok(smallvec![y, sum, rstd])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let dtype = ins[0].dtype();
        let (sum, weights) = wide_sum(ins, at)?;
        let (y, rstd) = cuda::rms_norm(self.name(), &sum, weights.first(), self.eps.0)?;
        Ok(smallvec![y.cast(dtype)?, sum.cast(dtype)?, rstd])
    }

    /// Per element: 1 for the sum, 2 for the mean of squares and 2 for the result. Per row: 4.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        work(5, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.constant(2, "a statistic, for the derivative of result 0");
        let ins = [g.grad(0), g.output(1), g.input(2), g.output(2)];
        let grads = g.apply_all(RmsNormGrad { eps: self.eps }, &ins)?;
        set_gradients(g, &grads)
    }
}

/// Returns the dtype and shape of the statistics. Refuses operands that do not fit.
fn expect_added(verb: &str, x: &Meta, ins: &[Meta]) -> Result<Meta> {
    let shape = expect_norm(verb, x, &ins[2..], ins)?;
    if ins[1] != *x {
        return Err(Error::invalid(verb, "wants a residual of x's dtype and shape", list(ins), ""));
    }
    Ok(Meta { dtype: accumulator(x.dtype), shape })
}

/// Returns the rows that shard one leading dim of x, of the residual and of all results.
fn rows(x: &Meta, weights: usize, results: usize) -> Vec<Row> {
    use std::iter::repeat_n;
    let cut =
        |s| Row::new([s, s].into_iter().chain(repeat_n(AxisPlacement::R, weights)), repeat_n(s, results));
    (0..x.shape.len() - 1).map(|d| cut(AxisPlacement::S(d))).collect()
}

/// Returns the work of so many operations per element, and 4 per row.
fn work(per_element: u64, ins: &[Meta], outs: &[Meta]) -> Work {
    Work::elementwise(per_element, ins, outs).plus(elements(&outs[2]).saturating_mul(4))
}

/// Sets the gradients of both terms and of the weights, given those of the norm's operands.
fn set_gradients(g: &mut Vjp, of_norm: &[VjpValue]) -> Result<()> {
    if g.needs(0) || g.needs(1) {
        let own = g.grad(1);
        let sum = g.apply(Add, &[of_norm[0], own])?;
        g.set(0, sum);
        g.set(1, sum);
    }
    for (i, &grad) in of_norm.iter().enumerate().skip(1) {
        g.set(1 + i, grad);
    }
    Ok(())
}

/// Returns the sum and the weights on a CUDA device, in the dtype of the arithmetic.
fn wide_sum(ins: &[Tensor], at: &Windows) -> Result<(Tensor, SmallVec<[Tensor; 2]>)> {
    let wide = accumulator(ins[0].dtype());
    let mut terms = [ins[0].cast(wide)?, ins[1].cast(wide)?];
    let weights = ins[2..].iter().map(|w| w.cast(wide)).collect::<Result<_>>()?;
    Ok((Add.cuda(&mut terms, at)?.remove(0), weights))
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let ins = |shape: &[usize], weights: usize| {
        let w = Input::ints([*shape.last().expect("a shape with a last dim")]);
        [Input::ints(shape), Input::ints(shape)].into_iter().chain(std::iter::repeat_n(w, weights))
    };
    let layer = |shape: &[usize], bias: bool| {
        Sample::new(AddLayerNorm { eps: Bits(1e-3), bias }, ins(shape, 1 + usize::from(bias)))
    };
    let rms = |shape: &[usize]| Sample::new(AddRmsNorm { eps: Bits(1e-3) }, ins(shape, 1));
    vec![
        layer(&[5, 3], true),
        layer(&[2, 3, 7], false),
        layer(&[5], true),
        layer(&[0, 3], true),
        rms(&[2, 3, 7]),
        rms(&[5]),
        rms(&[0, 3]),
    ]
}
