//! `relu`: negative elements become 0.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Pointwise, ReluGrad, Sample, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, Tensor, cuda};

/// `max(0, x)`; -0 becomes 0, NaN stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Relu;

impl Pointwise for Relu {
    const NAME: &'static str = "relu";
    const ARITY: usize = 1;

    /// A comparison and a copy: never decreases, by bits.
    fn algebra(&self) -> Algebra {
        Algebra::Monotone
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::float_unary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("relu"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (dy, y) = (g.grad(0), g.output(0));
        let dx = g.apply(ReluGrad, &[dy, y])?;
        g.set(0, dx);
        Ok(())
    }
}

impl UnaryF for Relu {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        A::ZERO.max(x)
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Relu, [Input::ints([5, 3])]).rough(),
        Sample::new(Relu, [Input::ints([7])]).rough(),
        Sample::new(Relu, [Input::ints([])]).rough(),
        Sample::new(Relu, [Input::ints([0, 3])]).rough(),
    ]
}
