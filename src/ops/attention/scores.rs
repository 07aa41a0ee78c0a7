//! The treatment of scores before the softmax: the keys that a query sees, the soft cap, and optional operands.

#[cfg(test)]
use std::ops::Range;

use isoshard_kernels::attention::{BiasSum, WindowRule};

use crate::error::{Error, Result};
use crate::ops::{Bits, Meta, list};
use crate::tensor::{DType, Tensor};

/// The treatment of attention's scores between their product and the softmax. A score becomes `c tanh(s / c)` if there
/// is a [soft cap](Self::soft_cap) c; then the bias is added; then keys that the query does not see are left out.
///
/// The query at position p sees the keys at positions `p - before` to `p + after`, as far as the mask and the document
/// numbers allow. A score of -inf also leaves a key out. A key that is left out is not multiplied by zero: it changes no
/// result, even if it is an infinity or a NaN. A query that sees no key has the result 0.
///
/// ```
/// use isoshard::ops::ScoreRule;
/// let window = ScoreRule { before: Some(1), ..ScoreRule::CAUSAL };
/// assert_eq!((window.before, window.after), (Some(1), Some(0)));
/// assert_eq!(ScoreRule::BIDIRECTIONAL.after, None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScoreRule {
    /// The number of keys before its own position that a query sees; `None` for all.
    pub before: Option<usize>,
    /// The number of keys after its own position that a query sees; `None` for all.
    pub after: Option<usize>,
    /// The bound of the scores' magnitude (Gemma Team, *Gemma 2*, 2024).
    pub soft_cap: Option<Bits>,
    /// True if an operand `[B or 1, H or 1, Tq or 1, Tk or 1]` of the scores' dtype is added to the scores.
    pub bias: bool,
    /// True if a bool operand `[B or 1, H or 1, Tq or 1, Tk or 1]` is true if the query sees the key.
    pub mask: bool,
    /// True if two i64 operands, `[B or 1, Tq]` and `[B or 1, Tk]`, give the number of each query's and each key's
    /// document. A query sees the keys of its own document.
    pub documents: bool,
}

impl ScoreRule {
    /// Each query sees the keys up to its own position.
    pub const CAUSAL: ScoreRule = ScoreRule { after: Some(0), ..ScoreRule::BIDIRECTIONAL };
    /// Each query sees all keys.
    pub const BIDIRECTIONAL: ScoreRule =
        ScoreRule { before: None, after: None, soft_cap: None, bias: false, mask: false, documents: false };

    /// Returns the keys, of `keys` in all, that the window of the query at `position` contains.
    #[cfg(test)]
    pub(super) fn span(&self, position: usize, keys: usize) -> Range<usize> {
        self.window().span(position, keys)
    }

    /// Returns the window of keys that a query sees.
    #[inline]
    pub(super) fn window(&self) -> WindowRule {
        WindowRule { before: self.before, after: self.after }
    }

    /// Returns true if positions decide which keys a query sees.
    pub(super) fn has_window(&self) -> bool {
        self.before.is_some() || self.after.is_some()
    }

    /// Returns the number of optional operands.
    pub(super) fn operands_len(&self) -> usize {
        usize::from(self.bias) + usize::from(self.mask) + 2 * usize::from(self.documents)
    }

    /// Returns the optional operands, which `ins` holds in the order of the fields.
    pub(super) fn operands<'a>(&self, ins: &'a [Tensor]) -> ScoreOperands<'a> {
        let mut ins = ins.iter();
        let mut next = || ins.next().expect("infer counted the operands");
        ScoreOperands {
            bias: self.bias.then(&mut next),
            mask: self.mask.then(&mut next),
            documents: self.documents.then(|| [next(), next()]),
        }
    }

    /// Refuses a soft cap that is not positive, and optional operands `extra` that do not fit q and k.
    pub(super) fn expect_operands(&self, verb: &str, [q, k]: [&Meta; 2], extra: &[Meta]) -> Result<()> {
        if let Some(Bits(cap)) = self.soft_cap
            && !(cap > 0.0 && cap.is_finite())
        {
            return Err(Error::invalid(verb, "the soft cap is not positive and finite", cap.to_string(), ""));
        }
        let shape = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]];
        let fits = |given: &[usize], want: &[usize]| {
            given.len() == want.len() && given.iter().zip(want).all(|(&g, &w)| g == w || g == 1)
        };
        let refused = |name: &str, dtype: DType, want: &[usize], given: &Meta| {
            let rule = format!("wants the {name} {dtype}{want:?}, in which any extent may be 1");
            Err(Error::invalid(
                verb,
                rule,
                list(std::slice::from_ref(given)),
                "cast it, or make its dims fit",
            ))
        };
        let mut extra = extra.iter();
        let mut next = || extra.next().expect("the operands are counted");
        if self.bias {
            let bias = next();
            if bias.dtype != q.dtype || !fits(&bias.shape, &shape) {
                return refused("bias", q.dtype, &shape, bias);
            }
        }
        if self.mask {
            let mask = next();
            if mask.dtype != DType::Bool || !fits(&mask.shape, &shape) {
                return refused("mask", DType::Bool, &shape, mask);
            }
        }
        if self.documents {
            for (name, len) in [("queries' documents", shape[2]), ("keys' documents", shape[3])] {
                let (given, want) = (next(), [shape[0], len]);
                let whole = given.shape.last() == Some(&len);
                if given.dtype != DType::I64 || !fits(&given.shape, &want) || !whole {
                    let rule = format!("wants the {name} i64{want:?}, in which the first extent may be 1");
                    return Err(Error::invalid(verb, rule, list(std::slice::from_ref(given)), ""));
                }
            }
        }
        Ok(())
    }
}

/// The optional operands of attention's scores, which [`ScoreRule`] describes.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScoreOperands<'a> {
    /// The tensor that is added to the scores.
    pub bias: Option<&'a Tensor>,
    /// The tensor that is true if the query sees the key.
    pub mask: Option<&'a Tensor>,
    /// The document numbers of queries and of keys.
    pub documents: Option<[&'a Tensor; 2]>,
}

/// Returns the sum that the gradient of a bias is.
pub(super) fn bias_sum([q, k]: [&Tensor; 2], bias: &Tensor) -> BiasSum {
    let shape = [q.shape()[0], q.shape()[1], q.shape()[2], k.shape()[2]];
    BiasSum { shape, bias: [0, 1, 2, 3].map(|d| bias.shape()[d]) }
}
