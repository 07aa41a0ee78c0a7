//! Strided layouts of one shape, merged into as few dims as possible: `struct StridedWalk` of
//! `kernels/cuda/pointwise.cuh`.

use smallvec::SmallVec;

use crate::error::Result;
use crate::tensor::{Dims, sort_by_key};

/// The most layouts of a walk: a result and three operands.
pub(super) const LAYOUTS: usize = 4;
/// The most dims that a kernel walks.
const DIMS: usize = 6;
/// The bound of a kernel's indices and blocks.
pub(super) const INDICES: usize = 1 << 31;

/// One tensor's layout: the offset of its first element, and its strides, in elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct StridedLayout<'a> {
    pub start: usize,
    pub strides: &'a [usize],
}

/// Layouts of one shape, in which dims that are contiguous in all layouts are merged; innermost first, never empty.
#[derive(Clone, Debug)]
pub(super) struct MergedLayouts {
    len: usize,
    extents: Dims,
    /// The layouts' strides, one array per dim.
    strides: SmallVec<[[usize; LAYOUTS]; 5]>,
    starts: [usize; LAYOUTS],
    width: usize,
}

/// Mirrors `struct StridedWalk`.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::NoUninit)]
pub(super) struct StridedWalk {
    start: [u64; LAYOUTS],
    stride: [[u64; DIMS]; LAYOUTS],
    by: [Divisor; DIMS],
    dims: u32,
    pub len: u32,
    width: u32,
    unused: u32,
}

/// The constants of a division of an index below 2^31: `(mulhi(i, magic) + i) >> shift` (Granlund, Montgomery 1994,
/// figure 4.1).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Divisor {
    n: u32,
    magic: u32,
    shift: u32,
}

impl MergedLayouts {
    /// Merges the layouts of `shape`, whose extents are all positive.
    pub fn new(shape: &[usize], layouts: &[StridedLayout]) -> MergedLayouts {
        let len = layouts.len();
        let mut nest = MergedLayouts {
            len,
            extents: Dims::new(),
            strides: SmallVec::new(),
            starts: [0; LAYOUTS],
            width: 1,
        };
        for (k, layout) in layouts.iter().enumerate() {
            nest.starts[k] = layout.start;
        }
        for d in (0..shape.len()).rev().filter(|&d| shape[d] != 1) {
            let mut strides = [0; LAYOUTS];
            (0..len).for_each(|k| strides[k] = layouts[k].strides[d]);
            if let (Some(n), Some(inner)) = (nest.extents.last_mut(), nest.strides.last())
                && (0..len).all(|k| strides[k] == inner[k] * *n)
            {
                *n *= shape[d];
                continue;
            }
            nest.extents.push(shape[d]);
            nest.strides.push(strides);
        }
        if nest.extents.is_empty() {
            nest.extents.push(1);
            nest.strides.push([1; LAYOUTS]);
        }
        nest
    }

    /// Returns true if every layout is contiguous from its tensor's first element on.
    pub fn is_flat(&self) -> bool {
        self.extents.len() == 1 && (0..self.len).all(|k| self.strides[0][k] == 1 && self.starts[k] == 0)
    }

    /// Returns true if layout `k` has its smallest stride along another dim than the innermost and repeats no
    /// element, and the tensor is large enough that a transposed copy pays.
    pub fn is_transposed(&self, k: usize) -> bool {
        const WORTH: usize = 1 << 14;
        let inner = self.strides[0][k];
        let below = |s: &[usize; LAYOUTS]| s[k] < inner;
        inner > 1
            && self.extents[0] > 1
            && self.numel() >= WORTH
            && self.strides.iter().all(|s| s[k] != 0)
            && self.strides.iter().any(below)
    }

    /// Joins `width` neighbours to one unit, if all layouts allow it, and counts offsets in units from then on.
    /// Returns true if it did.
    pub fn join(&mut self, width: usize) -> bool {
        let whole = |x: usize| x.is_multiple_of(width);
        let fits = whole(self.extents[0])
            && (0..self.len).all(|k| {
                self.strides[0][k] == 1
                    && whole(self.starts[k])
                    && self.strides[1..].iter().all(|s| whole(s[k]))
            });
        if fits && width > 1 {
            self.extents[0] /= width;
            self.starts.iter_mut().for_each(|s| *s /= width);
            self.strides[1..].iter_mut().flatten().for_each(|s| *s /= width);
        }
        fits
    }

