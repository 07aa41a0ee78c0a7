//! Tensors whose elements are formulas of global indices: sequences, bands of diagonals, and one-hot rows.
//!
//! Sequences and bands have no operands, so they are functions and not records: a rank fills the region that it stores.
//! [`KeepBand`](keep_band::KeepBand) and [`OneHot`](one_hot::OneHot) are operators.
//!
//! Missing: sequences of bools, and `Partial` layouts, which are refused.

mod cpu;
mod cuda;
mod index_formula;
mod keep_band;
mod one_hot;

pub use index_formula::DiagonalBand;
pub(crate) use index_formula::IndexSequence;
pub use keep_band::KeepBand;
pub use one_hot::OneHot;

use super::Sample;

use crate::error::Result;
use crate::placement::Region;
use crate::tensor::{DType, Device, Shape, Tensor};

/// Returns the elements of `region` of a sequence of shape `global`.
///
/// # Errors
/// Returns an error if the device has no memory left or the launch fails.
pub(crate) fn sequence(
    device: Device,
    dtype: DType,
    global: &Shape,
    region: &Region,
    numbers: IndexSequence,
) -> Result<Tensor> {
    let wide = if dtype.is_float() { DType::F64 } else { DType::I64 };
    let mut out = Tensor::uninit_on(device, wide, region.local.clone())?;
    match device {
        Device::Cpu => cpu::sequence(&mut out, global, region, numbers),
        Device::Cuda(_) => cuda::sequence(&mut out, global, region, numbers)?,
        Device::Meta => return Tensor::without_elements(dtype, region.local.clone()),
    }
    out.cast(dtype)
}

/// Returns the elements of `region` of a tensor of shape `global` that is `inside` in the band and `outside` elsewhere.
///
/// # Errors
/// Returns the errors of [`sequence`].
pub(crate) fn band(
    device: Device,
    dtype: DType,
    global: &Shape,
    region: &Region,
    band: DiagonalBand,
    [inside, outside]: [f64; 2],
) -> Result<Tensor> {
    let mut out = Tensor::uninit_on(device, dtype, region.local.clone())?;
    match device {
        Device::Cpu => cpu::band(&mut out, global, region, band, [inside, outside]),
        Device::Cuda(_) => cuda::band(&mut out, global, region, band, [inside, outside])?,
        Device::Meta => {}
    }
    Ok(out)
}

/// Returns the samples of the family's operators.
pub(super) fn samples() -> Vec<Sample> {
    [keep_band::samples(), one_hot::samples()].concat()
}
