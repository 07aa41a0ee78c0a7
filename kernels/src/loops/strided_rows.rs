//! Iteration over several strided tensors of one shape together, row by row.

use std::ops::Range;

use crate::Dims;

/// The rows of `N` strided tensors of one shape. Neighbouring dims that can be merged in all of the tensors are merged,
/// so rows are as long as possible.
///
/// ```
/// use isoshard_kernels::StridedRows;
/// // A contiguous [2, 3, 4] and its first dim repeated: the two inner dims become one row of 12.
/// let rows = StridedRows::new(&[2, 3, 4], [&[12, 4, 1], &[0, 4, 1]]);
/// assert_eq!((rows.row_count(), rows.row_len()), (2, 12));
/// let mut offsets = Vec::new();
/// rows.each_row(|offset| offsets.push(*offset));
/// assert_eq!(offsets, [[0, 0], [12, 0]]);
/// ```
#[derive(Debug)]
pub struct StridedRows<const N: usize> {
    /// The merged extents, innermost first; never empty.
    extents: Dims,
    strides: [Dims; N],
}

/// A function that takes a chunk of a row: the row's offset in each tensor, the chunk's start in the row, its length,
/// and its start in the row-major order of all elements.
pub type EachChunk<'a, const N: usize> = &'a mut dyn FnMut(&[usize; N], usize, usize, usize);

impl<const N: usize> StridedRows<N> {
    /// Returns the rows of tensors of `shape` with these strides.
    pub fn new(shape: &[usize], strides: [&[usize]; N]) -> StridedRows<N> {
        let mut rows = StridedRows { extents: Dims::new(), strides: std::array::from_fn(|_| Dims::new()) };
        for d in (0..shape.len()).rev().filter(|&d| shape[d] != 1) {
            let inner = rows.extents.len().wrapping_sub(1);
            let runs_on = !rows.extents.is_empty()
                && (0..N).all(|k| strides[k][d] == rows.strides[k][inner] * rows.extents[inner]);
            if runs_on {
                rows.extents[inner] *= shape[d];
                continue;
            }
            rows.extents.push(shape[d]);
            (0..N).for_each(|k| rows.strides[k].push(strides[k][d]));
        }
        if rows.extents.is_empty() {
            rows.extents.push(1);
            rows.strides.iter_mut().for_each(|s| s.push(1));
        }
        rows
    }

    /// Returns the length of a row, the merged innermost dim.
    pub fn row_len(&self) -> usize {
        self.extents[0]
    }

    /// Returns the number of rows.
    pub fn row_count(&self) -> usize {
        self.extents[1..].iter().product()
    }

    /// Returns the stride of tensor `k` along a row.
    pub fn row_stride(&self, k: usize) -> usize {
        self.strides[k][0]
    }

    /// Returns the offset of an element in the first tensor, by its number in the row-major order of all.
    pub fn offset(&self, element: usize) -> usize {
        let mut rest = element;
        let parts = self.extents.iter().zip(&self.strides[0]).map(|(&extent, &stride)| {
            let index = rest % extent.max(1);
            rest /= extent.max(1);
            index * stride
        });
        parts.sum()
    }

    /// Calls `f` with the offset of each row in each tensor, in row-major order.
    ///
    /// The offsets are passed by reference because a copy would wait for the stores before it. The function is inlined,
    /// so that `f` can be part of a [`Kernel`](crate::Kernel).
    #[inline(always)]
    pub fn each_row(&self, f: impl FnMut(&[usize; N])) {
        self.each_row_of(0..self.row_count(), f);
    }

