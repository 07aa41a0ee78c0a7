//! `sigmoid_grad`: the derivative of `sigmoid`, in one pass.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Mul, Pointwise, Sample, Scale, Shift, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{BinaryF, Real};
use crate::tensor::{DType, Tensor, cuda};

/// `dy · y · (1 - y)`, where `y = sigmoid x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SigmoidGrad;

impl Pointwise for SigmoidGrad {
    const NAME: &'static str = "sigmoid_grad";
    const ARITY: usize = 2;

    /// Linear in the gradient that comes in.
    fn algebra(&self) -> Algebra {
        Algebra::Linear
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::float_binary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("sigmoid_grad"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        if g.needs(0) {
            let (ddx, y) = (g.grad(0), g.input(1));
            let ddy = g.apply(*self, &[ddx, y])?;
            g.set(0, ddy);
        }
        if g.needs(1) {
            // d/dy = (1 - 2 y) dy.
            let (ddx, dy, y) = (g.grad(0), g.input(0), g.input(1));
            let both = g.apply(Mul, &[ddx, dy])?;
            let slope = g.apply(Scale::by(-2.0), &[y])?;
            let slope = g.apply(Shift::by(1.0), &[slope])?;
            let dout = g.apply(Mul, &[both, slope])?;
            g.set(1, dout);
        }
        Ok(())
    }
}

impl BinaryF for SigmoidGrad {
    #[inline(always)]
    fn apply<A: Real>(self, dy: A, y: A) -> A {
        dy * (y * (A::ONE - y))
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(SigmoidGrad, [Input::ints([5, 3]), Input::ints([5, 3])]),
        Sample::new(SigmoidGrad, [Input::ints([7]), Input::ints([7])]),
        Sample::new(SigmoidGrad, [Input::ints([]), Input::ints([])]),
        Sample::new(SigmoidGrad, [Input::ints([0, 3]), Input::ints([0, 3])]),
    ]
}
