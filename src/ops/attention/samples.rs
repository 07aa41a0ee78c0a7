//! Attributes and operands of samples of attention and of its derivatives.

use super::scores::ScoreRule;
use crate::ops::{Bits, Input, Unkeyed};
use crate::rng::{Draw, Generator};

/// Returns the attributes of samples: scale, dropout probability and draw.
pub(super) fn sample_attributes(p: f64) -> (Bits, Bits, Unkeyed<Draw>) {
    (Bits(0.125), Bits(p), Unkeyed(Generator::new(5).next_draw()))
}

/// Returns rules with all kinds of optional operands, and these operands for q and k of samples.
pub(super) fn sample_rules(q: [usize; 4], k: [usize; 4]) -> [(ScoreRule, Vec<Input>); 2] {
    let bias = Input::ints([1, q[1], q[2], k[2]]);
    let mask = Input::bools([q[0], 1, 1, k[2]]);
    let documents = [Input::index([q[0], q[2]], 2), Input::index([1, k[2]], 2)];
    let biased = ScoreRule { bias: true, mask: true, ..ScoreRule::BIDIRECTIONAL };
    let packed = ScoreRule {
        before: Some(2),
        after: Some(1),
        soft_cap: Some(Bits(1.5)),
        documents: true,
        ..ScoreRule::BIDIRECTIONAL
    };
    [(biased, vec![bias, mask]), (packed, documents.to_vec())]
}

/// The shapes of q and k, the rule and the optional operands of samples with grouped heads and scores of every kind:
/// a soft cap, then a bias per batch entry and key, and a mask per head.
pub(super) fn grouped_sample() -> ([[usize; 4]; 2], (ScoreRule, Vec<Input>)) {
    let (q, k) = ([2, 4, 3, 2], [2, 2, 5, 2]);
    let rule = ScoreRule { bias: true, mask: true, soft_cap: Some(Bits(1.5)), ..ScoreRule::CAUSAL };
    ([q, k], (rule, vec![Input::ints([2, 1, 1, 5]), Input::bools([1, 4, 3, 5])]))
}
