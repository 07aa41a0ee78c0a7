//! `div`: the quotient of two tensors, element by element.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Mul, Neg, Pointwise, Sample, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{BinaryF, Real};
use crate::tensor::{DType, Tensor, cuda};

/// `x / y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Div;

impl Pointwise for Div {
    const NAME: &'static str = "div";
    const ARITY: usize = 2;

    /// Linear in the dividend while the divisor is held.
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
        cuda::map(cuda::formula!("div"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (dz, y) = (g.grad(0), g.input(1));
        let dx = g.apply(Div, &[dz, y])?;
        g.set(0, dx);
        if g.needs(1) {
            // d(x / y) / dy = -(x / y) / y.
            let z = g.output(0);
            let dy = g.apply(Mul, &[dx, z])?;
            let dy = g.apply(Neg, &[dy])?;
            g.set(1, dy);
        }
        Ok(())
    }
}

impl BinaryF for Div {
    #[inline(always)]
    fn apply<A: Real>(self, x: A, y: A) -> A {
        x / y
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Div, [Input::ints([5, 3]), Input::positive([5, 3])]).rounded(4),
        Sample::new(Div, [Input::positive([7]), Input::positive([7])]).rounded(4),
        Sample::new(Div, [Input::ints([]), Input::positive([])]).rounded(4),
        Sample::new(Div, [Input::ints([0, 3]), Input::ints([0, 3])]),
    ]
}
