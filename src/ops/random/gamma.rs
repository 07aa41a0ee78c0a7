//! `gamma`: gamma numbers of a shape given for each element.

use super::cuda::Parameters;
use super::per_element::{draw_per_element, draw_per_element_on_device};
use crate::error::Result;
use crate::ops::{Algebra, Input, Meta, Pointwise, Sample, Unkeyed, Vjp, Windows, Work};
use crate::rng::{self, Draw};
use crate::tensor::{DType, Tensor, for_dtype};

/// Gamma numbers of scale 1 and of the operand's shape parameters, each positive and finite, which are their means.
///
/// Element `e` (global, row-major) is element `e` of [`rng::gamma`]: every mesh gets the same. Another scale is a
/// product. A kernel refuses other parameters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gamma {
    /// This call's numbers.
    pub draw: Unkeyed<Draw>,
}

impl Pointwise for Gamma {
    const NAME: &'static str = "gamma";
    const ARITY: usize = 1;

    /// Rejection commutes with nothing.
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

    /// About: an attempt takes four random words and four special functions, and most first ones succeed.
    fn flops(&self) -> u64 {
        8 * Work::SPECIAL
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "a number found by rejection jumps with its shape: the gradient stops at what is drawn");
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let op = || Gamma { draw: Unkeyed(rng::Generator::new(7).next_draw()) };
    let shapes: [&[usize]; 4] = [&[5, 3], &[7, 2, 3], &[2, 0], &[]];
    shapes.map(|shape| Sample::new(op(), [Input::positive(shape)]).not_smooth()).to_vec()
}
