//! Sums of two gradients.

use super::tensor::DTensor;
use crate::error::Result;
use crate::ops::Add;

/// Returns `a + b`, reusing a buffer that no other tensor shares.
pub(super) fn add(a: DTensor, b: DTensor) -> Result<DTensor> {
    Ok(DTensor::apply_owned(&Add, &mut [a, b].into())?.remove(0))
}

/// Returns the sum of a gradient and those before it. It is recorded if one of them is.
pub(super) fn add_to(sum: Option<DTensor>, grad: DTensor) -> Result<DTensor> {
    match sum {
        None => Ok(grad),
        Some(sum) if sum.has_history() || grad.has_history() => DTensor::apply_one(&Add, &[&sum, &grad]),
        Some(sum) => add(sum, grad),
    }
}
