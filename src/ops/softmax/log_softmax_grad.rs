//! `log_softmax_grad`: the derivative of `log_softmax`, in one pass over each row.

use smallvec::smallvec;

use super::{cpu, cuda, dim_last, grad, other_dims};
use crate::error::Result;
use crate::ops::{
    AxisPlacement, Exp, Expand, Input, MeshAxis, Meta, Metas, Mul, Neg, Op, Row, Sample, Sub, Sum, Tensors,
    Vjp, Windows, Work,
};
use crate::tensor::Tensor;

/// The derivative of [`LogSoftmax`](crate::ops::LogSoftmax): `(y, dy) -> dy - exp(y) * sum(dy)` along `dim`, where `y` is
/// the log-softmax's result and `dy` its gradient.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LogSoftmaxGrad {
    /// The dim.
    pub dim: usize,
}

impl Op for LogSoftmaxGrad {
    fn name(&self) -> &'static str {
        "log_softmax_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        grad::infer(self.name(), ins, self.dim)
    }

    /// Linear in the incoming gradient.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let mut rows = other_dims(&ins[0], self.dim, 2);
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::SUM], [AxisPlacement::SUM]));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (y, dy) = (dim_last(&ins[0], self.dim)?, dim_last(&ins[1], self.dim)?);
        Ok(smallvec![dim_last(&cpu::log_softmax_backward(self.name(), &dy, &y)?, self.dim)?])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (y, dy) = (dim_last(&ins[0], self.dim)?, dim_last(&ins[1], self.dim)?);
        Ok(smallvec![dim_last(&cuda::log_softmax_backward(self.name(), &dy, &y)?, self.dim)?])
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(Work::SPECIAL + 3, ins, outs)
    }

    /// With respect to `dy`: `g - sum(exp(y) * g)`. With respect to `y`: `-g * exp(y) * sum(dy)`.
    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let shape = g.input_meta(0).shape.clone();
        let along = |g: &mut Vjp, x| {
            let sum = g.apply(Sum { dims: [self.dim].into_iter().collect(), keep: true }, &[x])?;
            g.apply(Expand { shape: shape.clone() }, &[sum])
        };
        let (y, grad) = (g.input(0), g.grad(0));
        let p = g.apply(Exp, &[y])?;
        let weighted = g.apply(Mul, &[p, grad])?;
        if g.needs(1) {
            let sum = along(g, weighted)?;
            let d = g.apply(Sub, &[grad, sum])?;
            g.set(1, d);
        }
        if g.needs(0) {
            let dy = g.input(1);
            let sum = along(g, dy)?;
            let d = g.apply(Mul, &[weighted, sum])?;
            let d = g.apply(Neg, &[d])?;
            g.set(0, d);
        }
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(LogSoftmaxGrad { dim: 1 }, [Input::ints([5, 3]), Input::ints([5, 3])]),
        Sample::new(LogSoftmaxGrad { dim: 0 }, [Input::ints([7, 1, 2]), Input::ints([7, 1, 2])]),
    ]
}
