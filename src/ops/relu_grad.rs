//! `relu_grad`: the derivative of `relu`, in one pass.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Pointwise, Row, Sample, Slot, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{BinaryF, Real};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

/// `dy` where `y > 0`, else 0, where `y` is `relu x` or `x`. A NaN in `y` lets `dy` through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReluGrad;

impl Pointwise for ReluGrad {
    const NAME: &'static str = "relu_grad";
    const ARITY: usize = 2;

    /// Linear in the gradient that comes in, which the rows say.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::float_binary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("relu_grad"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        if g.needs(0) {
            let (ddx, y) = (g.grad(0), g.input(1));
            let ddy = g.apply(*self, &[ddx, y])?;
            g.set(0, ddy);
        }
        g.none(1, "a step function is constant almost everywhere");
        Ok(())
    }

    /// A copy, or 0 on every rank. Parts of an f16 or bf16 sum are f32, which the kernel does not take beside `y`.
    fn more_rows(&self, ins: &[Meta]) -> Vec<Row> {
        let row = |op| Row::new([Slot::P(op), Slot::R], [Slot::P(op)]);
        let wide = matches!(ins[0].dtype, DType::F32 | DType::F64);
        let sum = if wide { row(ReduceOp::Sum).exact() } else { row(ReduceOp::Sum) };
        [sum, row(ReduceOp::Max), row(ReduceOp::Min)].to_vec()
    }
}

impl BinaryF for ReluGrad {
    #[inline(always)]
    fn apply<A: Real>(self, dy: A, y: A) -> A {
        if y <= A::ZERO { A::ZERO } else { dy }
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(ReluGrad, [Input::ints([5, 3]), Input::ints([5, 3])]).rough(),
        Sample::new(ReluGrad, [Input::ints([7]), Input::ints([7])]).rough(),
        Sample::new(ReluGrad, [Input::ints([]), Input::ints([])]).rough(),
        Sample::new(ReluGrad, [Input::ints([0, 3]), Input::ints([0, 3])]).rough(),
    ]
}
