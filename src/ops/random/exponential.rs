//! `exponential`: exponential numbers of a rate given for each element.

use super::cuda::Parameters;
use super::per_element::{draw_per_element, draw_per_element_on_device};
use crate::error::Result;
use crate::ops::{Algebra, Div, Input, Meta, Mul, Neg, Pointwise, Sample, Unkeyed, Vjp, Windows, Work};
use crate::rng::{self, Draw};
use crate::tensor::{DType, Tensor, for_dtype};

/// Exponential numbers of the operand's rates, each positive and finite; of mean 1 / rate.
///
/// Element `e` (global, row-major) is element `e` of [`rng::exponential`]: every mesh gets the same. It is E / rate,
/// where E does not depend on the rate; the derivative is that of this quotient. A kernel refuses other rates.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Exponential {
    /// This call's numbers.
    pub draw: Unkeyed<Draw>,
}

impl Pointwise for Exponential {
    const NAME: &'static str = "exponential";
    const ARITY: usize = 1;

    /// A quotient is not linear in what it is divided by.
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

    /// Two random words, a logarithm and a division; f16 to f32 read one word.
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
