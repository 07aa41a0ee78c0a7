//! `exp`: e to the power of each element.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Mul, Pointwise, Sample, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, Tensor, cuda};

/// `e^x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Exp;

impl Pointwise for Exp {
    const NAME: &'static str = "exp";
    const ARITY: usize = 1;

    /// A sum becomes a product; and the approximation is not proved to be monotone by bits.
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
        cuda::map(cuda::formula!("exp"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (dy, y) = (g.grad(0), g.output(0));
        let dx = g.apply(Mul, &[dy, y])?;
        g.set(0, dx);
        Ok(())
    }
}

impl UnaryF for Exp {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        x.exp()
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Exp, [Input::ints([5, 3])]),
        Sample::new(Exp, [Input::ints([7])]),
        Sample::new(Exp, [Input::ints([])]),
        Sample::new(Exp, [Input::ints([0, 3])]),
    ]
}
