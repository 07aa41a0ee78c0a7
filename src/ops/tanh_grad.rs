//! `tanh_grad`: the derivative of `tanh`, in one pass.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Mul, Pointwise, Sample, Scale, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{BinaryF, Real};
use crate::tensor::{DType, Tensor, cuda};

/// `dy · (1 - y²)`, where `y = tanh x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TanhGrad;

impl Pointwise for TanhGrad {
    const NAME: &'static str = "tanh_grad";
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
        cuda::map(cuda::formula!("tanh_grad"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        if g.needs(0) {
            let (ddx, y) = (g.grad(0), g.input(1));
            let ddy = g.apply(*self, &[ddx, y])?;
            g.set(0, ddy);
        }
        if g.needs(1) {
            // d/dy = -2 y dy.
            let (ddx, dy, y) = (g.grad(0), g.input(0), g.input(1));
            let both = g.apply(Mul, &[ddx, dy])?;
            let slope = g.apply(Scale::by(-2.0), &[y])?;
            let dout = g.apply(Mul, &[both, slope])?;
            g.set(1, dout);
        }
        Ok(())
    }
}

impl BinaryF for TanhGrad {
    #[inline(always)]
    fn apply<A: Real>(self, dy: A, y: A) -> A {
        dy * (A::ONE - y * y)
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(TanhGrad, [Input::ints([5, 3]), Input::ints([5, 3])]),
        Sample::new(TanhGrad, [Input::ints([7]), Input::ints([7])]),
        Sample::new(TanhGrad, [Input::ints([]), Input::ints([])]),
        Sample::new(TanhGrad, [Input::ints([0, 3]), Input::ints([0, 3])]),
    ]
}
