//! The shape of a tensor, and strides.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Deref, DerefMut};

use serde::{Deserialize, Serialize, Serializer};

use super::{DType, Dims, short_list};
use crate::error::{Error, Result};

/// The extent of each dim of a tensor, outermost first. It is written `[64, 128]`; a tensor of shape `[]` has one
/// element.
///
/// A shape is made from an array, a slice, a `Vec` or an iterator, and is used as a slice of extents.
///
/// ```
/// use isoshard::tensor::Shape;
/// let shape = Shape::from([64, 128]);
/// assert_eq!((shape[1], shape.len(), shape.numel()), (128, 2, 8192));
/// assert_eq!(shape.to_string(), "[64, 128]");
/// let halved: Shape = shape.iter().map(|n| n / 2).collect();
/// assert_eq!(halved, Shape::from(vec![32, 64]));
/// ```
#[derive(Eq, Default, Deserialize)]
#[serde(from = "Vec<usize>")]
pub struct Shape(Dims);

/// Compares the few extents one by one: the call that compares bytes takes longer.
impl PartialEq for Shape {
    #[inline]
    fn eq(&self, other: &Shape) -> bool {
        self.len() == other.len() && self.iter().zip(other.iter()).all(|(n, m)| n == m)
    }
}

impl Hash for Shape {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

/// Returns a copy of a list. A list that has no allocation is copied whole, which is faster than number by number.
#[inline]
pub(super) fn copy_of(dims: &Dims) -> Dims {
    if dims.spilled() {
        return Dims::from_slice(dims);
    }
    // SAFETY: the list owns nothing, so its bytes are a second list.
    unsafe { std::ptr::read(dims) }
}

impl Clone for Shape {
    #[inline]
    fn clone(&self) -> Shape {
        Shape(copy_of(&self.0))
    }
}

impl Shape {
    /// Returns the number of elements, the product of the extents: 1 for `[]`, and `usize::MAX` for a product that
    /// overflows. No tensor has such a shape.
    ///
    /// ```
    /// use isoshard::tensor::Shape;
    /// assert_eq!((Shape::from([3, 5]).numel(), Shape::from([3, 0]).numel(), Shape::from([]).numel()), (15, 0, 1));
    /// assert_eq!(Shape::from([1 << 40, 1 << 40]).numel(), usize::MAX);
    /// ```
    pub fn numel(&self) -> usize {
        self.0.iter().fold(1, |numel: usize, &n| numel.saturating_mul(n))
    }

    /// Returns the number of elements of a shape that may be too large.
    ///
    /// # Errors
    /// Returns an error that names `verb` if there are more than 2^63 - 1 elements, or would be if dims of extent 0 had
    /// extent 1.
    pub(crate) fn checked_numel(&self, verb: &str) -> Result<usize> {
        // Extents of 0 count as 1, so that no product of some of the extents overflows either.
        let (mut all, mut is_empty) = (1usize, false);
        for &n in &self.0 {
            (all, is_empty) = (all.saturating_mul(n.max(1)), is_empty | (n == 0));
        }
        if all > isize::MAX as usize {
            let rule = "the number of elements overflows";
            return Err(Error::invalid(verb, rule, self.to_string(), "use smaller extents"));
        }
        Ok(if is_empty { 0 } else { all })
    }

    /// Returns the number of bytes of a tensor of this shape.
    ///
    /// # Errors
    /// Returns an error that names `verb` if [`Shape::checked_numel`] does, or if there are more than 2^63 - 1 bytes.
    pub(crate) fn checked_bytes(&self, verb: &str, dtype: DType) -> Result<usize> {
        let bytes = self.checked_numel(verb)?.checked_mul(dtype.size_bytes());
        bytes.filter(|&n| n <= isize::MAX as usize).ok_or_else(|| {
            let rule = "the number of bytes overflows";
            Error::invalid(verb, rule, format!("{dtype}{self}"), "use smaller extents")
        })
    }

    /// Returns the strides of a row-major tensor of this shape, in elements; `usize::MAX` for one that overflows.
    ///
    /// ```
    /// use isoshard::tensor::Shape;
    /// assert_eq!(Shape::from([2, 3, 4]).strides()[..], [12, 4, 1]);
    /// ```
    pub fn strides(&self) -> Dims {
        let mut strides = Dims::from_elem(1, self.len());
        for d in (1..self.len()).rev() {
            strides[d - 1] = strides[d].saturating_mul(self.0[d].max(1));
        }
        strides
    }

    /// Returns the index of `dim`; a negative `dim` counts from the last one, which is -1.
    ///
    /// ```
    /// use isoshard::tensor::Shape;
    /// let shape = Shape::from([2, 3, 4]);
    /// assert_eq!((shape.dim("sum", 0)?, shape.dim("sum", -1)?), (0, 2));
    /// assert!(shape.dim("sum", 3).is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error that names `verb` if there is no such dim.
    pub fn dim(&self, verb: &str, dim: isize) -> Result<usize> {
        let n = self.len() as isize;
        let d = if dim < 0 { dim + n } else { dim };
        if (0..n).contains(&d) {
            return Ok(d as usize);
        }
        Err(Error::invalid(
            verb,
            "no such dim",
            format!("dim {dim} of {self}"),
            format!("dims are {} to {}", -n, n - 1),
        ))
    }

    /// Returns the shape that both shapes broadcast to by NumPy's rule.
    ///
    /// ```
    /// use isoshard::tensor::Shape;
    /// let (x, bias) = (Shape::from([2, 1, 4]), Shape::from([3, 1]));
    /// assert_eq!(x.broadcast("add", &bias)?[..], [2, 3, 4]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error that names `verb` if two extents of a dim differ and neither is 1.
    pub fn broadcast(&self, verb: &str, other: &Shape) -> Result<Shape> {
        let n = self.len().max(other.len());
        let at = |s: &Shape, d: usize| if d + s.len() >= n { s[d + s.len() - n] } else { 1 };
        (0..n)
            .map(|d| match (at(self, d), at(other, d)) {
                (a, b) if a == b => Ok(a),
                (1, b) => Ok(b),
                (a, 1) => Ok(a),
                _ => Err(Error::invalid(
                    verb,
                    "two extents of a dim differ and neither is 1",
                    format!("{self}, {other}"),
                    "reshape or expand one of them",
                )),
            })
            .collect()
    }
}

/// Written as the list of extents.
impl Serialize for Shape {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter())
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl DerefMut for Shape {
    fn deref_mut(&mut self) -> &mut [usize] {
        &mut self.0
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    #[inline]
    fn from(dims: [usize; N]) -> Self {
        Shape(Dims::from_slice(&dims))
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Shape(Dims::from_slice(dims))
    }
}

impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Self {
        Shape(dims.into())
    }
}

impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Self {
        shape.clone()
    }
}

impl From<Dims> for Shape {
    fn from(dims: Dims) -> Self {
        Shape(dims)
    }
}

impl FromIterator<usize> for Shape {
    fn from_iter<I: IntoIterator<Item = usize>>(dims: I) -> Self {
        Shape(short_list(dims))
    }
}

/// Returns `[n, shape...]`, or `shape` if `n` is 1.
pub(crate) fn stacked(n: usize, shape: &Shape) -> Shape {
    if n == 1 { shape.clone() } else { std::iter::once(n).chain(shape.iter().copied()).collect() }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0.as_slice())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0.as_slice())
    }
}
