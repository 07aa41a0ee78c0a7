//! `mul`: the product of two tensors, element by element. Integers wrap.

use super::pointwise::one_number;
use super::{Algebra, Input, Meta, Pointwise, Sample, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{BinaryN, Num};
use crate::tensor::{DType, Tensor, cuda};

/// `x · y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mul;

impl Pointwise for Mul {
    const NAME: &'static str = "mul";
    const ARITY: usize = 2;

    /// Linear in each factor while the other is held.
    fn algebra(&self) -> Algebra {
        Algebra::Multilinear
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_number(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::num_binary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("mul"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        for i in 0..2 {
            if g.needs(i) {
                let (dy, other) = (g.grad(0), g.input(1 - i));
                let dx = g.apply(Mul, &[dy, other])?;
                g.set(i, dx);
            }
        }
        Ok(())
    }
}

impl BinaryN for Mul {
    #[inline(always)]
    fn apply<A: Num>(self, x: A, y: A) -> A {
        x.mul(y)
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Mul, [Input::ints([5, 3]), Input::ints([5, 3])]),
        Sample::new(Mul, [Input::ints([1]), Input::ints([1])]),
        Sample::new(Mul, [Input::index([7], 9), Input::index([7], 9)]).rough(),
        Sample::new(Mul, [Input::ints([3, 0]), Input::ints([3, 0])]),
    ]
}
