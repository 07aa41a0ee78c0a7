//! `shift`: one number added to every element.

use super::pointwise::one_float;
use super::{Algebra, Bits, Input, Meta, Pointwise, Row, Sample, Slot, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

/// `x + by`. The number is rounded to the dtype that is computed in: f32 for f16 and bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shift {
    /// The number.
    pub by: Bits,
}

impl Shift {
    /// By `by`.
    pub fn by(by: f64) -> Shift {
        Shift { by: Bits(by) }
    }
}

impl Pointwise for Shift {
    const NAME: &'static str = "shift";
    const ARITY: usize = 1;

    /// No partial sum may pass: every rank would add the number.
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
        cuda::map(cuda::formula!("shift"), ins, &[self.by.0])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        g.set(0, dy);
        Ok(())
    }

    /// A rounded sum never decreases in one term. Not so by bits where it may underflow, in f16 and bf16, nor for an
    /// infinite number, which makes the other infinity a NaN.
    fn more_rows(&self, ins: &[Meta]) -> Vec<Row> {
        let exact_zeros = matches!(ins[0].dtype, DType::F32 | DType::F64);
        if !exact_zeros || self.by.0.is_nan() || self.by.0.abs() > f64::from(f32::MAX) {
            return vec![];
        }
        [ReduceOp::Max, ReduceOp::Min].map(|op| Row::same(Slot::P(op), 1)).to_vec()
    }
}

impl UnaryF for Shift {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        x + A::of(self.by.0)
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Shift::by(1.5), [Input::ints([5, 3])]),
        Sample::new(Shift::by(-3.0), [Input::ints([7])]),
        Sample::new(Shift::by(2.0), [Input::ints([])]),
        Sample::new(Shift::by(1.0), [Input::ints([0, 3])]),
    ]
}
