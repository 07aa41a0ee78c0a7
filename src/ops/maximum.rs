//! `maximum`: the larger of two tensors, element by element.

use super::pointwise::one_number;
use super::{
    Algebra, Compare, CompareKind, Input, Mask, Meta, Pointwise, Row, Sample, Slot, Vjp, Windows, reuse,
};
use crate::error::Result;
use crate::tensor::cpu::{BinaryN, Num};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

/// The larger of `x` and `y`, where -0 is less than 0; NaN, always the same one, if either is (IEEE 754-2019's
/// `maximum`). The gradient goes to the larger, to `x` where they are equal or zeros of either sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Maximum;

impl Pointwise for Maximum {
    const NAME: &'static str = "maximum";
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
        cuda::map(cuda::formula!("maximum"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        chosen_gradient(g, CompareKind::Ge)
    }

    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        lattice_rows(ReduceOp::Max, ReduceOp::Min)
    }
}

impl BinaryN for Maximum {
    #[inline(always)]
    fn apply<A: Num>(self, x: A, y: A) -> A {
        x.max(y)
    }
}

/// The gradient of the first operand where it stands to the second as `kind` says, else of the second.
pub(super) fn chosen_gradient(g: &mut Vjp, kind: CompareKind) -> Result<()> {
    let (dz, x, y) = (g.grad(0), g.input(0), g.input(1));
    let first = g.apply(Compare { kind }, &[x, y])?;
    for (i, on) in [true, false].into_iter().enumerate() {
        if g.needs(i) {
            let dx = g.apply(Mask { on }, &[first, dz])?;
            g.set(i, dx);
        }
    }
    Ok(())
}

/// The rows of `join` (maximum or minimum), by associativity: `(a ∨ a') ∨ (b ∨ b') = (a ∨ b) ∨ (a' ∨ b')`; by
/// idempotence: `(a ∨ a') ∨ b = (a ∨ b) ∨ (a' ∨ b)`; and by distributivity over the other one, `meet`:
/// `(a ∧ a') ∨ b = (a ∨ b) ∧ (a' ∨ b)`.
pub(super) fn lattice_rows(join: ReduceOp, meet: ReduceOp) -> Vec<Row> {
    let (join, meet) = (Slot::P(join), Slot::P(meet));
    vec![
        Row::same(join, 2),
        Row::new([join, Slot::R], [join]),
        Row::new([Slot::R, join], [join]),
        Row::new([meet, Slot::R], [meet]),
        Row::new([Slot::R, meet], [meet]),
    ]
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Maximum, [Input::ints([5, 3]), Input::ints([5, 3])]).rough(),
        Sample::new(Maximum, [Input::index([7], 9), Input::index([7], 9)]).rough(),
        Sample::new(Maximum, [Input::ints([]), Input::ints([])]).rough(),
        Sample::new(Maximum, [Input::ints([0, 3]), Input::ints([0, 3])]).rough(),
    ]
}
