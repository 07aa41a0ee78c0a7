//! Dtype and global shape of an operand or result.

use std::fmt;

use smallvec::SmallVec;

use crate::tensor::{DType, Shape, Tensor};

/// The dtype and global shape of an operand or result. They are equal on all ranks.
///
/// ```
/// use isoshard::ops::Meta;
/// use isoshard::tensor::DType;
/// let meta = Meta::new(DType::F32, [64, 128]);
/// assert_eq!(meta.to_string(), "f32[64, 128]");
/// assert_eq!(meta.len_bytes(), 4 * 64 * 128);
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Meta {
    /// The element type.
    pub dtype: DType,
    /// The global extents.
    pub shape: Shape,
}

/// A short list of [`Meta`], one per operand or result.
pub type Metas = SmallVec<[Meta; 3]>;

impl Meta {
    /// Creates it from a dtype and a global shape.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Meta {
        Meta { dtype, shape: shape.into() }
    }

    /// Returns the dtype and shape of a local tensor, taken as a global one.
    ///
    /// ```
    /// use isoshard::{ops::Meta, tensor::Tensor};
    /// assert_eq!(Meta::of(&Tensor::from_vec(vec![1i64, 2], [2])?).to_string(), "i64[2]");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn of(t: &Tensor) -> Meta {
        Meta { dtype: t.dtype(), shape: t.shape().clone() }
    }

    /// Returns the number of bytes of the global tensor, or `usize::MAX` if it is larger.
    pub fn len_bytes(&self) -> usize {
        self.shape.numel().saturating_mul(self.dtype.size_bytes())
    }
}

/// Writes `f32[64, 128]`.
impl fmt::Display for Meta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

impl fmt::Debug for Meta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Writes several operands for an error text: `f32[4], f32[]`.
pub(crate) fn list(ins: &[Meta]) -> String {
    ins.iter().map(Meta::to_string).collect::<Vec<_>>().join(", ")
}

/// Returns the dtype in which sums of `dtype` are stored.
pub(crate) fn accumulator(dtype: DType) -> DType {
    if dtype.is_half() { DType::F32 } else { dtype }
}
