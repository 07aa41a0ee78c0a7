//! `sigmoid`: the logistic function.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Pointwise, Sample, SigmoidGrad, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, Tensor, cuda};

/// `1 / (1 + e^-x)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sigmoid;

impl Pointwise for Sigmoid {
    const NAME: &'static str = "sigmoid";
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
        cuda::map(cuda::formula!("sigmoid"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (dy, y) = (g.grad(0), g.output(0));
        let dx = g.apply(SigmoidGrad, &[dy, y])?;
        g.set(0, dx);
        Ok(())
    }
}

impl UnaryF for Sigmoid {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        x.sigmoid()
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Sigmoid, [Input::ints([5, 3])]),
        Sample::new(Sigmoid, [Input::ints([7])]),
        Sample::new(Sigmoid, [Input::ints([])]),
        Sample::new(Sigmoid, [Input::ints([0, 3])]),
    ]
}
