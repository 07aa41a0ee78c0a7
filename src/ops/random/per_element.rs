//! Helpers of random operators whose operand gives a parameter per element.

use std::ops::Range;

use super::cuda;
use crate::error::Result;
use crate::ops::Windows;
use crate::rng::{Draw, IndexRanges};
use crate::tensor::{DType, Element, Tensor};

/// Returns a result whose elements `fill` draws. `fill` is called once per batch of index ranges, with the ranges, the
/// parameters and the slice to fill.
pub(super) fn draw_per_element<P: Element, T: Element>(
    params: &Tensor,
    at: &Windows,
    mut fill: impl FnMut(IndexRanges<'_>, &[P], &mut [T]) -> Result<()>,
) -> Result<Tensor> {
    // The parts that are compiled for each pair of types are short.
    let (params, mut out) = operand_and_result(params, T::DTYPE)?;
    let (params, elements) = (params.as_slice::<P>()?, out.make_mut::<T>()?);
    each_range(at, &mut |at, here| fill(at, &params[here.clone()], &mut elements[here]))?;
    Ok(out)
}

fn operand_and_result(params: &Tensor, dtype: DType) -> Result<(Tensor, Tensor)> {
    let params = params.contiguous()?;
    let out = Tensor::uninit(dtype, params.shape());
    Ok((params, out))
}

fn each_range(at: &Windows, fill: &mut dyn FnMut(IndexRanges<'_>, Range<usize>) -> Result<()>) -> Result<()> {
    let window = &at.outs[0];
    IndexRanges::of(&window.region, &window.global, fill)
}

/// Draws the elements on a CUDA device. `what` names the distribution.
pub(super) fn draw_per_element_on_device(
    what: cuda::Parameters,
    draw: Draw,
    params: &Tensor,
    at: &Windows,
) -> Result<Tensor> {
    let window = &at.outs[0];
    cuda::draw_per_element(what, draw, params, &window.global, &window.region)
}
