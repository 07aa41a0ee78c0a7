//! The attributes of operators that are named from below: an operator's derivative, and of two operators that are each
//! other's derivative, one.
//!
//! A derivative reads what its operator says of shapes and samples, and the operator's own derivative applies it. So that
//! their files do not name each other, the attributes stand here, below both; the records stand in the operators' files.

use super::record::{Bits, Unkeyed};
use crate::rng::Draw;
use crate::tensor::Shape;

/// (q, k, v, o, lse, do) -> (dq, dk, dv), each of its operand's shape. Dao et al., *FlashAttention*, 2022, appendix B.
///
/// dk and dv are sums over the heads of a group, then over the queries, along the tree over both ranges; no element of
/// them is -0.
///
/// Missing: its own derivative; asking for it is refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AttentionGrad {
    /// As in the operator.
    pub scale: Bits,
    /// As in the operator.
    pub p: Bits,
    /// As in the operator.
    pub q_offset: Option<usize>,
    /// The operator's own: the mask is made anew.
    pub draw: Unkeyed<Draw>,
}

/// `dy * (exp(logits - m) / s - onehot(target))`: operands as for `cross_entropy`, then the loss's gradient `dy` `[..]`.
///
/// Missing: its own derivative; asking for it is refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CrossEntropyGrad;

/// Zeros `[rows, C]`, with `dy[i]` (`[.., C]`) added to row `index[i]` (i64 `[..]`) for each `i`, along the summation
/// tree over the index's dims.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EmbeddingGrad {
    /// The number of rows of the table.
    pub rows: usize,
}

/// Repeats the operand to `shape` by NumPy's rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Expand {
    /// The result's shape.
    pub shape: Shape,
}

/// (dy, x, w, mean, rstd) -> (dx, dw[, db]), each of its operand's shape.
///
/// Missing: its own derivative; asking for it is refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerNormGrad {
    /// True if there is a result db.
    pub bias: bool,
}

/// The operand with zeros around it along one dim.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pad {
    /// The dim.
    pub dim: usize,
    /// Zeros before it.
    pub before: usize,
    /// Zeros after it.
    pub after: usize,
}

/// Zeros, `extent` of them along `dim`, with `src[.., k, ..]` added at index `index[.., k, ..]` (i64) for each `k`,
/// along the summation tree over `k`; operands (index, src) of equal shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ScatterAdd {
    /// The dim.
    pub dim: usize,
    /// The result's extent along it.
    pub extent: usize,
}

/// `y * (dy - sum(y * dy))` along `dim`, from a softmax's result `y` and its gradient `dy`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SoftmaxGrad {
    /// The dim.
    pub dim: usize,
}
