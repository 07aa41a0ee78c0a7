//! `log`: the natural logarithm. NaN below 0, minus infinity at 0.

use super::pointwise::one_float;
use super::{Algebra, Div, Input, Meta, Pointwise, Sample, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, Tensor, cuda};

/// `ln x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Log;

impl Pointwise for Log {
    const NAME: &'static str = "log";
    const ARITY: usize = 1;

    /// A sum has no logarithm by parts; and the approximation is not proved to be monotone by bits.
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
        cuda::map(cuda::formula!("log"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (dy, x) = (g.grad(0), g.input(0));
        let dx = g.apply(Div, &[dy, x])?;
        g.set(0, dx);
        Ok(())
    }
}

impl UnaryF for Log {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        x.ln()
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Log, [Input::positive([5, 3])]),
        Sample::new(Log, [Input::positive([7])]),
        Sample::new(Log, [Input::positive([])]),
        Sample::new(Log, [Input::positive([0, 3])]),
    ]
}
