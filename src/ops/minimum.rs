//! `minimum`: the smaller of two tensors, element by element.

use super::maximum::{chosen_gradient, lattice_rows};
use super::pointwise::one_number;
use super::{Algebra, CompareKind, Input, Meta, Pointwise, Row, Sample, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{BinaryN, Num};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

/// The smaller of `x` and `y`, where -0 is less than 0; NaN, always the same one, if either is. The gradient goes to the
/// smaller, to `x` where they are equal or zeros of either sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Minimum;

impl Pointwise for Minimum {
    const NAME: &'static str = "minimum";
    const ARITY: usize = 2;

    /// No sum passes; for maxima and minima see the rows.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_number(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::num_binary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("minimum"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        chosen_gradient(g, CompareKind::Le)
    }

    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        lattice_rows(ReduceOp::Min, ReduceOp::Max)
    }
}

impl BinaryN for Minimum {
    #[inline(always)]
    fn apply<A: Num>(self, x: A, y: A) -> A {
        x.min(y)
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Minimum, [Input::ints([5, 3]), Input::ints([5, 3])]).rough(),
        Sample::new(Minimum, [Input::index([7], 9), Input::index([7], 9)]).rough(),
        Sample::new(Minimum, [Input::ints([]), Input::ints([])]).rough(),
        Sample::new(Minimum, [Input::ints([0, 3]), Input::ints([0, 3])]).rough(),
    ]
}
