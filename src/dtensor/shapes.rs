//! Operators that change the shape alone, as methods: views where strides and layouts allow.
//!
//! A negative dim counts from the back. An operator communicates nothing where a rank's part of the result lies in its
//! part of the operand, else the moves that its plan found cheapest.

use super::tensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{Cat, Expand, Permute, Reshape, Slice, Split};
use crate::tensor::Shape;

/// Shapes.
impl DTensor {
    /// The same elements, in row-major order, under another shape.
    ///
    /// # Errors
    /// Refuses a shape with another number of elements.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<DTensor> {
        DTensor::apply_one(&Reshape { shape: shape.into() }, &[self])
    }

    /// The dims in another order: dim `d` of the result is dim `order[d]` of this.
    ///
    /// # Errors
    /// Refuses what is not a permutation.
    pub fn permute(&self, order: &[usize]) -> Result<DTensor> {
        DTensor::apply_one(&Permute { order: order.iter().copied().collect() }, &[self])
    }

    /// Two dims swapped.
    ///
    /// # Errors
    /// Refuses dims that are not there.
    pub fn transpose(&self, a: isize, b: isize) -> Result<DTensor> {
        let (a, b) = (self.shape().dim("transpose", a)?, self.shape().dim("transpose", b)?);
        DTensor::apply_one(&Permute::swap(self.shape().len(), a, b), &[self])
    }

    /// Dims of extent 1, and new leading dims, repeated to `shape` without copying.
    ///
    /// # Errors
    /// Refuses a shape this one does not broadcast to.
    pub fn expand(&self, shape: impl Into<Shape>) -> Result<DTensor> {
        let shape = shape.into();
        if shape == *self.shape() { Ok(self.clone()) } else { DTensor::apply_one(&Expand { shape }, &[self]) }
    }

    /// A new dim of extent 1 before `dim`.
    ///
    /// # Errors
    /// Refuses a `dim` beyond the last.
    pub fn unsqueeze(&self, dim: usize) -> Result<DTensor> {
        if dim > self.shape().len() {
            return Err(Error::invalid(
                "unsqueeze",
                "no such dim",
                format!("dim {dim} of {}", self.spec()),
                "",
            ));
        }
        let mut shape = self.shape().to_vec();
        shape.insert(dim, 1);
        self.reshape(shape)
    }

    /// A dim of extent 1 removed.
    ///
    /// # Errors
    /// Refuses a dim that is not there or has another extent.
    pub fn squeeze(&self, dim: isize) -> Result<DTensor> {
        let dim = self.shape().dim("squeeze", dim)?;
        let mut shape = self.shape().to_vec();
        if shape.remove(dim) != 1 {
            return Err(Error::invalid(
                "squeeze",
                "the dim's extent is not 1",
                format!("dim {dim} of {}", self.spec()),
                "",
            ));
        }
        self.reshape(shape)
    }

    /// The indices `start..start + len` of `dim`.
    ///
    /// # Errors
    /// Refuses a range that leaves the tensor.
    pub fn slice(&self, dim: isize, start: usize, len: usize) -> Result<DTensor> {
        DTensor::apply_one(&Slice { dim: self.shape().dim("slice", dim)?, start, len }, &[self])
    }

    /// This tensor cut along `dim` into pieces of these lengths.
    ///
    /// # Errors
    /// Refuses lengths that do not add up to the dim's extent.
    pub fn split(&self, dim: isize, lens: &[usize]) -> Result<Vec<DTensor>> {
        let op = Split { dim: self.shape().dim("split", dim)?, lens: lens.iter().copied().collect() };
        Ok(DTensor::apply(&op, &[self])?.into())
    }

    /// Tensors laid end to end along `dim`.
    ///
    /// # Errors
    /// Refuses an empty list, and dtypes or other extents that differ.
    pub fn cat(parts: &[&DTensor], dim: isize) -> Result<DTensor> {
        let first = parts.first().ok_or_else(|| Error::invalid("cat", "wants operands", "none", ""))?;
        DTensor::apply_one(&Cat { dim: first.shape().dim("cat", dim)? }, parts)
    }
}
