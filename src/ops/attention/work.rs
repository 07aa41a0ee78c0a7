//! The work of causal attention and of its derivative.

use crate::ops::work::{Work, elements};
use crate::ops::{Bits, Meta};

/// The work of attention on (q, k, v): for each pair of a query and a key that it sees `2D + 2Dv` for the two products,
/// scaling, comparing, subtracting, exponentiating and adding; for each query its logarithm and the division of its result.
pub(super) fn forward(ins: &[Meta], outs: &[Meta], p: Bits, offset: usize) -> Work {
    let each = 2 * width(&ins[0]) + 2 * width(&ins[2]) + (Work::SPECIAL + 4) + dropout(p);
    let queries = elements(&outs[1]).saturating_mul(Work::SPECIAL + 1);
    Work::new(pairs(ins, offset).saturating_mul(each), ins, outs).plus(queries).plus(elements(&outs[0]))
}

/// The work of the derivative on (q, k, v, o, lse, do): for each pair `6D + 4Dv` for the five products (the scores anew, and
/// the gradients of v, of the probabilities, of q and of k), 2 and an exponential for the probability, and 3 for the score's
/// gradient; for each query the product of o and do.
pub(super) fn backward(ins: &[Meta], outs: &[Meta], p: Bits, offset: usize) -> Work {
    let each = 6 * width(&ins[0]) + 4 * width(&ins[2]) + (Work::SPECIAL + 5) + dropout(p);
    Work::new(pairs(ins, offset).saturating_mul(each), ins, outs).plus(elements(&ins[3]).saturating_mul(2))
}

/// The extent of the last dim, small enough for a few of it to be added.
fn width(of: &Meta) -> u64 {
    of.shape.last().map_or(0, |&n| n as u64).min(u64::MAX >> 5)
}

/// A random word and a product for each probability.
fn dropout(p: Bits) -> u64 {
    if p.0 > 0.0 { Work::SPECIAL + 1 } else { 0 }
}

/// The pairs of a query and a key that it sees, in all heads: query i sees keys 0 to `offset + i`.
fn pairs(ins: &[Meta], offset: usize) -> u64 {
    let q = &ins[0].shape;
    let (offset, queries) = (offset as u128, q[2] as u128);
    let seen = offset * queries + queries * (queries + 1) / 2;
    let heads = (q[0] as u64).saturating_mul(q[1] as u64);
    u64::try_from(seen).unwrap_or(u64::MAX).saturating_mul(heads)
}
