//! Tensors whose elements are formulas of global indices: sequences, bands of diagonals, and one-hot rows.
//!
//! Sequences and bands have no operands, so they are functions and not records: a rank fills the region that it stores.
//! [`KeepBand`](keep_band::KeepBand) and [`OneHot`](one_hot::OneHot) are operators.
//!
//! Missing: sequences of bools, and `Partial` layouts, which are refused.

pub(super) mod cpu;
mod cuda;
pub(super) mod index_formula;
pub(super) mod keep_band;
pub(super) mod one_hot;

use index_formula::{DiagonalBand, IndexSequence};

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
