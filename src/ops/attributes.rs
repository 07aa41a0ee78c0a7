//! Attributes of operators that are derivatives of other operators.
//!
//! An operator and its derivative use each other: the operator's `vjp` applies the derivative, and the derivative calls
//! the operator's shape checks. To keep their files from importing each other, the derivative's attributes are defined
//! here, and its `impl Op` is in the operator's folder.

use super::attention::scores::ScoreRule;
use super::moe::group_sizes::GroupSizes;
use super::record::{Bits, Unkeyed};
use crate::rng::Draw;
use crate::tensor::Shape;

/// The derivative of [`Attention`](super::Attention) by the bias of its scores:
/// `(q, k, v, o, lse, do, bias, ..) -> dbias`, where `..` are the other operands that the [`ScoreRule`] names.
///
/// dbias is a sum over the dims along which the bias repeats, along the reduction tree over them, and 0 if the bias
/// repeats along the keys. Its own derivative treats o and lse as functions of the other operands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AttentionBiasGrad {
    /// The factor of the products, that of the forward call.
    pub scale: Bits,
    /// The probability with which the forward call drops a probability.
    pub p: Bits,
    /// The position of query 0 in the forward call.
    pub q_offset: Option<usize>,
    /// The draw of the forward call, from which the dropout mask is computed again.
    pub draw: Unkeyed<Draw>,
    /// The forward call's treatment of the scores.
    pub rule: ScoreRule,
}

/// The derivative of [`Attention`](super::Attention): `(q, k, v, o, lse, do, ..) -> (dq, dk, dv)`, each with the shape
/// of its operand; `..` are the operands that the [`ScoreRule`] names. Dao et al., *FlashAttention*, 2022, appendix B.
///
/// dk and dv are sums over the query heads that share a key head, then over the queries, along the reduction tree over
/// both ranges. None of their elements is -0. Its own derivative treats o and lse as functions of the other operands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AttentionGrad {
    /// The factor of the products, that of the forward call.
    pub scale: Bits,
    /// The probability with which the forward call drops a probability.
    pub p: Bits,
    /// The position of query 0 in the forward call.
    pub q_offset: Option<usize>,
    /// The draw of the forward call, from which the dropout mask is computed again.
    pub draw: Unkeyed<Draw>,
    /// The forward call's treatment of the scores.
    pub rule: ScoreRule,
}

/// The attributes that [`CrossEntropy`](super::CrossEntropy) and its derivative share. The default is the plain loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CrossEntropyTerms {
    /// The target of rows whose loss and gradient are 0. It need not be a class.
    pub ignore_index: Option<i64>,
    /// The factor of the negative log-likelihood; 0 leaves it out.
    pub nll_factor: Bits,
    /// The factor of the squared logarithm of the softmax's denominator (*z-loss*); 0 leaves it out.
    pub z_factor: Bits,
}

impl Default for CrossEntropyTerms {
    fn default() -> CrossEntropyTerms {
        CrossEntropyTerms { ignore_index: None, nll_factor: Bits(1.0), z_factor: Bits(0.0) }
    }
}

/// The derivative of [`CrossEntropy`](super::CrossEntropy) with respect to the logits:
/// `(logits, target, m, s, dy) -> dy * ((a + 2 z lse) * exp(logits - m) / s - a * onehot(target))`, where `dy` `[..]`
/// is the loss's gradient, `a` and `z` are the factors of the [terms](CrossEntropyTerms), and `lse = ln(s) + m`. Its own
/// derivative treats m and s as functions of the logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CrossEntropyGrad {
    /// The forward call's ignored rows and factors.
    pub terms: CrossEntropyTerms,
}

/// The derivative of [`Embedding`](super::Embedding) with respect to the table: `(index, dy) -> dtable`.
///
/// The result `[rows, C]` starts as zeros; `dy[i]` (dy is `[.., C]`) is added to row `index[i]` (i64 `[..]`) for each
/// `i`, along the reduction tree over the index's dims.
///
/// ```
/// use isoshard::ops::{EmbeddingGrad, eval_whole};
/// use isoshard::tensor::Tensor;
/// let index = Tensor::from_vec(vec![2i64, 0, 2], [3])?;
/// let dy = Tensor::from_vec(vec![1.0, 10.0, 100.0], [3, 1])?;
/// let dtable = eval_whole(&EmbeddingGrad { rows: 3 }, &[index, dy])?.remove(0);
/// assert_eq!(dtable.to_f64_vec(), [10.0, 0.0, 101.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EmbeddingGrad {
    /// The number of rows of the table.
    pub rows: usize,
}

/// Repeats the operand to `shape` by NumPy's broadcasting rule, as a view:
/// [`DTensor::expand`](crate::dtensor::DTensor::expand).
///
/// ```
/// use isoshard::ops::{Expand, eval_whole};
/// use isoshard::tensor::Tensor;
/// let row = Tensor::from_vec(vec![1.0, 2.0], [2])?;
/// let twice = eval_whole(&Expand { shape: [2, 2].into() }, &[row])?.remove(0);
/// assert_eq!(twice.to_f64_vec(), [1.0, 2.0, 1.0, 2.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Expand {
    /// The result's shape.
    pub shape: Shape,
}

