//! Tensors of heads, as matrices, and rows of gradients in buffers of heads.

use crate::gemm::{Gemm, MatRef};

/// A tensor `[batch, heads, length, d]` as matrices.
#[derive(Clone, Copy)]
pub struct Heads<'a, T> {
    pub(super) data: &'a [T],
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) len: usize,
    pub(super) d: usize,
    strides: [usize; 4],
}

impl<'a, T> Heads<'a, T> {
    /// Returns the elements of a tensor of this shape and of these strides, from the first one on.
    pub fn new(data: &'a [T], [batch, heads, len, d]: [usize; 4], strides: [usize; 4]) -> Heads<'a, T> {
        Heads { data, batch, heads, len, d, strides }
    }
}

impl<'a, T: Gemm> Heads<'a, T> {
    /// Returns `len` rows of a head from `start` on.
    pub(super) fn rows(&self, (head, start, len): ([usize; 2], usize, usize)) -> MatRef<'a, T> {
        self.at(head).rows(start, len)
    }

    pub(super) fn at(&self, head: [usize; 2]) -> MatRef<'a, T> {
        let start = (head[0] * self.strides[0] + head[1] * self.strides[1]).min(self.data.len());
        let (shape, strides) = ((self.len, self.d), (self.strides[2], self.strides[3]));
        MatRef::new(&self.data[start..], shape, strides).expect("a tensor's head")
    }
}

/// The places of the rows of a gradient `[batch, heads, length, d]` in a buffer of rows of `d` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPlaces {
    /// The first row.
    pub first: usize,
    /// The distances of batch entries, heads and positions, in rows.
    pub steps: [usize; 3],
}

impl RowPlaces {
    /// Returns the row of a head at position `i`, and the distance of the next one.
    pub fn at(&self, [b, h]: [usize; 2], i: usize) -> (usize, usize) {
        let [batch, head, next] = self.steps;
        (self.first + b * batch + h * head + i * next, next)
    }

    /// Returns the places in a buffer `[batch, length, heads, d]`.
    pub fn packed([_, heads, len, _]: [usize; 4]) -> RowPlaces {
        RowPlaces { first: 0, steps: [len * heads, 1, heads] }
    }
}

/// Returns the number of query heads that share one of `groups` key heads.
pub(super) fn group_len(heads: usize, groups: usize) -> usize {
    heads.checked_div(groups).unwrap_or(0)
}
