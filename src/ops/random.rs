//! What random operators with a parameter for each element have in common.

use super::Windows;
use crate::error::Result;
use crate::tensor::{Element, Tensor};

/// The result whose elements `fill` draws, stretch by stretch: given the global linear index of the first, and the
/// parameters of all.
pub(super) fn draw_each<P: Element, T: Element>(
    params: &Tensor,
    at: &Windows,
    mut fill: impl FnMut(u64, &[P], &mut [T]) -> Result<()>,
) -> Result<Tensor> {
    let params = params.contiguous();
    let mut out = Tensor::stale(T::DTYPE, params.shape());
    let (params, elements) = (params.as_slice::<P>()?, out.make_mut::<T>()?);
    let window = &at.outs[0];
    let mut done = Ok(());
    window.region.runs(&window.global, |start, offset, len| {
        if done.is_ok() {
            let here = offset..offset + len;
            done = fill(start, &params[here.clone()], &mut elements[here]);
        }
    });
    done.map(|()| out)
}
