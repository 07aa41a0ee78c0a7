//! `softmax_grad`: the derivative of `softmax`, in one pass over each row.

use smallvec::smallvec;

use super::{cpu, cuda, dim_last, expect_float_dim, other_dims};
use crate::error::{Error, Result};
use crate::ops::pointwise::floats;
use crate::ops::{
    AxisPlacement, Expand, Input, MeshAxis, Meta, Metas, Mul, Op, Row, Sample, Sub, Sum, Tensors, Vjp,
    Windows, Work, arity, list,
};
use crate::tensor::Tensor;

/// The derivative of [`Softmax`](crate::ops::Softmax): `(y, dy) -> y * (dy - sum(y * dy))` along `dim`, where `y` is the
/// softmax's result and `dy` its gradient.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SoftmaxGrad {
    /// The dim.
    pub dim: usize,
}

impl Op for SoftmaxGrad {
    fn name(&self) -> &'static str {
        "softmax_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        infer(self.name(), ins, self.dim)
    }

    /// Linear in the incoming gradient.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let mut rows = other_dims(&ins[0], self.dim, 2);
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::SUM], [AxisPlacement::SUM]));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (y, dy) = (dim_last(&ins[0], self.dim)?, dim_last(&ins[1], self.dim)?);
        Ok(smallvec![dim_last(&cpu::softmax_backward(self.name(), &dy, &y)?, self.dim)?])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (y, dy) = (dim_last(&ins[0], self.dim)?, dim_last(&ins[1], self.dim)?);
        Ok(smallvec![dim_last(&cuda::softmax_backward(self.name(), &dy, &y)?, self.dim)?])
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(4, ins, outs)
    }

    /// With respect to `dy`, the operator itself applied to `g`. With respect to `y`:
    /// `g * (dy - sum(y * dy)) - dy * sum(y * g)`.
    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let (y, dy, grad) = (g.input(0), g.input(1), g.grad(0));
        if g.needs(1) {
            let d = g.apply(self.clone(), &[y, grad])?;
            g.set(1, d);
        }
        if g.needs(0) {
            let shape = g.meta(y).shape.clone();
            let dot = |g: &mut Vjp, x| {
                let product = g.apply(Mul, &[y, x])?;
                let sum = g.apply(Sum { dims: [self.dim].into_iter().collect(), keep: true }, &[product])?;
                g.apply(Expand { shape: shape.clone() }, &[sum])
            };
            let (with_dy, with_grad) = (dot(g, dy)?, dot(g, grad)?);
            let centred = g.apply(Sub, &[dy, with_dy])?;
            let first = g.apply(Mul, &[grad, centred])?;
            let second = g.apply(Mul, &[dy, with_grad])?;
            let d = g.apply(Sub, &[first, second])?;
            g.set(0, d);
        }
        Ok(())
    }
}

/// Infers the result of two operands that must have equal shapes and one floating-point dtype.
pub(in crate::ops) fn infer(verb: &str, ins: &[Meta], dim: usize) -> Result<Metas> {
    let [y, dy] = arity(verb, ins)?;
    expect_float_dim(verb, y, dim)?;
    floats(verb, ins)?;
    if y.shape != dy.shape {
        return Err(Error::invalid(verb, "the operands' shapes differ", list(ins), ""));
    }
    Ok(smallvec![y.clone()])
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(SoftmaxGrad { dim: 1 }, [Input::ints([5, 3]), Input::ints([5, 3])]),
        Sample::new(SoftmaxGrad { dim: 0 }, [Input::ints([7, 1, 2]), Input::ints([7, 1, 2])]),
    ]
}
