//! `poisson`: Poisson numbers of a rate given for each element.

use super::cuda::Parameters;
use super::each::{draw_each, draw_each_on_device};
use crate::error::{Error, Result};
use crate::ops::{Algebra, Input, Meta, Pointwise, Sample, Unkeyed, Vjp, Windows, Work};
use crate::rng::{self, Draw};
use crate::tensor::{DType, Tensor, for_dtype};

/// Poisson numbers of the operand's rates, each from 0 to 2^50.
///
/// Element `e` (global, row-major) is element `e` of [`rng::poisson`]: every mesh gets the same. A kernel refuses other
/// rates.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Poisson {
    /// The counts' dtype: i64, i32 or a floating one.
    pub dtype: DType,
    /// This call's numbers.
    pub draw: Unkeyed<Draw>,
}

impl Pointwise for Poisson {
    const NAME: &'static str = "poisson";
    const ARITY: usize = 1;

    /// Rejection commutes with nothing.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        ins[0].dtype.expect_float(Self::NAME)?;
        if matches!(self.dtype, DType::U8 | DType::Bool) {
            let rule = "counts are i64, i32 or floating";
            return Err(Error::invalid(Self::NAME, rule, self.dtype.name(), "cast them afterwards"));
        }
        Ok(self.dtype)
    }

    fn kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        let draw = self.draw.0;
        for_dtype!(float Self::NAME, ins[0].dtype(), R => match self.dtype {
            DType::I64 => counts::<R, i64>(&ins[0], at, draw),
            DType::I32 => counts::<R, i32>(&ins[0], at, draw),
            dtype => for_dtype!(float Self::NAME, dtype, T => counts::<R, T>(&ins[0], at, draw)),
        })
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        draw_each_on_device(Parameters::Poisson(self.dtype), self.draw.0, &ins[0], at)
    }

    /// About: an attempt takes four random words and four special functions, and most first ones succeed.
    fn flops(&self) -> u64 {
        8 * Work::SPECIAL
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "a count has no derivative");
        Ok(())
    }
}

fn counts<R: rng::RandomFloat, T: rng::Count>(rates: &Tensor, at: &Windows, draw: Draw) -> Result<Tensor> {
    draw_each::<R, T>(rates, at, |at, rates, out| rng::poisson_each(draw, at, rates, out))
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let op = |dtype| Poisson { dtype, draw: Unkeyed(rng::Generator::new(7).next_draw()) };
    let sample = |dtype, shape: &[usize]| Sample::new(op(dtype), [Input::positive(shape)]).not_smooth();
    vec![
        sample(DType::I64, &[5, 3]),
        sample(DType::F32, &[7, 2, 3]),
        sample(DType::BF16, &[2, 0]),
        sample(DType::I32, &[]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    #[test]
    fn refuses_rates_and_dtypes_by_name() {
        let op = |dtype| Poisson { dtype, draw: Unkeyed(rng::Generator::new(7).next_draw()) };
        let x = Tensor::from_vec(vec![1.0f32, -1.0], [2]).unwrap();
        let refused = |dtype| eval_whole(&op(dtype), std::slice::from_ref(&x)).unwrap_err().to_string();
        assert_eq!(refused(DType::I64), "poisson: a rate lies between 0 and 2^50; got -1 for element 1");
        assert_eq!(
            refused(DType::U8),
            "poisson: counts are i64, i32 or floating; got u8; cast them afterwards"
        );
    }
}
