//! `min` over any dims.

use super::max::MaxOrMin;
use crate::ops::{Input, Sample};

/// The minimum over dims; see [`MaxOrMin`]. Applied by [`DTensor::min`](crate::dtensor::DTensor::min).
///
/// ```
/// use isoshard::{ops::{Min, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, f64::NAN], [2])?;
/// assert!(eval_whole(&Min { dims: [0].into_iter().collect(), keep: false }, &[x])?[0].item()?.is_nan());
/// # Ok::<(), isoshard::Error>(())
/// ```
pub type Min = MaxOrMin<false>;

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let min = |dims: &[usize], keep| Min { dims: dims.iter().copied().collect(), keep };
    vec![
        Sample::new(min(&[0], false), [Input::ints([5, 3])]).not_smooth(),
        Sample::new(min(&[0, 1], true), [Input::ints([3, 2])]).not_smooth(),
    ]
}
