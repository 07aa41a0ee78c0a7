//! `add`: the sum of two tensors. Integers wrap.

use super::pointwise::one_number;
use super::{Algebra, Input, Meta, Pointwise, Sample, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{BinaryN, Num};
use crate::tensor::{DType, Tensor, cuda};

/// `x + y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Add;

impl Pointwise for Add {
    const NAME: &'static str = "add";
    const ARITY: usize = 2;

    /// A sum of sums may be taken in any order; partial and whole do not mix, for every rank would add the whole.
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
        cuda::map(cuda::formula!("add"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        g.set(0, dy);
        g.set(1, dy);
        Ok(())
    }
}

impl BinaryN for Add {
    #[inline(always)]
    fn apply<A: Num>(self, x: A, y: A) -> A {
        x.add(y)
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Add, [Input::ints([5, 3]), Input::ints([5, 3])]),
        Sample::new(Add, [Input::ints([]), Input::ints([])]),
        Sample::new(Add, [Input::index([7], 9), Input::index([7], 9)]).rough(),
        Sample::new(Add, [Input::ints([0, 3]), Input::ints([0, 3])]),
    ]
}
