//! `gamma`: draws gamma-distributed numbers, each with its own shape parameter.

use super::cuda::Parameters;
use super::per_element::{draw_per_element, draw_per_element_on_device};
use crate::error::Result;
use crate::ops::{Algebra, Input, Meta, Pointwise, Sample, Unkeyed, Vjp, Windows, Work};
use crate::rng::{self, Draw};
use crate::tensor::{DType, Tensor, for_dtype};

/// Draws gamma-distributed numbers of scale 1. The operand gives the shape parameters, which are positive and finite
/// and are the means. Applied by [`DTensor::gamma`](crate::dtensor::DTensor::gamma).
///
/// Element `e` (global, row-major) is element `e` of [`rng::gamma`], so every mesh draws the same numbers. Multiply the
/// result for another scale. The kernel refuses other parameters.
///
/// ```
/// use isoshard::ops::{Gamma, Unkeyed, eval_whole};
/// use isoshard::{rng::Generator, tensor::{DType, Tensor}};
/// let op = Gamma { draw: Unkeyed(Generator::new(1).next_draw()) };
/// let drawn = eval_whole(&op, &[Tensor::full(DType::F64, [1000], 4.0)])?.remove(0).to_f64_vec();
/// assert!((drawn.iter().sum::<f64>() / 1000.0 - 4.0).abs() < 0.5);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gamma {
    /// The draw of this call.
    pub draw: Unkeyed<Draw>,
}

impl Pointwise for Gamma {
    const NAME: &'static str = "gamma";
    const ARITY: usize = 1;

    /// The result is not linear in the shape parameter, and rejection makes it jump.
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
            draw_per_element::<T, T>(&ins[0], at, |at, shape, out| rng::gamma_each(draw, at, shape, out))
        })
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        draw_per_element_on_device(Parameters::Gamma, self.draw.0, &ins[0], at)
    }

    /// An estimate: an attempt takes four random words and four special functions, and most first attempts succeed.
    fn flops(&self) -> u64 {
        8 * Work::SPECIAL
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "a number drawn by rejection is not a continuous function of its shape parameter");
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let op = || Gamma { draw: Unkeyed(rng::Generator::new(7).next_draw()) };
    let shapes: [&[usize]; 4] = [&[5, 3], &[7, 2, 3], &[2, 0], &[]];
    shapes.map(|shape| Sample::new(op(), [Input::positive(shape)]).not_smooth()).to_vec()
}
