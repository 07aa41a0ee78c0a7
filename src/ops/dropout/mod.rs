//! `dropout`: zeroes elements at random. The mask is a function of the draw and of global indices.

pub(super) mod cpu;
mod cuda;

use crate::error::{Error, Result};
use crate::rng::{self, Draw, IndexRanges};
use crate::tensor::cpu::as_elements_mut;
use crate::tensor::{DType, Tensor, for_dtype};

use super::{Algebra, Bits, Input, Meta, Pointwise, Sample, Unkeyed, Vjp, Windows, Work};

/// Zeroes each element with probability `p` and multiplies the others by `1 / (1 - p)` (Srivastava et al., *Dropout*,
/// 2014). Applied by [`DTensor::dropout`](crate::dtensor::DTensor::dropout).
///
/// Element `e` (global, row-major) uses word `e` of the draw, so every mesh drops the same elements.
///
/// ```
/// use isoshard::ops::{Bits, Dropout, Unkeyed, eval_whole};
/// use isoshard::{rng::Generator, tensor::{DType, Tensor}};
/// let op = Dropout { p: Bits(0.5), draw: Unkeyed(Generator::new(1).next_draw()) };
/// let y = eval_whole(&op, &[Tensor::full(DType::F32, [100], 1.0)])?.remove(0).to_f64_vec();
/// assert!(y.contains(&0.0) && y.contains(&2.0) && y.iter().all(|y| [0.0, 2.0].contains(y)));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Dropout {
    /// The probability of zero, in [0, 1].
    pub p: Bits,
    /// The draw of this call.
    pub draw: Unkeyed<Draw>,
}

impl Pointwise for Dropout {
    const NAME: &'static str = "dropout";
    const ARITY: usize = 1;

    /// The mask does not depend on the values, so each rank may mask its contribution to a partial sum.
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

/// Refuses a `p` outside [0, 1].
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
