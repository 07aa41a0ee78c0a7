//! Matrices over slices, with any strides. Every element of a [`MatRef`] and of a [`MatMut`] is inside its slice: the
//! constructors check this, and kernels rely on it.

use std::fmt;

/// A matrix over a slice, which begins with the slice's first element.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a, T> {
    data: &'a [T],
    shape: (usize, usize),
    strides: (usize, usize),
}

/// A writable matrix over a slice, in which no two elements coincide.
#[derive(Debug)]
pub struct MatMut<'a, T> {
    data: &'a mut [T],
    shape: (usize, usize),
    strides: (usize, usize),
}

/// The refusal of a matrix that its slice does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixFault {
    /// The broken rule.
    pub rule: &'static str,
    /// The shape, the strides and the slice's length.
    pub given: String,
}

impl fmt::Display for MatrixFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "matrix: {}; got {}", self.rule, self.given)
    }
}

impl<'a, T> MatRef<'a, T> {
    /// Returns the matrix of `shape` (rows, columns) that begins with the first element of `data`. `strides` are the
    /// distances from row to row and from column to column, in elements.
    ///
    /// ```
    /// use isoshard_kernels::MatRef;
    /// assert!(MatRef::new(&[1.0, 2.0, 3.0, 4.0], (2, 2), (2, 1)).is_ok());
    /// assert!(MatRef::new(&[1.0, 2.0, 3.0], (2, 2), (2, 1)).is_err());
    /// ```
    ///
    /// # Errors
    /// Returns an error if an element is outside `data`.
    #[inline]
    pub fn new(data: &'a [T], shape: (usize, usize), strides: (usize, usize)) -> Result<Self, MatrixFault> {
        if inside(data.len(), shape, strides) {
            Ok(MatRef { data, shape, strides })
        } else {
            Err(outside(data.len(), shape, strides))
        }
    }

    /// Returns the slice from the first element on.
    #[inline]
    pub fn data(&self) -> &'a [T] {
        self.data
    }

    /// Returns the numbers of rows and columns.
    #[inline]
    pub fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// Returns the distances from row to row and from column to column, in elements.
    #[inline]
    pub fn strides(&self) -> (usize, usize) {
        self.strides
    }

    /// Returns the transposed matrix, over the same slice.
    ///
    /// ```
    /// use isoshard_kernels::MatRef;
    /// let x = MatRef::new(&[1, 2, 3, 4, 5, 6], (2, 3), (3, 1))?.t();
    /// assert_eq!((x.shape(), x.strides()), ((3, 2), (1, 3)));
    /// # Ok::<(), isoshard_kernels::MatrixFault>(())
    /// ```
    #[inline]
    pub fn t(self) -> Self {
        let ((m, n), (rs, cs)) = (self.shape, self.strides);
        MatRef { data: self.data, shape: (n, m), strides: (cs, rs) }
    }

    /// Returns the matrix of the rows `start..start + len`.
    ///
    /// ```
    /// use isoshard_kernels::MatRef;
    /// let x = MatRef::new(&[1, 2, 3, 4, 5, 6], (3, 2), (2, 1))?.rows(1, 2);
    /// assert_eq!((x.shape(), x.row(0)), ((2, 2), &[3, 4][..]));
    /// # Ok::<(), isoshard_kernels::MatrixFault>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the matrix does not have them.
    pub fn rows(self, start: usize, len: usize) -> Self {
        let rows = self.shape.0;
        assert!(start <= rows && len <= rows - start, "rows {start}..{start}+{len} of {:?}", self.shape);
        // A start that rows follow is inside the slice, if there are columns.
        let at = start.saturating_mul(self.strides.0).min(self.data.len());
        MatRef { data: &self.data[at..], shape: (len, self.shape.1), ..self }
    }

    /// Returns row `i` of a matrix whose rows are contiguous.
    ///
    /// # Panics
    /// Panics if there is no such row, or if a contiguous row would exceed the slice.
    #[inline]
    pub fn row(self, i: usize) -> &'a [T] {
        &self.data[i.saturating_mul(self.strides.0).min(self.data.len())..][..self.shape.1]
    }

    /// Returns the matrix of the columns `start..start + len`.
    pub(super) fn cols(self, start: usize, len: usize) -> Self {
        self.t().rows(start, len).t()
    }

    /// Returns the same matrix over another slice of the same length.
    #[inline]
    pub(super) fn with_data<U>(self, data: &'a [U]) -> MatRef<'a, U> {
        assert_eq!(data.len(), self.data.len(), "the slice has the same length");
        MatRef { data, shape: self.shape, strides: self.strides }
    }
}

impl<'a, T> MatMut<'a, T> {
    /// Returns the matrix of `shape` (rows, columns) that begins with the first element of `data`, with strides as in
    /// [`MatRef::new`].
    ///
    /// ```
    /// use isoshard_kernels::{Gemm, MatMut, MatRef};
    /// let (a, b, mut c) = ([1.0f32, 2.0], [3.0, 4.0], [0.0; 4]);
    /// let (column, row) = (MatRef::new(&a, (2, 1), (1, 1))?, MatRef::new(&b, (1, 2), (2, 1))?);
    /// f32::product(1.0, column, row, 0.0, MatMut::new(&mut c, (2, 2), (2, 1))?);
    /// assert_eq!(c, [3.0, 4.0, 6.0, 8.0]);
    /// assert!(MatMut::new(&mut c, (2, 2), (1, 1)).is_err()); // two elements coincide
    /// # Ok::<(), isoshard_kernels::MatrixFault>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if an element is outside `data`, or if two elements would coincide. They do not if one stride
    /// is larger than the distance that the other dim covers.
    #[inline]
    pub fn new(
        data: &'a mut [T],
        shape: (usize, usize),
        strides: (usize, usize),
    ) -> Result<Self, MatrixFault> {
        if !inside(data.len(), shape, strides) {
            return Err(outside(data.len(), shape, strides));
        }
        if !distinct(shape, strides) {
            return Err(refused("elements to be written coincide", data.len(), shape, strides));
        }
        Ok(MatMut { data, shape, strides })
    }

