//! Clipping by the global norm.

use crate::dtensor::{DTensor, Reduction};
use crate::error::{Error, Result};

/// The Euclidean norm of all gradients together, on every rank; shape `[]`.
///
/// The squares of each gradient are summed, those sums are added in the order of `grads`. Communicates one message for each
/// set of mesh axes that gradients are cut over: in exact mode of as many elements as nodes of the gradients' summation
/// trees are held, in fast mode of one for each kind of layout.
///
/// # Errors
/// Refuses an empty list; a fault of communication.
pub fn global_norm<'a>(grads: impl IntoIterator<Item = &'a DTensor>) -> Result<DTensor> {
    let squares = grads.into_iter().map(|g| g.mul(g)?.sum_all()).collect::<Result<Vec<DTensor>>>()?;
    let first =
        squares.first().ok_or_else(|| Error::invalid("global_norm", "wants gradients", "none", ""))?;
    let mut sums = match first.mesh().reduction() {
        Reduction::Exact => DTensor::reduce_partials(&squares)?.into_iter(),
        Reduction::Fast => DTensor::reduce_partials(&added_alike(&squares)?)?.into_iter(),
    };
    let first = sums.next().expect("there is a first square");
    sums.try_fold(first, |a, b| a.add(&b))?.sqrt()
}

/// Those that lie alike, added: parts of sums as well.
fn added_alike(squares: &[DTensor]) -> Result<Vec<DTensor>> {
    let mut sums: Vec<DTensor> = Vec::new();
    for square in squares {
        match sums.iter_mut().find(|s| s.layout() == square.layout()) {
            Some(sum) => *sum = sum.add(square)?,
            None => sums.push(square.clone()),
        }
    }
    Ok(sums)
}

/// What gradients of norm `norm` are to be multiplied by so that their norm is at most `limit`: `min(1, limit / norm)`.
///
/// # Errors
/// None for a scalar norm.
pub fn clip_scale(norm: &DTensor, limit: f64) -> Result<DTensor> {
    let one = DTensor::full(norm.mesh(), norm.dtype(), norm.shape(), 1.0, norm.layout().clone())?;
    // As everywhere, 1e-6 keeps a norm of zero from dividing.
    one.mul_scalar(limit)?.div(&norm.add_scalar(1e-6)?)?.minimum(&one)
}
