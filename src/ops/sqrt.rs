//! `sqrt`: the square root, rounded correctly. NaN below 0.

use super::pointwise::one_float;
use super::{Algebra, Div, Input, Meta, Pointwise, Row, Sample, Scale, Slot, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

/// `√x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sqrt;

impl Pointwise for Sqrt {
    const NAME: &'static str = "sqrt";
    const ARITY: usize = 1;

    /// Sums do not pass; minima do, see the rows.
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
        cuda::map(cuda::formula!("sqrt"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (dy, y) = (g.grad(0), g.output(0));
        let dy = g.apply(Scale::by(0.5), &[dy])?;
        let dx = g.apply(Div, &[dy, y])?;
        g.set(0, dx);
        Ok(())
    }

    /// A correctly rounded root never decreases. If any part is negative the minimum is, and both are NaN; a maximum
    /// would hide it.
    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        vec![Row::same(Slot::P(ReduceOp::Min), 1)]
    }
}

impl UnaryF for Sqrt {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        x.sqrt()
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Sqrt, [Input::positive([5, 3])]),
        Sample::new(Sqrt, [Input::positive([7])]),
        Sample::new(Sqrt, [Input::positive([])]),
        Sample::new(Sqrt, [Input::positive([0, 3])]),
        Sample::new(Sqrt, [Input::ints([7])]).rough(),
    ]
}