    /// Lets the kernel load packs of `width` elements, if the layouts allow it: the result's rows are contiguous, the
    /// operands' rows are contiguous or one repeated element, and all rows begin at an address that is aligned to a
    /// pack. `places` gives the offset of each tensor's first element from such an address. Returns true if it does.
    pub fn pack(&mut self, width: usize, places: impl Fn(usize) -> usize) -> bool {
        let whole = |x: usize| x.is_multiple_of(width);
        let fits = |k: usize| match self.strides[0][k] {
            0 => k > 0,
            1 => whole(places(k) + self.starts[k]) && self.strides[1..].iter().all(|s| whole(s[k])),
            _ => false,
        };
        let fits = width > 1 && whole(self.extents[0]) && (0..self.len).all(fits);
        if fits {
            self.extents[0] /= width;
            self.strides[0].iter_mut().for_each(|s| *s *= width);
            self.width = width;
        }
        fits
    }

    /// Removes the two dims along which result and operand are contiguous, columns and rows, if they differ and both
    /// are long. The remaining dims are those around the tiles.
    pub fn take_transposed(&mut self) -> Option<(TransposedDim, TransposedDim)> {
        const LONG: usize = 8;
        let columns = TransposedDim { len: self.extents[0], stride: self.strides[0][1] };
        let transposed = self.strides[0][0] == 1 && columns.stride > 1 && columns.len >= LONG;
        let along = |d: &usize| self.strides[*d][1] == 1 && self.extents[*d] >= LONG;
        let d = (1..self.extents.len()).find(along).filter(|_| transposed)?;
        let rows = TransposedDim { len: self.extents[d], stride: self.strides[d][0] };
        for d in [d, 0] {
            self.extents.remove(d);
            self.strides.remove(d);
        }
        if self.extents.is_empty() {
            self.extents.push(1);
            self.strides.push([0; LAYOUTS]);
        }
        Some((columns, rows))
    }

    /// Calls `run` with the walks that cover all indices: one, unless there are more dims than a kernel takes, or
    /// `limit` indices or more.
    pub fn walks(mut self, limit: usize, run: &mut dyn FnMut(StridedWalk) -> Result<()>) -> Result<()> {
        let last = self.extents.len() - 1;
        if self.extents.len() <= DIMS && self.numel() < limit {
            return run(self.walk());
        }
        if self.extents[last] == 1 {
            self.extents.pop();
            self.strides.pop();
            return self.walks(limit, run);
        }
        let mut second = self.clone();
        let half = self.extents[last] / 2;
        self.extents[last] = half;
        second.extents[last] -= half;
        for (start, stride) in second.starts.iter_mut().zip(self.strides[last]) {
            *start += half * stride;
        }
        self.walks(limit, run)?;
        second.walks(limit, run)
    }

    /// Returns the number of indices.
    pub fn numel(&self) -> usize {
        self.extents.iter().product()
    }

    fn walk(&self) -> StridedWalk {
        let mut walk = StridedWalk {
            start: self.starts.map(|s| s as u64),
            stride: [[0; DIMS]; LAYOUTS],
            by: [Divisor::default(); DIMS],
            dims: self.extents.len() as u32,
            len: self.numel() as u32,
            width: self.width as u32,
            unused: 0,
        };
        for (d, (&n, strides)) in self.extents.iter().zip(&self.strides).enumerate() {
            walk.by[d] = Divisor::new(n as u32);
            (0..LAYOUTS).for_each(|k| walk.stride[k][d] = strides[k] as u64);
        }
        walk
    }
}

/// A dim of a transposing copy: its extent, and its stride in the tensor that is not contiguous along it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TransposedDim {
    pub len: usize,
    pub stride: usize,
}

impl Divisor {
    fn new(n: u32) -> Divisor {
        let shift = n.next_power_of_two().trailing_zeros();
        let magic = ((1u64 << 32) * ((1u64 << shift) - u64::from(n)) / u64::from(n) + 1) as u32;
        Divisor { n, magic, shift }
    }
}

