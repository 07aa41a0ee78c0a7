//! The facts of an operand that every rank knows.

use std::fmt;

use smallvec::SmallVec;

use crate::tensor::{DType, Shape, Tensor};

/// The facts of an operand that every rank knows: its dtype and global shape.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Meta {
    /// The element type.
    pub dtype: DType,
    /// The global extents.
    pub shape: Shape,
}

/// A few [`Meta`]s, one an operand or a result.
pub type Metas = SmallVec<[Meta; 3]>;

impl Meta {
    /// A dtype and a shape.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Meta {
        Meta { dtype, shape: shape.into() }
    }

    /// The facts of a whole tensor.
    pub fn of(t: &Tensor) -> Meta {
        Meta { dtype: t.dtype(), shape: t.shape().clone() }
    }

    /// The number of bytes of the whole.
    pub fn len_bytes(&self) -> usize {
        self.shape.numel() * self.dtype.size_bytes()
    }
}

/// The notation: `f32[64, 128]`.
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

/// Several operands in the notation, for errors.
pub(crate) fn list(ins: &[Meta]) -> String {
    ins.iter().map(Meta::to_string).collect::<Vec<_>>().join(", ")
}
