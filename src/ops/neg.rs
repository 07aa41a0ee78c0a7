//! `neg`: every element with the other sign. Integers wrap.

use super::pointwise::one_number;
use super::{Algebra, Input, Meta, Pointwise, Row, Sample, Slot, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{self, Num, Real, UnaryF, UnaryN};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

/// `-x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Neg;

impl Pointwise for Neg {
    const NAME: &'static str = "neg";
    const ARITY: usize = 1;

    /// Linear.
    fn algebra(&self) -> Algebra {
        Algebra::Additive
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_number(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        if ins[0].dtype().is_float() {
            return reuse::float_unary(Self::NAME, ins, *self);
        }
        cpu::num_unary(Self::NAME, &ins[0], *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("neg"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(Neg, &[dy])?;
        g.set(0, dx);
        Ok(())
    }

    /// The largest becomes the smallest; but among integers the lowest is its own negative. A sum passes, but not by bits:
    /// `-(1 - 1)` is -0, `-1 + 1` is +0.
    fn more_rows(&self, ins: &[Meta]) -> Vec<Row> {
        if !ins[0].dtype.is_float() {
            return vec![];
        }
        let (max, min) = (Slot::P(ReduceOp::Max), Slot::P(ReduceOp::Min));
        vec![Row::new([max], [min]), Row::new([min], [max])]
    }
}

impl UnaryF for Neg {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        -x
    }
}

impl UnaryN for Neg {
    #[inline(always)]
    fn apply<A: Num>(self, x: A) -> A {
        A::ZERO.sub(x)
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Neg, [Input::ints([5, 3])]),
        Sample::new(Neg, [Input::index([7], 9)]).rough(),
        Sample::new(Neg, [Input::ints([0, 3])]),
    ]
}
