//! `keep_band`: sets the elements outside a band of diagonals to 0. `tril` and `triu` are bands.

use super::{DiagonalBand, cpu, cuda};
use crate::error::{Error, Result};
use crate::ops::{Algebra, Input, Meta, Pointwise, Sample, Vjp, Windows};
use crate::tensor::cpu::as_elements_mut;
use crate::tensor::{DType, Tensor, for_dtype};

/// Keeps the elements of a band of diagonals of the last two dims, and sets the others to 0 (false for bools). Applied
/// by [`DTensor::tril`](crate::dtensor::DTensor::tril) and [`DTensor::triu`](crate::dtensor::DTensor::triu).
///
/// ```
/// use isoshard::ops::{DiagonalBand, KeepBand, eval_whole};
/// use isoshard::tensor::Tensor;
/// let x = Tensor::from_vec(vec![1i64, 2, 3, 4, 5, 6], [2, 3])?;
/// let y = eval_whole(&KeepBand { band: DiagonalBand { low: 0, high: 1 } }, &[x])?.remove(0);
/// assert_eq!(y.to_vec::<i64>()?, [1, 2, 0, 0, 5, 6]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeepBand {
    /// The diagonals that are kept.
    pub band: DiagonalBand,
}

impl Pointwise for KeepBand {
    const NAME: &'static str = "keep_band";
    const ARITY: usize = 1;

    /// An element is copied, or 0 on every rank, so any partial operand is accepted.
    fn algebra(&self) -> Algebra {
        Algebra::Structural
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        if ins[0].shape.len() < 2 {
            let remedy = "unsqueeze it";
            return Err(Error::invalid(Self::NAME, "diagonals need two dims", ins[0].to_string(), remedy));
        }
        Ok(ins[0].dtype)
    }

    fn kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        let (x, window) = (ins[0].contiguous()?, &at.outs[0]);
        let mut out = Tensor::uninit(x.dtype(), x.shape());
        for_dtype!(any x.dtype(), T => {
            let (x, out) = (x.as_slice::<T>()?, as_elements_mut::<T>(out.bytes_mut()));
            cpu::keep_band(x, out, &window.global, &window.region, self.band);
        });
        Ok(out)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor> {
        let window = &at.outs[0];
        cuda::keep_band(&ins[0], &window.global, &window.region, self.band)
    }

    /// A selection per element.
    fn flops(&self) -> u64 {
        1
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(*self, &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let keep = |low, high| KeepBand { band: DiagonalBand { low, high } };
    vec![
        Sample::new(keep(i64::MIN, 0), [Input::ints([5, 3])]),
        Sample::new(keep(1, i64::MAX), [Input::ints([2, 3, 7])]),
        Sample::new(keep(-1, 1), [Input::index([5, 7], 9)]).not_smooth(),
        Sample::new(keep(0, 0), [Input::ints([0, 1])]),
    ]
}
