//! `sign`: 1 for positive elements, -1 for negative ones.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Pointwise, Sample, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF, is_nan};
use crate::tensor::{DType, Tensor, cuda};

/// The sign of `x`, as a number; zeros (with their signs) and NaN stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sign;

impl Pointwise for Sign {
    const NAME: &'static str = "sign";
    const ARITY: usize = 1;

    /// Comparisons: never decreases, by bits.
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
        cuda::map(cuda::formula!("sign"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "a step function is constant almost everywhere");
        Ok(())
    }
}

impl UnaryF for Sign {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        let sign = A::ONE.copysign(x);
        if x != A::ZERO && !is_nan(x) { sign } else { x }
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Sign, [Input::ints([5, 3])]).rough(),
        Sample::new(Sign, [Input::ints([7])]).rough(),
        Sample::new(Sign, [Input::ints([])]).rough(),
        Sample::new(Sign, [Input::ints([0, 3])]).rough(),
    ]
}
