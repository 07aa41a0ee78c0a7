//! `abs`: the magnitude.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Mul, Pointwise, Sample, Sign, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, Tensor, cuda};

/// `|x|`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Abs;

impl Pointwise for Abs {
    const NAME: &'static str = "abs";
    const ARITY: usize = 1;

    /// Not linear, and it falls before it rises.
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
        cuda::map(cuda::formula!("abs"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (dy, x) = (g.grad(0), g.input(0));
        let sign = g.apply(Sign, &[x])?;
        let dx = g.apply(Mul, &[dy, sign])?;
        g.set(0, dx);
        Ok(())
    }
}

impl UnaryF for Abs {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        x.abs()
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Abs, [Input::ints([5, 3])]).rough(),
        Sample::new(Abs, [Input::ints([7])]).rough(),
        Sample::new(Abs, [Input::ints([])]).rough(),
        Sample::new(Abs, [Input::ints([0, 3])]).rough(),
    ]
}
