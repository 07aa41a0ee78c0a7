//! Matrices in buffers, in any strides.

/// A matrix in some buffer: the elements from its first on, and the strides of rows and columns.
#[derive(Clone, Copy)]
pub struct MatRef<'a, T> {
    /// The buffer from the first element on.
    pub data: &'a [T],
    /// Rows and columns.
    pub shape: (usize, usize),
    /// The steps from row to row and from column to column, in elements.
    pub strides: (usize, usize),
}

/// A matrix to be written: as [`MatRef`]; no two elements may coincide.
pub struct MatMut<'a, T> {
    /// The buffer from the first element on.
    pub data: &'a mut [T],
    /// Rows and columns.
    pub shape: (usize, usize),
    /// The steps from row to row and from column to column, in elements.
    pub strides: (usize, usize),
}

impl<'a, T> MatRef<'a, T> {
    /// The matrix seen the other way round.
    pub fn t(self) -> Self {
        let ((m, n), (rs, cs)) = (self.shape, self.strides);
        MatRef { data: self.data, shape: (n, m), strides: (cs, rs) }
    }

    /// The rows `start..start + len`.
    pub fn rows(self, start: usize, len: usize) -> Self {
        assert!(start + len <= self.shape.0, "rows {start}..{start}+{len} of {:?}", self.shape);
        let at = (start * self.strides.0).min(self.data.len());
        MatRef { data: &self.data[at..], shape: (len, self.shape.1), ..self }
    }

    /// Row `i`, whose elements lie side by side.
    pub fn row(self, i: usize) -> &'a [T] {
        &self.data[(i * self.strides.0).min(self.data.len())..][..self.shape.1]
    }

    /// The columns `start..start + len`.
    pub(super) fn cols(self, start: usize, len: usize) -> Self {
        self.t().rows(start, len).t()
    }

    /// True where every element lies inside the buffer.
    pub(super) fn is_inside(&self) -> bool {
        inside(self.data.len(), self.shape, self.strides)
    }
}

impl<T> MatMut<'_, T> {
    /// True where every element lies inside the buffer, and no two coincide.
    pub(super) fn is_sound(&self) -> bool {
        inside(self.data.len(), self.shape, self.strides) && distinct(self.shape, self.strides)
    }
}

fn inside(len: usize, (m, n): (usize, usize), (rs, cs): (usize, usize)) -> bool {
    m == 0 || n == 0 || (m - 1) * rs + (n - 1) * cs < len
}

/// True where one dim's steps leap over the whole of the other.
fn distinct((m, n): (usize, usize), (rs, cs): (usize, usize)) -> bool {
    let leaps = |outer: usize, outer_len: usize, inner: usize, inner_len: usize| {
        (inner > 0 || inner_len <= 1) && (outer_len <= 1 || outer > inner * inner_len.saturating_sub(1))
    };
    m == 0 || n == 0 || leaps(rs, m, cs, n) || leaps(cs, n, rs, m)
}
