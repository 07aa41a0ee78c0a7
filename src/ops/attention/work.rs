//! The work of attention and of its derivatives.

use super::scores::ScoreRule;
use crate::ops::record::work::{Work, elements};
use crate::ops::{Bits, Meta};

/// Returns the work of attention on (q, k, v, ..). Per pair of a query and a key in its window: `2D + 2Dv` for the
/// two products, and a scaling, a comparison, a subtraction, an exponential and an addition; a quotient, a product and a
/// hyperbolic tangent for a soft cap, and an addition for a bias. Per query: a logarithm and the division of its result.
pub(super) fn forward(ins: &[Meta], outs: &[Meta], rule: &ScoreRule, p: Bits, offset: usize) -> Work {
    let each = 2 * width(&ins[0]) + 2 * width(&ins[2]) + (Work::SPECIAL + 4) + dropout(p) + score(rule);
    let queries = elements(&outs[1]).saturating_mul(Work::SPECIAL + 1);
    Work::new(pairs(ins, rule, offset).saturating_mul(each), ins, outs).plus(queries).plus(elements(&outs[0]))
}

/// Returns the work of the derivative on (q, k, v, o, lse, do). Per pair: `6D + 4Dv` for five products (the scores
/// again, and the gradients of v, of the probabilities, of q and of k), 2 and an exponential for the probability, and 3
/// for the score's gradient. Per query: the product of o and do.
pub(super) fn backward(ins: &[Meta], outs: &[Meta], rule: &ScoreRule, p: Bits, offset: usize) -> Work {
    let each = 6 * width(&ins[0]) + 4 * width(&ins[2]) + (Work::SPECIAL + 5) + dropout(p) + score(rule);
    Work::new(pairs(ins, rule, offset).saturating_mul(each), ins, outs)
        .plus(elements(&ins[3]).saturating_mul(2))
}

/// Returns the work of the derivative by the bias: the scores and the probabilities' gradients, `2D + 2Dv` per pair, and
/// an addition to the result.
pub(super) fn bias_backward(ins: &[Meta], outs: &[Meta], rule: &ScoreRule, p: Bits, offset: usize) -> Work {
    let each = 2 * width(&ins[0]) + 2 * width(&ins[2]) + (Work::SPECIAL + 6) + dropout(p) + score(rule);
    Work::new(pairs(ins, rule, offset).saturating_mul(each), ins, outs)
        .plus(elements(&ins[3]).saturating_mul(2))
}

/// Returns the operations of soft cap and bias per pair.
fn score(rule: &ScoreRule) -> u64 {
    let cap = if rule.soft_cap.is_some() { Work::SPECIAL + 2 } else { 0 };
    cap + u64::from(rule.bias)
}

/// Returns the extent of the last dim, limited so that a small multiple of it does not overflow.
fn width(of: &Meta) -> u64 {
    of.shape.last().map_or(0, |&n| n as u64).min(u64::MAX >> 5)
}

/// Returns the operations of dropout per pair: a random word and a product.
fn dropout(p: Bits) -> u64 {
    if p.0 > 0.0 { Work::SPECIAL + 1 } else { 0 }
}

/// Returns the number of pairs of a query and a key in its window, in all heads. The query i has position `offset + i`.
fn pairs(ins: &[Meta], rule: &ScoreRule, offset: usize) -> u64 {
    let q = &ins[0].shape;
    let (offset, queries, keys) = (offset as u128, q[2] as u128, ins[1].shape[2] as u128);
    // The keys before the ends of all windows, and those before their starts.
    let ends = match rule.after {
        None => queries * keys,
        Some(after) => limited_sum(offset + after as u128 + 1, queries, keys),
    };
    let starts = match rule.before {
        None => 0,
        // Queries at positions up to `before` see the first key.
        Some(before) => {
            let all = (before as u128).saturating_sub(offset).min(queries);
            limited_sum((offset + all).saturating_sub(before as u128), queries - all, keys)
        }
    };
    let heads = (q[0] as u64).saturating_mul(q[1] as u64);
    u64::try_from(ends.saturating_sub(starts)).unwrap_or(u64::MAX).saturating_mul(heads)
}

/// Returns the sum of `min(first + i, most)` for i below `n`.
fn limited_sum(first: u128, n: u128, most: u128) -> u128 {
    let below = most.saturating_sub(first).min(n);
    first * below + below * below.saturating_sub(1) / 2 + (n - below) * most
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn pairs_are_counted_one_by_one() {
        for (queries, keys, offset) in [(5, 5, 0), (3, 9, 4), (7, 4, 0), (1, 1, 0), (0, 3, 0), (4, 0, 0)] {
            for before in [None, Some(0), Some(2), Some(20)] {
                for after in [None, Some(0), Some(1), Some(20)] {
                    let rule = ScoreRule { before, after, ..ScoreRule::BIDIRECTIONAL };
                    let ins = [queries, keys].map(|n| Meta::new(DType::F32, [2, 3, n, 4]));
                    let want: usize = (0..queries).map(|i| rule.span(offset + i, keys).len()).sum();
                    assert_eq!(
                        pairs(&ins, &rule, offset),
                        6 * want as u64,
                        "{queries} {keys} {offset} {rule:?}"
                    );
                }
            }
        }
    }
}
