//! Shapes and strides.

use std::fmt;
use std::ops::{Deref, DerefMut};

use serde::{Deserialize, Serialize, Serializer};
use smallvec::SmallVec;

use crate::error::{Error, Result};

/// A short list with one entry a dim; no allocation up to five dims.
pub type Dims = SmallVec<[usize; 5]>;

/// The extents of a tensor, outermost first. Written `[64, 128]`; `[]` is a single element.
#[derive(Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(from = "Vec<usize>")]
pub struct Shape(Dims);

impl Shape {
    /// The number of elements, 1 for `[]`.
    pub fn numel(&self) -> usize {
        self.0.iter().product()
    }

    /// The number of elements.
    ///
    /// # Errors
    /// Refuses, in the name of `verb`, more than 2^63 - 1.
    pub fn checked_numel(&self, verb: &str) -> Result<usize> {
        self.0
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .filter(|&n| n <= isize::MAX as usize)
            .ok_or_else(|| {
                Error::invalid(
                    verb,
                    "the number of elements overflows",
                    self.to_string(),
                    "use smaller extents",
                )
            })
    }

    /// Row-major strides, in elements.
    pub fn strides(&self) -> Dims {
        let mut strides = Dims::from_elem(1, self.len());
        for d in (1..self.len()).rev() {
            strides[d - 1] = strides[d] * self.0[d].max(1);
        }
        strides
    }

    /// `dim` counted from the front, where a negative one counts from the back.
    ///
    /// # Errors
    /// Refuses, in the name of `verb`, a dim that is not there.
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

    /// The shape that both broadcast to by NumPy's rule.
    ///
    /// # Errors
    /// Refuses, in the name of `verb`, extents that differ where neither is 1.
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
                    "extents neither agree nor are 1",
                    format!("{self}, {other}"),
                    "reshape or expand one of them",
                )),
            })
            .collect()
    }
}

/// As a list of its extents.
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
    fn from(dims: [usize; N]) -> Self {
        Shape(dims.iter().copied().collect())
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Shape(dims.iter().copied().collect())
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
        // Element by element: `SmallVec`'s own collecting is compiled again for every iterator, and is long.
        let mut shape = Shape::default();
        dims.into_iter().for_each(|n| shape.0.push(n));
        shape
    }
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
