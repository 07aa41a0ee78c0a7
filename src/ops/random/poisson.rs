//! `poisson`: draws Poisson-distributed counts, each with its own rate.

use super::cuda::Parameters;
use super::per_element::{draw_per_element, draw_per_element_on_device};
use crate::error::{Error, Result};
use crate::ops::{Algebra, Input, Meta, Pointwise, Sample, Unkeyed, Vjp, Windows, Work};
use crate::rng::{self, Draw};
use crate::tensor::{DType, Tensor, cpu, for_dtype};

/// Draws Poisson-distributed counts. The operand gives the rates, from 0 to 2^50. Applied by
/// [`DTensor::poisson`](crate::dtensor::DTensor::poisson).
///
/// Element `e` (global, row-major) is element `e` of [`rng::poisson`], so every mesh draws the same counts. The kernel
/// refuses other rates.
///
/// ```
/// use isoshard::ops::{Poisson, Unkeyed, eval_whole};
/// use isoshard::{rng::Generator, tensor::{DType, Tensor}};
/// let op = Poisson { dtype: DType::I64, draw: Unkeyed(Generator::new(1).next_draw()) };
/// let counts = eval_whole(&op, &[Tensor::from_vec(vec![0.0, 1e6], [2])?])?[0].to_vec::<i64>()?;
/// assert!(counts[0] == 0 && (990_000..1_010_000).contains(&counts[1]));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Poisson {
    /// The dtype of the counts: i64, i32 or a floating-point dtype.
    pub dtype: DType,
    /// The draw of this call.
    pub draw: Unkeyed<Draw>,
}

impl Pointwise for Poisson {
    const NAME: &'static str = "poisson";
    const ARITY: usize = 1;

    /// The result is not linear in the rate, and rejection makes it jump.
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
        // Counts are computed from rates in f64, which holds every rate.
        let rates = cpu::cast(&ins[0], DType::F64)?;
        match self.dtype {
            DType::I64 => counts::<i64>(&rates, at, draw),
            DType::I32 => counts::<i32>(&rates, at, draw),
            dtype => for_dtype!(float Self::NAME, dtype, T => counts::<T>(&rates, at, draw)),
        }
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        draw_per_element_on_device(Parameters::Poisson(self.dtype), self.draw.0, &ins[0], at)
    }

    /// An estimate: an attempt takes four random words and four special functions, and most first attempts succeed.
    fn flops(&self) -> u64 {
        8 * Work::SPECIAL
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "a count has no derivative");
        Ok(())
    }
}

fn counts<T: rng::Count>(rates: &Tensor, at: &Windows, draw: Draw) -> Result<Tensor> {
    draw_per_element::<f64, T>(rates, at, |at, rates, out| rng::poisson_each(draw, at, rates, out))
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