    /// Calls `f` as [`StridedRows::each_row`] does, for the rows with these numbers.
    #[inline(always)]
    pub(crate) fn each_row_of(&self, rows: Range<usize>, mut f: impl FnMut(&[usize; N])) {
        let mut index = Dims::from_elem(0, self.extents.len());
        let mut at = [0; N];
        if self.extents.contains(&0) || rows.is_empty() {
            return;
        }
        let mut rest = rows.start;
        for d in 1..index.len() {
            index[d] = rest % self.extents[d];
            rest /= self.extents[d];
            (0..N).for_each(|k| at[k] += self.strides[k][d] * index[d]);
        }
        let mut left = rows.len();
        loop {
            f(&at);
            left -= 1;
            if left == 0 {
                return;
            }
            let mut d = 1;
            loop {
                if d == index.len() {
                    return;
                }
                index[d] += 1;
                (0..N).for_each(|k| at[k] += self.strides[k][d]);
                if index[d] < self.extents[d] {
                    break;
                }
                (0..N).for_each(|k| at[k] -= self.strides[k][d] * self.extents[d]);
                index[d] = 0;
                d += 1;
            }
        }
    }

    /// Calls `f` with chunks of rows of at most `chunk` elements.
    ///
    /// ```
    /// use isoshard_kernels::StridedRows;
    /// let mut chunks = Vec::new();
    /// let rows = StridedRows::new(&[2, 5], [&[7, 1]]);
    /// rows.each_chunk(3, &mut |&[offset], start, len, first| chunks.push((offset, start, len, first)));
    /// assert_eq!(chunks, [(0, 0, 3, 0), (0, 3, 2, 3), (7, 0, 3, 5), (7, 3, 2, 8)]);
    /// ```
    pub fn each_chunk(&self, chunk: usize, f: EachChunk<'_, N>) {
        self.each_chunk_of(0..self.row_len() * self.row_count(), chunk, f);
    }

    /// Calls `f` as [`StridedRows::each_chunk`] does, for some elements in the row-major order of all.
    pub fn each_chunk_of(&self, elements: Range<usize>, chunk: usize, f: EachChunk<'_, N>) {
        let n = self.row_len();
        if elements.is_empty() {
            return;
        }
        let rows = elements.start / n..elements.end.div_ceil(n);
        let mut out = rows.start * n;
        self.each_row_of(rows, |at| {
            let (mut start, end) = (elements.start.saturating_sub(out), n.min(elements.end - out));
            while start < end {
                let len = chunk.min(end - start);
                f(at, start, len, out + start);
                start += len;
            }
            out += n;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_what_runs_on_in_all() {
        let rows = StridedRows::new(&[2, 3, 1, 4], [&[12, 4, 9, 1], &[0, 0, 0, 1]]);
        assert_eq!((rows.row_len(), rows.row_count()), (4, 6));
        let mut seen = Vec::new();
        rows.each_row(|at| seen.push(*at));
        assert_eq!(seen, [[0, 0], [4, 0], [8, 0], [12, 0], [16, 0], [20, 0]]);
        assert_eq!(StridedRows::new(&[2, 3, 4], [&[12, 4, 1], &[0, 0, 0]]).row_len(), 24);
        assert_eq!(StridedRows::<1>::new(&[], [&[]]).row_len(), 1);
        StridedRows::new(&[2, 0], [&[1, 1]]).each_row(|_| panic!("an empty shape has no rows"));
    }

    #[test]
    fn chunks_cover_the_rows() {
        let mut seen = Vec::new();
        StridedRows::new(&[2, 5], [&[7, 1]]).each_chunk(3, &mut |at, start, len, out| {
            seen.push((at[0], start, len, out));
        });
        assert_eq!(seen, [(0, 0, 3, 0), (0, 3, 2, 3), (7, 0, 3, 5), (7, 3, 2, 8)]);
    }

    #[test]
    fn parts_together_are_the_whole() {
        let rows = StridedRows::new(&[2, 3, 5], [&[40, 7, 1], &[0, 1, 0]]);
        let chunks = |elements: Range<usize>| {
            let mut seen = Vec::new();
            rows.each_chunk_of(elements, 1, &mut |at, start, len, out| seen.push((*at, start, len, out)));
            seen
        };
        let whole = chunks(0..30);
        assert_eq!(whole.len(), 30);
        for (a, b) in (0..=30).flat_map(|a| (a..=30).map(move |b| (a, b))) {
            assert_eq!(chunks(a..b), whole[a..b], "{a}..{b}");
        }
    }
}
