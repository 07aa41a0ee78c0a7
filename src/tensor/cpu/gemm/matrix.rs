//! Matrices in buffers, in any strides. Every element of a [`MatRef`] and of a [`MatMut`] lies inside its buffer: kernels
//! rely on it, so only what checks it makes one.

use crate::error::{Error, Result};

/// A matrix in some buffer, from the buffer's first element on.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a, T> {
    data: &'a [T],
    shape: (usize, usize),
    strides: (usize, usize),
}

/// A matrix to be written: as [`MatRef`], and no two of its elements coincide.
#[derive(Debug)]
pub struct MatMut<'a, T> {
    data: &'a mut [T],
    shape: (usize, usize),
    strides: (usize, usize),
}

impl<'a, T> MatRef<'a, T> {
    /// The matrix of `shape` (rows, columns) that begins with the first element of `data`; `strides` are the steps from row to
    /// row and from column to column, in elements.
    ///
    /// ```
    /// use isoshard::tensor::cpu::MatRef;
    /// assert!(MatRef::new(&[1.0, 2.0, 3.0, 4.0], (2, 2), (2, 1)).is_ok());
    /// assert!(MatRef::new(&[1.0, 2.0, 3.0], (2, 2), (2, 1)).is_err());
    /// ```
    ///
    /// # Errors
    /// Refuses a matrix that leaves the buffer.
    #[inline]
    pub fn new(data: &'a [T], shape: (usize, usize), strides: (usize, usize)) -> Result<Self> {
        if inside(data.len(), shape, strides) {
            Ok(MatRef { data, shape, strides })
        } else {
            Err(outside(data.len(), shape, strides))
        }
    }

    /// The buffer from the first element on.
    #[inline]
    pub fn data(&self) -> &'a [T] {
        self.data
    }

    /// Rows and columns.
    #[inline]
    pub fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// The steps from row to row and from column to column, in elements.
    #[inline]
    pub fn strides(&self) -> (usize, usize) {
        self.strides
    }

    /// The matrix seen the other way round.
    #[inline]
    pub fn t(self) -> Self {
        let ((m, n), (rs, cs)) = (self.shape, self.strides);
        MatRef { data: self.data, shape: (n, m), strides: (cs, rs) }
    }

    /// The rows `start..start + len`.
    ///
    /// # Panics
    /// If the matrix does not have them.
    pub fn rows(self, start: usize, len: usize) -> Self {
        let rows = self.shape.0;
        assert!(start <= rows && len <= rows - start, "rows {start}..{start}+{len} of {:?}", self.shape);
        // A start with rows after it lies in the buffer, if there are columns.
        let at = start.saturating_mul(self.strides.0).min(self.data.len());
        MatRef { data: &self.data[at..], shape: (len, self.shape.1), ..self }
    }

    /// Row `i`, whose elements lie side by side.
    ///
    /// # Panics
    /// If there is no such row, or its elements do not lie side by side and reach over the end of the buffer.
    #[inline]
    pub fn row(self, i: usize) -> &'a [T] {
        &self.data[i.saturating_mul(self.strides.0).min(self.data.len())..][..self.shape.1]
    }

    /// The columns `start..start + len`.
    pub(super) fn cols(self, start: usize, len: usize) -> Self {
        self.t().rows(start, len).t()
    }

    /// The same matrix in another buffer, which is as long.
    #[inline]
    pub(super) fn with_data<U>(self, data: &'a [U]) -> MatRef<'a, U> {
        assert_eq!(data.len(), self.data.len(), "a buffer as long");
        MatRef { data, shape: self.shape, strides: self.strides }
    }
}

impl<'a, T> MatMut<'a, T> {
    /// The matrix of `shape` (rows, columns) that begins with the first element of `data`; `strides` as in [`MatRef::new`].
    ///
    /// # Errors
    /// Refuses a matrix that leaves the buffer, and strides by which two elements would coincide: one of both has to leap
    /// over all that the other reaches.
    #[inline]
    pub fn new(data: &'a mut [T], shape: (usize, usize), strides: (usize, usize)) -> Result<Self> {
        if !inside(data.len(), shape, strides) {
            return Err(outside(data.len(), shape, strides));
        }
        if !distinct(shape, strides) {
            return Err(refused("elements to be written coincide", data.len(), shape, strides));
        }
        Ok(MatMut { data, shape, strides })
    }

    /// Rows and columns.
    #[inline]
    pub fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// The steps from row to row and from column to column, in elements.
    #[inline]
    pub fn strides(&self) -> (usize, usize) {
        self.strides
    }

    /// The first element's place.
    #[inline]
    pub(super) fn as_mut_ptr(&mut self) -> *mut T {
        self.data.as_mut_ptr()
    }
}

/// True if every element lies inside a buffer of so many elements.
fn inside(len: usize, (m, n): (usize, usize), (rs, cs): (usize, usize)) -> bool {
    let last = || (m - 1).checked_mul(rs)?.checked_add((n - 1).checked_mul(cs)?);
    m == 0 || n == 0 || last().is_some_and(|last| last < len)
}

/// True if one dim's steps leap over the whole of the other.
fn distinct((m, n): (usize, usize), (rs, cs): (usize, usize)) -> bool {
    let leaps = |outer: usize, outer_len: usize, inner: usize, inner_len: usize| {
        let reach = inner.checked_mul(inner_len.saturating_sub(1));
        (inner > 0 || inner_len <= 1) && (outer_len <= 1 || reach.is_some_and(|reach| outer > reach))
    };
    m == 0 || n == 0 || leaps(rs, m, cs, n) || leaps(cs, n, rs, m)
}

#[cold]
fn outside(len: usize, shape: (usize, usize), strides: (usize, usize)) -> Error {
    refused("an element lies outside the buffer", len, shape, strides)
}

#[cold]
fn refused(rule: &str, len: usize, (m, n): (usize, usize), (rs, cs): (usize, usize)) -> Error {
    let given = format!("[{m}, {n}] in steps of ({rs}, {cs}) over {len} element(s)");
    Error::invalid("matrix", rule, given, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_element_outside_the_buffer_is_refused_however_large_the_strides() {
        let mut data = [0.0f32; 16];
        let text = |e: Error| e.to_string();
        // The second column would lie 7 elements before the buffer: 8 + (1 - 8) wraps to 1.
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
        // A reach that wraps to 0 is leapt over by nothing.
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
