//! `sub`: the difference of two tensors. Integers wrap.

use super::pointwise::one_number;
use super::{Algebra, Input, Meta, Neg, Pointwise, Sample, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{BinaryN, Num};
use crate::tensor::{DType, Tensor, cuda};

/// `x - y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sub;

impl Pointwise for Sub {
    const NAME: &'static str = "sub";
    const ARITY: usize = 2;

    /// The difference of sums is the sum of differences.
    fn algebra(&self) -> Algebra {
        Algebra::Additive
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_number(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::num_binary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("sub"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let dx = g.grad(0);
        g.set(0, dx);
        if g.needs(1) {
            let dy = g.apply(Neg, &[dx])?;
            g.set(1, dy);
        }
        Ok(())
    }
}

impl BinaryN for Sub {
    #[inline(always)]
    fn apply<A: Num>(self, x: A, y: A) -> A {
        x.sub(y)
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Sub, [Input::ints([5, 3]), Input::ints([5, 3])]),
        Sample::new(Sub, [Input::ints([]), Input::ints([])]),
        Sample::new(Sub, [Input::index([7], 9), Input::index([7], 9)]).rough(),
        Sample::new(Sub, [Input::ints([3, 0]), Input::ints([3, 0])]),
    ]
}
