//! Clipping by the global norm.

use crate::dtensor::DTensor;
use crate::error::{Error, Result};

/// The Euclidean norm of all gradients together, on every rank; shape `[]`.
///
/// Gradients that lie alike are summed before anything is reduced: one all-reduce of one element per kind of layout.
///
/// # Errors
/// Refuses an empty list; a fault of communication.
pub fn global_norm<'a>(grads: impl IntoIterator<Item = &'a DTensor>) -> Result<DTensor> {
    let mut sums: Vec<DTensor> = Vec::new();
    for g in grads {
        let square = g.mul(g)?.sum_all()?;
        match sums.iter_mut().find(|s| s.layout() == square.layout()) {
            Some(sum) => *sum = sum.add(&square)?,
            None => sums.push(square),
        }
    }
    let mut sums = sums.into_iter();
    let first = sums.next().ok_or_else(|| Error::invalid("global_norm", "wants gradients", "none", ""))?;
    sums.try_fold(first.reduce_partial()?, |a, b| a.add(&b.reduce_partial()?))?.sqrt()
}

/// What gradients of norm `norm` are to be multiplied by so that their norm is at most `limit`: `min(1, limit / norm)`.
///
/// # Errors
/// None for a scalar norm.
pub fn clip_scale(norm: &DTensor, limit: f64) -> Result<DTensor> {
    let one = DTensor::full(norm.mesh(), norm.dtype(), norm.shape(), 1.0, norm.layout().clone())?;
    // As everywhere, 1e-6 keeps a norm of zero from dividing.
    one.scale(limit)?.div(&norm.shift(1e-6)?)?.minimum(&one)
}
