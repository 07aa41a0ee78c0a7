//! `rsqrt`: one over the square root. NaN below 0, infinity at 0, with its sign.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Mul, Pointwise, PowScalar, Sample, Scale, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, Tensor, cuda};

/// `1 / √x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rsqrt;

impl Pointwise for Rsqrt {
    const NAME: &'static str = "rsqrt";
    const ARITY: usize = 1;

    /// No sum passes; nor does a minimum, because -0 goes to minus infinity.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::float_unary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("rsqrt"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        // d(x^-1/2) = -1/2 x^-3/2.
        let (dy, y) = (g.grad(0), g.output(0));
        let cube = g.apply(PowScalar::to(3.0), &[y])?;
        let dx = g.apply(Mul, &[dy, cube])?;
        let dx = g.apply(Scale::by(-0.5), &[dx])?;
        g.set(0, dx);
        Ok(())
    }
}

impl UnaryF for Rsqrt {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        x.sqrt().recip()
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Rsqrt, [Input::positive([5, 3])]),
        Sample::new(Rsqrt, [Input::positive([7])]),
        Sample::new(Rsqrt, [Input::positive([])]),
        Sample::new(Rsqrt, [Input::positive([0, 3])]),
    ]
}