    /// Returns the numbers of rows and columns.
    #[inline]
    pub fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// Returns the distances from row to row and from column to column, in elements.
    #[inline]
    pub fn strides(&self) -> (usize, usize) {
        self.strides
    }

    /// Returns a pointer to the first element.
    #[inline]
    pub(super) fn as_mut_ptr(&mut self) -> *mut T {
        self.data.as_mut_ptr()
    }
}

/// Returns true if every element is inside a slice of `len` elements.
fn inside(len: usize, (m, n): (usize, usize), (rs, cs): (usize, usize)) -> bool {
    let last = || (m - 1).checked_mul(rs)?.checked_add((n - 1).checked_mul(cs)?);
    m == 0 || n == 0 || last().is_some_and(|last| last < len)
}

/// Returns true if one dim's stride is larger than the distance that the other dim covers.
fn distinct((m, n): (usize, usize), (rs, cs): (usize, usize)) -> bool {
    let exceeds = |outer: usize, outer_len: usize, inner: usize, inner_len: usize| {
        let reach = inner.checked_mul(inner_len.saturating_sub(1));
        (inner > 0 || inner_len <= 1) && (outer_len <= 1 || reach.is_some_and(|reach| outer > reach))
    };
    m == 0 || n == 0 || exceeds(rs, m, cs, n) || exceeds(cs, n, rs, m)
}

#[cold]
fn outside(len: usize, shape: (usize, usize), strides: (usize, usize)) -> MatrixFault {
    refused("an element lies outside the buffer", len, shape, strides)
}

#[cold]
fn refused(rule: &'static str, len: usize, (m, n): (usize, usize), (rs, cs): (usize, usize)) -> MatrixFault {
    MatrixFault { rule, given: format!("[{m}, {n}] in steps of ({rs}, {cs}) over {len} element(s)") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_element_outside_the_buffer_is_refused_however_large_the_strides() {
        let mut data = [0.0f32; 16];
        let text = |e: MatrixFault| e.to_string();
        // The second column would be 7 elements before the slice: 8 + (1 - 8) wraps to 1.
        let back = 1usize.wrapping_sub(8);
        let given = format!("got [2, 2] in steps of (8, {back}) over 16 element(s)");
        let want = format!("matrix: an element lies outside the buffer; {given}");
        assert_eq!(text(MatMut::new(&mut data, (2, 2), (8, back)).unwrap_err()), want);
        assert_eq!(text(MatRef::new(&data, (2, 2), (8, back)).unwrap_err()), want);
        let half = usize::MAX / 2 + 1;
        for (shape, strides) in [
            ((2, 2), (16, 1)),
            ((3, 1), (half, 1)),
            ((1, 3), (1, half)),
            ((2, 2), (half, half)),
            ((usize::MAX, 2), (usize::MAX, 1)),
            ((17, 1), (1, 1)),
        ] {
            assert!(MatRef::new(&data, shape, strides).is_err(), "{shape:?} {strides:?}");
            assert!(MatMut::new(&mut data, shape, strides).is_err(), "{shape:?} {strides:?}");
        }
        for (shape, strides) in [
            ((2, 2), (14, 1)),
            ((4, 4), (4, 1)),
            ((4, 4), (1, 4)),
            ((1, 16), (usize::MAX, 1)),
            ((0, 9), (7, 7)),
            ((9, 0), (usize::MAX, 7)),
        ] {
            assert!(MatRef::new(&data, shape, strides).is_ok(), "{shape:?} {strides:?}");
            assert!(MatMut::new(&mut data, shape, strides).is_ok(), "{shape:?} {strides:?}");
        }
        assert!(MatRef::<f32>::new(&[], (1, 1), (1, 1)).is_err());
    }

    #[test]
    fn elements_to_be_written_do_not_coincide() {
        let mut data = [0.0f32; 16];
        let want =
            "matrix: elements to be written coincide; got [3, 3] in steps of (2, 1) over 16 element(s)";
        assert_eq!(MatMut::new(&mut data, (3, 3), (2, 1)).unwrap_err().to_string(), want);
        for (shape, strides) in [((2, 2), (0, 1)), ((2, 2), (0, 0)), ((3, 2), (1, 1)), ((2, 3), (3, 2))] {
            assert!(MatRef::new(&data, shape, strides).is_ok(), "reading is no harm: {shape:?} {strides:?}");
            assert!(MatMut::new(&mut data, shape, strides).is_err(), "{shape:?} {strides:?}");
        }
        // A distance that overflows to 0 is not exceeded.
        let quarter = 1 << (usize::BITS - 2);
        assert!(!distinct((5, 5), (quarter, quarter)));
    }

    #[test]
    fn parts_of_matrices() {
        let data: Vec<u32> = (0..12).collect();
        let x = MatRef::new(&data, (3, 4), (4, 1)).unwrap();
        assert_eq!((x.rows(1, 2).row(1), x.rows(3, 0).shape()), (&data[8..12], (0, 4)));
        assert_eq!((x.t().shape(), x.t().strides(), x.cols(2, 2).row(1)), ((4, 3), (1, 4), &data[6..8]));
        for (start, len) in [(2, 2), (4, 0), (usize::MAX, 2), (1, usize::MAX)] {
            assert!(std::panic::catch_unwind(|| x.rows(start, len)).is_err(), "{start} {len}");
        }
    }
}