/// Merges a copy's two layouts, with the dims in the order of the result's memory, which makes its rows as long as
/// possible.
pub(super) fn merge_in_result_order(
    shape: &[usize],
    result: StridedLayout,
    operand: StridedLayout,
) -> MergedLayouts {
    let mut order: Dims = (0..shape.len()).collect();
    sort_by_key(&mut order, |&d| std::cmp::Reverse(result.strides[d]));
    let take = |all: &[usize]| -> Dims { order.iter().map(|&d| all[d]).collect() };
    let (to, from) = (take(result.strides), take(operand.strides));
    let layouts = [
        StridedLayout { start: result.start, strides: &to },
        StridedLayout { start: operand.start, strides: &from },
    ];
    MergedLayouts::new(&take(shape), &layouts)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the offsets that walks visit, in the order of indices, as the kernel computes them.
    fn visited(nest: MergedLayouts) -> Vec<[u64; LAYOUTS]> {
        let mut all = Vec::new();
        let mut run = |walk: StridedWalk| {
            for i in 0..walk.len {
                let (mut at, mut i) = (walk.start, i);
                for d in 0..walk.dims as usize {
                    let by = walk.by[d];
                    let last = d + 1 == walk.dims as usize;
                    let q = (((u64::from(i) * u64::from(by.magic)) >> 32) as u32 + i) >> by.shift;
                    let r = if last { i } else { i - q * by.n };
                    (0..LAYOUTS).for_each(|k| at[k] += u64::from(r) * walk.stride[k][d]);
                    i = q;
                }
                all.push(at);
            }
            Ok(())
        };
        nest.walks(INDICES, &mut run).unwrap();
        all
    }

    #[test]
    fn divides_by_multiplying() {
        let all = (1..2000).chain((0..31).flat_map(|s| [(1u32 << s) - 1, 1 << s, (1 << s) + 1]));
        for n in all.filter(|&n| n > 0) {
            let by = Divisor::new(n);
            let near = [0, 1, n / 2, n - 1, n, n + 1, 3 * (n / 2), (1 << 31) - 1, 1 << 30, 123_456_789];
            for i in near.into_iter().filter(|&i| i < 1 << 31) {
                let q = (((u64::from(i) * u64::from(by.magic)) >> 32) as u32 + i) >> by.shift;
                assert_eq!(q, i / n, "{i} / {n}");
            }
        }
    }

    #[test]
    fn visits_every_index_in_order() {
        let result = StridedLayout { start: 0, strides: &[20, 5, 5, 1] };
        let transposed = StridedLayout { start: 3, strides: &[1, 2, 9, 8] };
        let nest = MergedLayouts::new(&[2, 4, 1, 5], &[result, transposed]);
        assert_eq!(nest.extents[..], [5, 4, 2]);
        let want = (0..40).map(|i| [i, 3 + i / 20 + i / 5 % 4 * 2 + i % 5 * 8, 0, 0]);
        assert_eq!(visited(nest), want.collect::<Vec<_>>());
        // These dims do not merge, and are more than a kernel walks.
        let shape = [2usize, 3, 2, 1, 2, 3, 2, 2, 3];
        let strides: Vec<usize> = (0..9).map(|d| 10usize.pow(d)).collect();
        let own: Vec<usize> = (0..9).map(|d| shape[d + 1..].iter().product()).collect();
        let layouts = [&own, &strides].map(|strides| StridedLayout { start: 0, strides });
        let all = visited(MergedLayouts::new(&shape, &layouts));
        assert!(all.iter().enumerate().all(|(i, at)| at[0] == i as u64));
        let digits = |i: usize| (0..9).map(|d| i / own[d] % shape[d] * strides[d]).sum::<usize>() as u64;
        assert!(all.iter().enumerate().all(|(i, at)| at[1] == digits(i)));
    }

    #[test]
    fn packs_what_lies_in_rows_of_packs() {
        let rows = |start: usize, pitch: usize| {
            let (result, bias) = ([8, 1], [0, 1]);
            let (pitched, row) = ([pitch, 1], [pitch, 0]);
            let layouts = [&result, &pitched, &bias, &row].map(|strides| StridedLayout { start, strides });
            MergedLayouts::new(&[3, 8], &layouts)
        };
        let mut nest = rows(0, 12);
        assert!(nest.pack(4, |_| 0));
        assert_eq!(visited(nest)[3], [12, 16, 4, 12]);
        assert!(!rows(0, 10).pack(4, |_| 0) && !rows(2, 12).pack(4, |_| 0) && !rows(0, 12).pack(4, |_| 6));
        assert!(!rows(0, 12).pack(3, |_| 0) && rows(2, 12).pack(4, |_| 2));
        let pair =
            [StridedLayout { start: 4, strides: &[6, 1] }, StridedLayout { start: 0, strides: &[4, 1] }];
        let mut joined = MergedLayouts::new(&[5, 4], &pair);
        assert!(!joined.join(4) && joined.join(2));
        assert_eq!(visited(joined)[..3], [[2, 0, 0, 0], [3, 1, 0, 0], [5, 2, 0, 0]]);
    }

    #[test]
    fn a_transposed_operand_has_two_sides() {
        let result = StridedLayout { start: 0, strides: &[200, 20, 1] };
        let operand = StridedLayout { start: 7, strides: &[200, 1, 10] };
        let mut nest = MergedLayouts::new(&[3, 10, 20], &[result, operand]);
        assert!(!nest.is_transposed(1), "600 elements are walked as they are");
        let (columns, rows) = nest.take_transposed().unwrap();
        assert_eq!(visited(nest), [[0, 7, 0, 0], [200, 207, 0, 0], [400, 407, 0, 0]]);
        assert_eq!(
            (columns, rows),
            (TransposedDim { len: 20, stride: 10 }, TransposedDim { len: 10, stride: 20 })
        );
        let straight = merge_in_result_order(
            &[4, 5],
            StridedLayout { start: 0, strides: &[1, 4] },
            StridedLayout { start: 0, strides: &[1, 4] },
        );
        assert!(straight.is_flat(), "a copy goes in the result's order");
    }
}
