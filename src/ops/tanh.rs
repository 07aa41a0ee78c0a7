//! `tanh`: the hyperbolic tangent.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Pointwise, Sample, TanhGrad, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, Tensor, cuda};

/// `tanh x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tanh;

impl Pointwise for Tanh {
    const NAME: &'static str = "tanh";
    const ARITY: usize = 1;

    /// Not linear; and the approximation is not proved to be monotone by bits.
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
        cuda::map(cuda::formula!("tanh"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (dy, y) = (g.grad(0), g.output(0));
        let dx = g.apply(TanhGrad, &[dy, y])?;
        g.set(0, dx);
        Ok(())
    }
}

impl UnaryF for Tanh {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        x.tanh()
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Tanh, [Input::ints([5, 3])]),
        Sample::new(Tanh, [Input::ints([7])]),
        Sample::new(Tanh, [Input::ints([])]),
        Sample::new(Tanh, [Input::ints([0, 3])]),
    ]
}