/// The derivative of [`GroupedMatmul`](super::GroupedMatmul) with respect to the matrices: `(x, dy) -> dw`.
///
/// `x` is `[.., rows, k]`, `dy` `[.., rows, n]` and the result `[experts, k, n]`: per expert, the sum of
/// `x[row] dy[row]ᵀ` over its rows. The sum follows the reduction tree over the batch, and within a batch entry the tree
/// over the expert's rows. An expert without rows has zeros.
///
/// ```
/// use isoshard::{ops::{GroupSizes, GroupedMatmulGrad, Unkeyed, eval_whole}, tensor::Tensor};
/// let (x, dy) = (Tensor::from_vec(vec![1.0, 2.0, 3.0], [3, 1])?, Tensor::from_vec(vec![1.0, 10.0, 10.0], [3, 1])?);
/// let op = GroupedMatmulGrad { experts: 3, sizes: Unkeyed(GroupSizes::new(3, [1, 2, 0])?) };
/// assert_eq!(eval_whole(&op, &[x, dy])?[0].to_f64_vec(), [1.0, 50.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupedMatmulGrad {
    /// The number of experts, an extent of the result.
    pub experts: usize,
    /// The number of rows of each expert. Plans do not depend on it.
    pub sizes: Unkeyed<GroupSizes>,
}

/// The derivative of [`LayerNorm`](super::LayerNorm): `(dy, x[, w], mean, rstd) -> (dx[, dw[, db]])`, each with the shape
/// of its operand.
///
/// Its own derivative treats mean and rstd as functions of x.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerNormGrad {
    /// The number added to the variance in the forward call. Only the derivative of this operator uses it.
    pub eps: Bits,
    /// True if the layer norm has a weight, so that there is an operand w and a result dw.
    pub weight: bool,
    /// True if the layer norm has a bias, so that there is a result db.
    pub bias: bool,
}

/// Adds zeros before and after the operand along one dim. The derivative of [`Slice`](super::Slice).
///
/// ```
/// use isoshard::ops::{Pad, eval_whole};
/// use isoshard::tensor::Tensor;
/// let x = Tensor::from_vec(vec![1.0, 2.0], [2])?;
/// let y = eval_whole(&Pad { dim: 0, before: 1, after: 2 }, &[x])?.remove(0);
/// assert_eq!(y.to_f64_vec(), [0.0, 1.0, 2.0, 0.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pad {
    /// The dim.
    pub dim: usize,
    /// The number of zeros before the operand.
    pub before: usize,
    /// The number of zeros after the operand.
    pub after: usize,
}

/// Copies rows to slots: `(x, slot) -> y`, where `x` is `[.., tokens, choices, width]`, `slot` (i64)
/// `[.., tokens, choices]`, and `y[.., slot[.., t, k], :] = x[.., t, k, :]` `[.., slots, width]`. At most one leading
/// dim. The derivative of [`UnpermuteTokens`](super::UnpermuteTokens); applied by
/// [`DTensor::permute_tokens`](crate::dtensor::DTensor::permute_tokens).
///
/// Two rows of a batch entry with the same slot are an error on every mesh and device: each rank has all slots of its
/// batch entries and compares them. A row with slot -1 is dropped. A slot without a row is -0, which a sum ignores. If
/// the tokens are sharded, the result is a partial sum.
///
/// ```
/// use isoshard::{ops::{PermuteTokens, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0], [3, 1, 1])?;
/// let slot = Tensor::from_vec(vec![3i64, -1, 0], [3, 1])?;
/// assert_eq!(eval_whole(&PermuteTokens { slots: 4 }, &[x, slot])?[0].to_f64_vec(), [3.0, 0.0, 0.0, 1.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PermuteTokens {
    /// The number of slots of a batch entry.
    pub slots: usize,
}

/// Adds elements into a tensor of zeros by index: [`DTensor::scatter_add`](crate::dtensor::DTensor::scatter_add), and
/// the derivative of [`Gather`](super::Gather).
///
/// Operands `(index, src)` have equal shape, index is i64. The result has extent `extent` along `dim`; `src[.., k, ..]`
/// is added at index `index[.., k, ..]` for each `k`, along the reduction tree over `k`. Sums of i64 and i32 keep the
/// dtype and wrap.
///
/// ```
/// use isoshard::ops::{ScatterAdd, eval_whole};
/// use isoshard::tensor::Tensor;
/// let index = Tensor::from_vec(vec![1i64, 1, 0], [3])?;
/// let src = Tensor::from_vec(vec![1.0, 2.0, 4.0], [3])?;
/// let y = eval_whole(&ScatterAdd { dim: 0, extent: 3 }, &[index, src])?.remove(0);
/// assert_eq!(y.to_f64_vec(), [4.0, 3.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ScatterAdd {
    /// The dim.
    pub dim: usize,
    /// The result's extent along `dim`.
    pub extent: usize,
}

/// The derivative of [`SoftCrossEntropy`](super::SoftCrossEntropy) with respect to the logits:
/// `(logits, q, m, s, dy[, sum]) -> dy * (sum * exp(logits - m) / s - q)`, where `sum` `[.., 1]` is the sum of each row
/// of `q`. It is an operand if the attribute does not give it. Its own derivative treats m and s as functions of the
/// logits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SoftCrossEntropyGrad {
    /// The sum of every row of `q`, or `None` if it is an operand.
    pub row_sum: Option<Bits>,
}

/// The derivative of [`Softmax`](super::Softmax): `(y, dy) -> y * (dy - sum(y * dy))` along `dim`, where `y` is the
/// softmax's result and `dy` its gradient.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SoftmaxGrad {
    /// The dim.
    pub dim: usize,
}
