//! The work of causal attention and of its derivative.

use crate::ops::work::{Work, elements};
use crate::ops::{Bits, Meta};

/// Returns the work of attention on (q, k, v). Per pair of a query and a key to which it attends: `2D + 2Dv` for the
/// two products, and a scaling, a comparison, a subtraction, an exponential and an addition. Per query: a logarithm and
/// the division of its result.
pub(super) fn forward(ins: &[Meta], outs: &[Meta], p: Bits, offset: usize) -> Work {
    let each = 2 * width(&ins[0]) + 2 * width(&ins[2]) + (Work::SPECIAL + 4) + dropout(p);
    let queries = elements(&outs[1]).saturating_mul(Work::SPECIAL + 1);
    Work::new(pairs(ins, offset).saturating_mul(each), ins, outs).plus(queries).plus(elements(&outs[0]))
}

/// Returns the work of the derivative on (q, k, v, o, lse, do). Per pair: `6D + 4Dv` for five products (the scores
/// again, and the gradients of v, of the probabilities, of q and of k), 2 and an exponential for the probability, and 3
/// for the score's gradient. Per query: the product of o and do.
pub(super) fn backward(ins: &[Meta], outs: &[Meta], p: Bits, offset: usize) -> Work {
    let each = 6 * width(&ins[0]) + 4 * width(&ins[2]) + (Work::SPECIAL + 5) + dropout(p);
    Work::new(pairs(ins, offset).saturating_mul(each), ins, outs).plus(elements(&ins[3]).saturating_mul(2))
}

/// Returns the extent of the last dim, limited so that a small multiple of it does not overflow.
fn width(of: &Meta) -> u64 {
    of.shape.last().map_or(0, |&n| n as u64).min(u64::MAX >> 5)
}

/// Returns the operations of dropout per pair: a random word and a product.
fn dropout(p: Bits) -> u64 {
    if p.0 > 0.0 { Work::SPECIAL + 1 } else { 0 }
}

/// Returns the number of pairs of a query and a key to which it attends, in all heads. Query i attends to the keys 0 to
/// `offset + i`.
fn pairs(ins: &[Meta], offset: usize) -> u64 {
    let q = &ins[0].shape;
    let (offset, queries) = (offset as u128, q[2] as u128);
    let seen = offset * queries + queries * (queries + 1) / 2;
    let heads = (q[0] as u64).saturating_mul(q[1] as u64);
    u64::try_from(seen).unwrap_or(u64::MAX).saturating_mul(heads)
}
