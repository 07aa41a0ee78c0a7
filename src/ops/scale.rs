//! `scale`: every element times one number.

use super::pointwise::one_float;
use super::{Algebra, Bits, Input, Meta, Pointwise, Row, Sample, Slot, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

/// `x · factor`. The factor is rounded to the dtype that is computed in: f32 for f16 and bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scale {
    /// The number.
    pub factor: Bits,
}

impl Scale {
    /// By `factor`.
    pub fn by(factor: f64) -> Scale {
        Scale { factor: Bits(factor) }
    }
}

impl Pointwise for Scale {
    const NAME: &'static str = "scale";
    const ARITY: usize = 1;

    /// Linear.
    fn algebra(&self) -> Algebra {
        Algebra::Linear
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::float_unary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("scale"), ins, &[self.factor.0])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(*self, &[dy])?;
        g.set(0, dx);
        Ok(())
    }

    /// A rounded product never decreases in one factor, or never increases, by the sign of the other. Not so by bits
    /// for small factors, under which tiny numbers of both signs become zeros of both signs, nor for infinite ones,
    /// which make zero a NaN.
    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        let factor = self.factor.0;
        if !(1.0..=f64::from(f32::MAX)).contains(&factor.abs()) {
            return vec![];
        }
        let (max, min) = (Slot::P(ReduceOp::Max), Slot::P(ReduceOp::Min));
        let (of_max, of_min) = if factor > 0.0 { (max, min) } else { (min, max) };
        vec![Row::new([max], [of_max]), Row::new([min], [of_min])]
    }
}

impl UnaryF for Scale {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        x * A::of(self.factor.0)
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Scale::by(1.5), [Input::ints([5, 3])]),
        Sample::new(Scale::by(-3.0), [Input::ints([7])]),
        Sample::new(Scale::by(2.0), [Input::ints([])]),
        Sample::new(Scale::by(-1.0), [Input::ints([0, 3])]),
    ]
}
