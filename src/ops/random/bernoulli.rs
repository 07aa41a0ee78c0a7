//! `bernoulli`: draws bools, each with its own probability.

use super::cuda::Parameters;
use super::per_element::{draw_per_element, draw_per_element_on_device};
use crate::error::Result;
use crate::ops::{Algebra, Input, Meta, Pointwise, Sample, Unkeyed, Vjp, Windows, Work};
use crate::rng::{self, Draw};
use crate::tensor::{DType, Tensor, for_dtype};

/// Draws bools that are true with the operand's probabilities, which are in [0, 1] and exact to 2^-32. Applied by
/// [`DTensor::bernoulli`](crate::dtensor::DTensor::bernoulli).
///
/// Element `e` (global, row-major) uses word `e` of the draw, so every mesh draws the same elements. If all
/// probabilities are equal, they are the elements of [`rng::bernoulli`]. The kernel refuses numbers that are not
/// probabilities.
///
/// ```
/// use isoshard::ops::{Bernoulli, Unkeyed, eval_whole};
/// use isoshard::{rng::Generator, tensor::Tensor};
/// let op = Bernoulli { draw: Unkeyed(Generator::new(1).next_draw()) };
/// let p = Tensor::from_vec(vec![0.0, 1.0], [2])?;
/// assert_eq!(eval_whole(&op, &[p])?[0].to_vec::<bool>()?, [false, true]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Bernoulli {
    /// The draw of this call.
    pub draw: Unkeyed<Draw>,
}

impl Pointwise for Bernoulli {
    const NAME: &'static str = "bernoulli";
    const ARITY: usize = 1;

    /// A rank's contribution to a partial sum is not a probability.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        ins[0].dtype.expect_float(Self::NAME)?;
        Ok(DType::Bool)
    }

    fn kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        let draw = self.draw.0;
        for_dtype!(float Self::NAME, ins[0].dtype(), T => {
            draw_per_element::<T, bool>(&ins[0], at, |at, p, out| rng::bernoulli_each(draw, at, p, out))
        })
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        draw_per_element_on_device(Parameters::Bernoulli, self.draw.0, &ins[0], at)
    }

    /// A random word, a product and a comparison.
    fn flops(&self) -> u64 {
        Work::SPECIAL + 2
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "a truth value has no derivative");
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let op = || Bernoulli { draw: Unkeyed(rng::Generator::new(7).next_draw()) };
    let shapes: [&[usize]; 4] = [&[5, 3], &[7, 2, 3], &[2, 0], &[]];
    shapes.map(|shape| Sample::new(op(), [Input::unit(shape)]).not_smooth()).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    #[test]
    fn equal_probabilities_are_the_scalars() {
        let draw = rng::Generator::new(3).next_draw();
        let mut want = [false; 100];
        for p in [0.0, 0.1, 0.5, 1.0] {
            rng::bernoulli(draw, 0, p, &mut want).unwrap();
            let x = Tensor::full(DType::F64, [100], p);
            let got = eval_whole(&Bernoulli { draw: Unkeyed(draw) }, &[x]).unwrap();
            assert_eq!(got[0].to_vec::<bool>().unwrap(), want, "{p}");
        }
    }

    #[test]
    fn refuses_what_is_no_probability() {
        for (p, text) in [(1.5, "1.5"), (-0.25, "-0.25"), (f64::NAN, "NaN")] {
            let x = Tensor::from_vec(vec![0.5f32, p as f32], [2]).unwrap();
            let op = Bernoulli { draw: Unkeyed(rng::Generator::new(3).next_draw()) };
            let refused = eval_whole(&op, &[x]).unwrap_err().to_string();
            let want = format!("bernoulli: a probability lies in [0, 1]; got {text} for element 1");
            assert_eq!(refused, want);
        }
    }
}
