//! `dropout`: zeroes elements at random, by a mask that is a function of their global indices.

pub(super) mod cpu;
mod cuda;

use crate::error::{Error, Result};
use crate::rng::{self, Draw, IndexRanges};
use crate::tensor::cpu::as_elements_mut;
use crate::tensor::{DType, Tensor, for_dtype};

use super::{Algebra, Bits, Input, Meta, Pointwise, Sample, Unkeyed, Vjp, Windows, Work};

/// Each element zeroed with probability `p`, else multiplied by `1 / (1 - p)`.
///
/// Element `e` (global, row-major) reads word `e` of the draw: every mesh drops the same elements. Srivastava et al.,
/// *Dropout*, 2014.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Dropout {
    /// The probability of zero, in [0, 1].
    pub p: Bits,
    /// This call's numbers.
    pub draw: Unkeyed<Draw>,
}

impl Pointwise for Dropout {
    const NAME: &'static str = "dropout";
    const ARITY: usize = 1;

    /// The mask does not depend on the values, so every part of a sum may be masked by itself.
    fn algebra(&self) -> Algebra {
        Algebra::Linear
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        expect_probability(Self::NAME, self.p)?;
        ins[0].dtype.expect_float(Self::NAME)?;
        Ok(ins[0].dtype)
    }

    fn kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        let (draw, p) = (self.draw.0, self.p.0);
        let x = ins[0].contiguous()?;
        let mut out = Tensor::uninit(x.dtype(), x.shape());
        for_dtype!(float Self::NAME, x.dtype(), T => {
            let (x, out) = (x.as_slice::<T>()?, as_elements_mut::<T>(out.bytes_mut()));
            let window = &at.outs[0];
            IndexRanges::of(&window.region, &window.global, |at, here| {
                cpu::dropout(draw, at, p, &x[here.clone()], &mut out[here])
            })
        })?;
        Ok(out)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        let window = &at.outs[0];
        cuda::dropout(self.draw.0, self.p.0, &ins[0], &window.global, &window.region)
    }

    /// A random word, a comparison and a product.
    fn flops(&self) -> u64 {
        Work::SPECIAL + 2
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(self.clone(), &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

/// Refuses, in the name of `verb`, a `p` outside [0, 1].
pub(super) fn expect_probability(verb: &str, p: Bits) -> Result<()> {
    if (0.0..=1.0).contains(&p.0) {
        return Ok(());
    }
    Err(Error::invalid(verb, "a probability lies in [0, 1]", format!("p = {p:?}"), ""))
}

pub(super) fn samples() -> Vec<Sample> {
    let dropout = |p| Dropout { p: Bits(p), draw: Unkeyed(rng::Generator::new(7).next_draw()) };
    vec![
        Sample::new(dropout(0.5), [Input::ints([5, 3])]),
        Sample::new(dropout(0.25), [Input::ints([7, 2, 3])]),
        Sample::new(dropout(0.0), [Input::ints([3])]),
        Sample::new(dropout(1.0), [Input::ints([2, 0])]),
        Sample::new(dropout(0.5), [Input::ints([])]),
    ]
}
