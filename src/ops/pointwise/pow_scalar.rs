//! `pow_scalar`: every element to the power of one number.

use super::pointwise::one_float;
use super::pow::power;
use super::{Algebra, Bits, Input, Meta, Mul, Pointwise, Row, Sample, Scale, Slot, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

/// `x^exponent`: by products for 2 and 3, by `recip` and `sqrt` for -1, 1/2 and -1/2, and else as [`super::Pow`] does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PowScalar {
    /// The number.
    pub exponent: Bits,
}

impl PowScalar {
    /// To the power of `exponent`.
    pub fn to(exponent: f64) -> PowScalar {
        PowScalar { exponent: Bits(exponent) }
    }
}

impl Pointwise for PowScalar {
    const NAME: &'static str = "pow_scalar";
    const ARITY: usize = 1;

    /// Not linear; the exponent 1 copies.
    fn algebra(&self) -> Algebra {
        if self.exponent.0 == 1.0 { Algebra::Structural } else { Algebra::Opaque }
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        match self.exponent.0 {
            1.0 => Ok(ins[0].clone()),
            2.0 => reuse::float_unary(Self::NAME, ins, Square),
            3.0 => reuse::float_unary(Self::NAME, ins, Cube),
            -1.0 => reuse::float_unary(Self::NAME, ins, Reciprocal),
            0.5 => reuse::float_unary(Self::NAME, ins, Root),
            -0.5 => reuse::float_unary(Self::NAME, ins, InverseRoot),
            _ => reuse::float_unary(Self::NAME, ins, *self),
        }
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let formula = match self.exponent.0 {
            1.0 => return Ok(ins[0].clone()),
            2.0 => cuda::formula!("pow_scalar", "pow_scalar_square"),
            3.0 => cuda::formula!("pow_scalar", "pow_scalar_cube"),
            -1.0 => cuda::formula!("pow_scalar", "pow_scalar_recip"),
            0.5 => cuda::formula!("sqrt"),
            -0.5 => cuda::formula!("rsqrt"),
            _ => cuda::formula!("pow_scalar"),
        };
        cuda::map(formula, ins, &[self.exponent.0])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let c = self.exponent.0;
        if c == 0.0 {
            g.none(0, "x^0 is constant");
            return Ok(());
        }
        let dy = g.grad(0);
        if c == 1.0 {
            g.set(0, dy);
            return Ok(());
        }
        let x = g.input(0);
        let power = if c == 2.0 { x } else { g.apply(PowScalar::to(c - 1.0), &[x])? };
        let slope = g.apply(Scale::by(c), &[power])?;
        let dx = g.apply(Mul, &[dy, slope])?;
        g.set(0, dx);
        Ok(())
    }

    /// A square root lets minima pass, as [`super::Sqrt`] does.
    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        if self.exponent.0 == 0.5 { vec![Row::same(Slot::P(ReduceOp::Min), 1)] } else { vec![] }
    }
}

impl UnaryF for PowScalar {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        // The exponent stays f64 where the elements are narrower: 1/3 is then not rounded to f32 first.
        A::of(power(x.to_f64(), self.exponent.0))
    }
}

macro_rules! formulas {
    ($($name:ident: $x:ident => $value:expr;)*) => {$(
        #[derive(Clone, Copy)]
        struct $name;

        impl UnaryF for $name {
            #[inline(always)]
            fn apply<A: Real>(self, $x: A) -> A {
                $value
            }
        }
    )*};
}

formulas! {
    Square: x => x * x;
    Cube: x => x * x * x;
    Reciprocal: x => x.recip();
    Root: x => x.sqrt();
    InverseRoot: x => x.sqrt().recip();
}

pub(super) fn samples() -> Vec<Sample> {
    let powers = [2.0, 3.0, -1.0, 0.5, -0.5, 1.0, 1.0 / 3.0, -2.5];
    let mut samples: Vec<Sample> =
        powers.map(|c| Sample::new(PowScalar::to(c), [Input::positive([5, 3])])).to_vec();
    samples.push(Sample::new(PowScalar::to(2.0), [Input::ints([])]));
    samples.push(Sample::new(PowScalar::to(3.0), [Input::ints([0, 3])]));
    samples
}

#[cfg(test)]
mod tests {
    use super::super::eval_whole;
    use super::*;

    #[test]
    fn every_path_agrees_with_the_standard_library() {
        let x = Tensor::from_vec(vec![0.25f32, 1.0, 2.7, 81.5], [4]).expect("four");
        for c in [-3.0, -1.0, -0.5, 0.0, 1.0 / 3.0, 0.5, 1.0, 2.0, 3.0, 4.0] {
            let got = eval_whole(&PowScalar::to(c), std::slice::from_ref(&x)).expect("legal")[0].to_f64_vec();
            for (x, y) in x.to_f64_vec().into_iter().zip(got) {
                let want = x.powf(c);
                assert!((y - want).abs() <= want * 2f64.powi(-22), "{x}^{c} = {y}, wanted {want}");
            }
        }
    }
}
