//! `max` over any dims, and the record that it shares with `min`.

use std::fmt;

use smallvec::smallvec;

use super::dims::{DimReduction, kept_shape};
use crate::error::{Error, Result};
use crate::ops::{
    BitwiseOr, Cast, Compare, CompareKind, Div, Expand, FloatTest, FloatTestKind, Input, Mask, MeshAxis,
    Meta, Metas, Op, Reshape, Row, Sample, Sum, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::{DType, Dims, ReduceOp, Tensor, cpu, cuda};

/// The maximum over dims; see [`MaxOrMin`]. Applied by [`DTensor::max`](crate::dtensor::DTensor::max).
///
/// ```
/// use isoshard::{ops::{Max, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 5.0, 3.0, 4.0], [2, 2])?;
/// let rows = eval_whole(&Max { dims: [1].into_iter().collect(), keep: true }, &[x])?.remove(0);
/// assert_eq!((&rows.shape()[..], rows.to_f64_vec()), (&[2, 1][..], vec![5.0, 4.0]));
/// # Ok::<(), isoshard::Error>(())
/// ```
pub type Max = MaxOrMin<true>;

/// The largest or the smallest element over dims: [`Max`] or [`Min`](crate::ops::Min).
///
/// The maximum of bools is "any", the minimum "all". -0 is less than 0. The result is one fixed NaN if any element is NaN (IEEE 754-2019's `maximum` and `minimum`), so
/// every order of evaluation gives the same bits. The gradient is divided equally among equal extremes, as by PyTorch's
/// `amax` and `amin`; zeros of both signs are equal. If the result is NaN, the NaN elements share the gradient.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct MaxOrMin<const LARGEST: bool> {
    /// The dims to reduce, ascending.
    pub dims: Dims,
    /// True if the dims stay with extent 1.
    pub keep: bool,
}

impl<const LARGEST: bool> MaxOrMin<LARGEST> {
    fn reduction(&self) -> DimReduction<'_> {
        let (verb, kind) = if LARGEST { ("max", ReduceOp::Max) } else { ("min", ReduceOp::Min) };
        DimReduction { verb, kind, dims: &self.dims, keep: self.keep }
    }
}

impl<const LARGEST: bool> Op for MaxOrMin<LARGEST> {
    fn name(&self) -> &'static str {
        self.reduction().verb
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let ([x], verb, dims) = (arity(self.name(), ins)?, self.name(), self.dims.as_slice());
        let shape = self.reduction().shape(x)?;
        if dims.iter().any(|&d| x.shape[d] == 0) {
            let given = format!("dims {dims:?} of {x}");
            return Err(Error::invalid(verb, "no elements to choose from", given, ""));
        }
        Ok(smallvec![Meta { dtype: x.dtype, shape }])
    }

    /// Partial sums are reduced first.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        self.reduction().rows(&ins[0])
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        self.reduction().eval(&ins[0], at, cpu::reduce)
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        self.reduction().eval(&ins[0], at, cuda::reduce)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::reduction(ins, outs)
    }

    /// `dx` is `dy / count(x == y)` for the elements with `x == y`, and 0 for the others. NaN counts as equal to NaN.
    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let Meta { dtype, shape } = g.input_meta(0).clone();
        if !dtype.is_float() {
            g.none(0, "integers have no derivative");
            return Ok(());
        }
        let kept = kept_shape(&shape, &self.dims);
        let dims = self.dims.clone();
        let (x, mut y, mut dy) = (g.input(0), g.output(0), g.grad(0));
        if g.meta(y).shape != kept {
            y = g.apply(Reshape { shape: kept.clone() }, &[y])?;
            dy = g.apply(Reshape { shape: kept }, &[dy])?;
        }
        let y = g.apply(Expand { shape: shape.clone() }, &[y])?;
        let equal = g.apply(Compare { kind: CompareKind::Eq }, &[x, y])?;
        // A NaN equals nothing; it is chosen wherever it stands.
        let nan = g.apply(FloatTest { kind: FloatTestKind::Nan }, &[x])?;
        let chosen = g.apply(BitwiseOr, &[equal, nan])?;
        // f16 and bf16 cannot count as many equal elements as there may be.
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let ones = g.apply(Cast { dtype: wide }, &[chosen])?;
        let count = g.apply(Sum { dims, keep: true }, &[ones])?;
        if dtype != wide {
            dy = g.apply(Cast { dtype: wide }, &[dy])?;
        }
        let mut share = g.apply(Div, &[dy, count])?;
        if dtype != wide {
            share = g.apply(Cast { dtype }, &[share])?;
        }
        let share = g.apply(Expand { shape }, &[share])?;
        let dx = g.apply(Mask { on: true }, &[chosen, share])?;
        g.set(0, dx);
        Ok(())
    }
}

impl<const LARGEST: bool> fmt::Debug for MaxOrMin<LARGEST> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if LARGEST { "Max" } else { "Min" };
        f.debug_struct(name).field("dims", &self.dims).field("keep", &self.keep).finish()
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let max = |dims: &[usize], keep| Max { dims: dims.iter().copied().collect(), keep };
    vec![
        Sample::new(max(&[0], false), [Input::ints([5, 3])]).not_smooth(),
        Sample::new(max(&[1], true), [Input::ints([7, 2, 3])]).not_smooth(),
        Sample::new(max(&[0, 2], false), [Input::ints([3, 1, 5])]).not_smooth(),
        Sample::new(max(&[0, 1], false), [Input::ints([7, 3])]).not_smooth(),
        Sample::new(max(&[1], false), [Input::ints([0, 3])]).not_smooth(),
        Sample::new(max(&[0], false), [Input::bools([5, 3])]).not_smooth(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    #[test]
    fn nan_wins() {
        let x = Tensor::from_vec(vec![1.0f32, f32::NAN, 3.0, -2.0, f32::NEG_INFINITY, -2.0], [2, 3]).unwrap();
        let max = Max { dims: [1].into_iter().collect(), keep: false };
        let y = eval_whole(&max, std::slice::from_ref(&x)).unwrap()[0].to_vec::<f32>().unwrap();
        assert!(y[0].is_nan() && y[1] == -2.0, "{y:?}");
    }

    #[test]
    fn equal_maxima_share_the_gradient() {
        let x = Tensor::from_vec(vec![3.0, 1.0, 3.0, -1.0], [4]).unwrap();
        let max = Max { dims: [0].into_iter().collect(), keep: false };
        let program = Vjp::write(&max, &[Meta::of(&x)], &[true]).unwrap();
        let y = eval_whole(&max, std::slice::from_ref(&x)).unwrap()[0].clone();
        let mut values = vec![Some(x), Some(y), Some(Tensor::scalar(6.0))];
        values.resize(program.values_len, None);
        for step in &program.steps {
            let value = |r: &crate::ops::VjpValue| values[r.0 as usize].clone().expect("steps come in order");
            let ins: Vec<Tensor> = step.ins.iter().map(value).collect();
            values[step.out.0 as usize] = Some(eval_whole(&*step.op, &ins).unwrap()[0].clone());
        }
        let grad = values[program.grads[0].unwrap().0 as usize].clone().unwrap();
        assert_eq!(grad.to_f64_vec(), [3.0, 0.0, 3.0, 0.0]);
    }
}
