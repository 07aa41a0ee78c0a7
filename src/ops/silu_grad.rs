//! `silu_grad`: the derivative of `silu`, in one pass.

use super::pointwise::one_float;
use super::{
    Algebra, Input, Meta, Mul, Pointwise, Sample, Scale, Shift, Sigmoid, SigmoidGrad, Vjp, Windows, reuse,
};
use crate::error::Result;
use crate::tensor::cpu::{BinaryF, Real};
use crate::tensor::{DType, Tensor, cuda};

/// `dy · s · (1 + x (1 - s))`, where `s = sigmoid x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SiluGrad;

impl Pointwise for SiluGrad {
    const NAME: &'static str = "silu_grad";
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
        cuda::map(cuda::formula!("silu_grad"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        if g.needs(0) {
            let (ddx, x) = (g.grad(0), g.input(1));
            let ddy = g.apply(*self, &[ddx, x])?;
            g.set(0, ddy);
        }
        if g.needs(1) {
            // d/dx = s (1 - s) (2 + x (1 - 2 s)) dy.
            let (ddx, dy, x) = (g.grad(0), g.input(0), g.input(1));
            let s = g.apply(Sigmoid, &[x])?;
            let t = g.apply(Scale::by(-2.0), &[s])?;
            let t = g.apply(Shift::by(1.0), &[t])?;
            let t = g.apply(Mul, &[t, x])?;
            let t = g.apply(Shift::by(2.0), &[t])?;
            let t = g.apply(Mul, &[t, dy])?;
            let t = g.apply(Mul, &[t, ddx])?;
            let dx = g.apply(SigmoidGrad, &[t, s])?;
            g.set(1, dx);
        }
        Ok(())
    }
}

impl BinaryF for SiluGrad {
    #[inline(always)]
    fn apply<A: Real>(self, dy: A, x: A) -> A {
        // Beyond the bounds the derivative is 0 or 1; infinity times 0 would be NaN.
        let x = if x.abs() > A::of(1e4) { A::of(1e4).copysign(x) } else { x };
        let s = x.sigmoid();
        dy * (s * (x * (A::ONE - s) + A::ONE))
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(SiluGrad, [Input::ints([5, 3]), Input::ints([5, 3])]).rounded(4),
        Sample::new(SiluGrad, [Input::ints([7]), Input::ints([7])]).rounded(4),
        Sample::new(SiluGrad, [Input::ints([]), Input::ints([])]).rounded(4),
        Sample::new(SiluGrad, [Input::ints([0, 3]), Input::ints([0, 3])]).rounded(4),
    ]
}
