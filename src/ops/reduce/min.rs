//! `min`: the smallest element over any dims.

use super::max::Extreme;
use crate::ops::{Input, Sample};

/// The minimum over `dims`; see [`Extreme`].
pub type Min = Extreme<false>;

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let min = |dims: &[usize], keep| Min { dims: dims.iter().copied().collect(), keep };
    vec![
        Sample::new(min(&[0], false), [Input::ints([5, 3])]).not_smooth(),
        Sample::new(min(&[0, 1], true), [Input::ints([3, 2])]).not_smooth(),
    ]
}
