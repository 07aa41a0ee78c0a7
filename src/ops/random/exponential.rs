//! `exponential`: draws exponentially distributed numbers, each with its own rate.

use super::cuda::Parameters;
use super::per_element::{draw_per_element, draw_per_element_on_device};
use crate::error::Result;
use crate::ops::{Algebra, Div, Input, Meta, Mul, Neg, Pointwise, Sample, Unkeyed, Vjp, Windows, Work};
use crate::rng::{self, Draw};
use crate::tensor::{DType, Tensor, for_dtype};

/// Draws exponentially distributed numbers of mean 1 / rate. The operand gives the rates, which are positive and
/// finite. Applied by [`DTensor::exponential`](crate::dtensor::DTensor::exponential).
///
/// Element `e` (global, row-major) is element `e` of [`rng::exponential`], so every mesh draws the same numbers. It is
/// E / rate with an E that does not depend on the rate, and the derivative is that of the quotient. The kernel refuses
/// other rates.
///
/// ```
/// use isoshard::ops::{Exponential, Unkeyed, eval_whole};
/// use isoshard::{rng::Generator, tensor::Tensor};
/// let op = Exponential { draw: Unkeyed(Generator::new(1).next_draw()) };
/// let once = eval_whole(&op, &[Tensor::from_vec(vec![1.0], [1])?])?[0].item()?;
/// let twice = eval_whole(&op, &[Tensor::from_vec(vec![2.0], [1])?])?[0].item()?;
/// assert_eq!(once, 2.0 * twice);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Exponential {
    /// The draw of this call.
    pub draw: Unkeyed<Draw>,
}

impl Pointwise for Exponential {
    const NAME: &'static str = "exponential";
    const ARITY: usize = 1;

    /// A quotient is not linear in its divisor.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        ins[0].dtype.expect_float(Self::NAME)?;
        Ok(ins[0].dtype)
    }

    fn kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        let draw = self.draw.0;
        for_dtype!(float Self::NAME, ins[0].dtype(), T => {
            draw_per_element::<T, T>(&ins[0], at, |at, rate, out| rng::exponential_each(draw, at, rate, out))
        })
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        draw_per_element_on_device(Parameters::Exponential, self.draw.0, &ins[0], at)
    }

    /// Two random words, a logarithm and a division. f16, bf16 and f32 use one word only.
    fn flops(&self) -> u64 {
        3 * Work::SPECIAL + 1
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (rate, x, dx) = (g.input(0), g.output(0), g.grad(0));
        let product = g.apply(Mul, &[dx, x])?;
        let quotient = g.apply(Div, &[product, rate])?;
        let drate = g.apply(Neg, &[quotient])?;
        g.set(0, drate);
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let op = || Exponential { draw: Unkeyed(rng::Generator::new(7).next_draw()) };
    let shapes: [&[usize]; 4] = [&[5, 3], &[7, 2, 3], &[2, 0], &[]];
    shapes.map(|shape| Sample::new(op(), [Input::positive(shape)])).to_vec()
}
