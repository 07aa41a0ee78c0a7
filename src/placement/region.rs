//! The set of global indices that one rank holds.

use smallvec::SmallVec;

use super::runs::Runs;
use crate::tensor::{Dims, Shape};

/// The set of global indices that one rank holds, and where they lie in its local row-major storage.
///
/// It is a union of disjoint boxes, in ascending order of both global index and local offset: one box, except that a
/// ragged range over `k` flattened dims takes up to `2k - 1`. An empty region has no boxes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// The shape of the local tensor.
    pub local: Shape,
    /// The boxes of global indices.
    pub boxes: SmallVec<[IndexBox; 1]>,
    /// Where each dim starts, also of an empty region; `None` where dims are flattened.
    origin: Option<Dims>,
}

/// A box of global indices, in one rank's local storage.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct IndexBox {
    /// The first global index.
    pub start: Dims,
    /// The number of indices along each global dim; never 0.
    pub len: Dims,
    /// Where the first one lies in local storage, in elements.
    pub offset: usize,
    /// How far local storage moves with each global dim, in elements.
    pub strides: Dims,
}

/// A box of global indices that two regions share, in the local storage of both.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Overlap {
    /// The first global index.
    pub start: Dims,
    /// The number of indices along each global dim; never 0.
    pub len: Dims,
    /// Where the first one lies in the first region's storage, in elements.
    pub a_offset: usize,
    /// Where the first one lies in the second region's storage, in elements.
    pub b_offset: usize,
    /// How far the first region's storage moves with each global dim, in elements.
    pub a_strides: Dims,
    /// How far the second region's storage moves with each global dim, in elements.
    pub b_strides: Dims,
}

impl Region {
    /// All of a tensor.
    pub fn whole(shape: &Shape) -> Region {
        Region::of_box(Dims::from_elem(0, shape.len()), shape.clone())
    }

    /// The indices `start[d]..start[d] + len[d]` of each dim, stored row-major.
    pub fn of_box(start: Dims, len: Shape) -> Region {
        let mut boxes = SmallVec::new();
        if !len.contains(&0) {
            let len_dims = Dims::from_slice(&len);
            boxes.push(IndexBox { start: start.clone(), len: len_dims, offset: 0, strides: len.strides() });
        }
        Region { local: len, boxes, origin: Some(start) }
    }

    /// The range `lo..hi` of the flattened first `dims` dims of the box at `start` with extents `len`, and all of its
    /// other dims. Stored as `[hi - lo, rest...]`.
    pub(super) fn of_range(start: &[usize], len: &[usize], dims: usize, lo: usize, hi: usize) -> Region {
        let local: Shape = std::iter::once(hi - lo).chain(len[dims..].iter().copied()).collect();
        let mut boxes = SmallVec::new();
        if local.contains(&0) {
            return Region { local, boxes, origin: None };
        }
        let strides = Shape::from(len).strides();
        // Elements per index of the flattened dims; what one step of prefix dim `d` passes over, in such indices.
        let each = strides[dims - 1];
        let steps: Dims = strides[..dims].iter().map(|s| s / each).collect();
        let mut at = lo;
        while at < hi {
            // The outermost dim of which a whole index starts here and ends within the range; the innermost steps by 1.
            let d = (0..dims)
                .find(|&d| at.is_multiple_of(steps[d]) && hi - at >= steps[d])
                .expect("the innermost prefix dim has step 1");
            let index: Dims = (0..dims).map(|d| at / steps[d] % len[d]).collect();
            let count = ((hi - at) / steps[d]).min(len[d] - index[d]);
            let mut block = IndexBox {
                start: start.into(),
                len: len.into(),
                offset: (at - lo) * each,
                strides: strides.clone(),
            };
            for p in 0..=d {
                block.start[p] += index[p];
                block.len[p] = if p < d { 1 } else { count };
            }
            boxes.push(block);
            at += count * steps[d];
        }
        Region { local, boxes, origin: None }
    }

    /// True where it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.boxes.is_empty()
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.local.numel()
    }

    /// The first global index of `dim`; `None` where dims are flattened (a ragged range over several dims). An empty
    /// region stands where its indices would have begun.
    pub fn start(&self, dim: usize) -> Option<usize> {
        self.origin.as_ref().map(|origin| origin[dim])
    }

    /// The number of global indices of `dim`; `None` where dims are flattened.
    pub fn extent(&self, dim: usize) -> Option<usize> {
        self.origin.as_ref().map(|_| self.local[dim])
    }

    /// Where the global `index` lies in local storage, or `None` where this rank does not hold it.
    pub fn offset_of(&self, index: &[usize]) -> Option<usize> {
        self.boxes.iter().find_map(|b| {
            let mut offset = b.offset;
            for (d, &i) in index.iter().enumerate() {
                let at = i.checked_sub(b.start[d]).filter(|&at| at < b.len[d])?;
                offset += at * b.strides[d];
            }
            Some(offset)
        })
    }

    /// The indices that both regions, of one tensor, hold; in ascending order of their first index, whichever region
    /// is the first.
    pub fn intersect(&self, other: &Region) -> SmallVec<[Overlap; 1]> {
        let mut overlaps: SmallVec<[Overlap; 1]> = SmallVec::new();
        // Boxes of a region ascend as wholes: all of one comes, row-major, before all of the next. So these do too.
        for a in &self.boxes {
            overlaps.extend(other.boxes.iter().filter_map(|b| a.intersect(b)));
        }
        overlaps
    }

    /// Calls `f(global linear index, local offset, length)` for the longest runs that are contiguous both in the
    /// row-major order of the `global` shape and in local storage, ascending in both.
    ///
    /// ```
    /// # fn main() -> isoshard::Result<()> {
    /// use isoshard::placement::{Mesh, Spec};
    ///
    /// let mesh = Mesh::parse("tp=2", 1)?;
    /// let runs = |text: &str| -> isoshard::Result<Vec<_>> {
    ///     let spec = Spec::parse(text, &mesh)?;
    ///     let mut runs = vec![];
    ///     spec.region().runs(&spec.shape, |global, local, len| runs.push((global, local, len)));
    ///     Ok(runs)
    /// };
    /// assert_eq!(runs("f32[4, 6]@(tp:S0)")?, [(12, 0, 12)]);
    /// assert_eq!(runs("f32[3, 6]@(tp:S1)")?, [(3, 0, 3), (9, 3, 3), (15, 6, 3)]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn runs(&self, global: &Shape, mut f: impl FnMut(u64, usize, usize)) {
        self.each_run(global, &mut f);
    }

    fn each_run(&self, global: &Shape, f: &mut dyn FnMut(u64, usize, usize)) {
        if self.is_empty() {
            return;
        }
        let strides = global.strides();
        let mut of_u64 = |global, local, len| f(global as u64, local, len);
        let mut runs = Runs::new(&mut of_u64);
        for b in &self.boxes {
            let first = b.start.iter().zip(&strides).map(|(i, s)| i * s).sum();
            runs.add(&b.len, (first, &strides), (b.offset, &b.strides));
        }
        runs.finish();
    }
}

impl IndexBox {
    fn intersect(&self, other: &IndexBox) -> Option<Overlap> {
        debug_assert_eq!(self.start.len(), other.start.len(), "regions of one tensor");
        let (mut start, mut len) = (self.start.clone(), self.len.clone());
        let (mut a_offset, mut b_offset) = (self.offset, other.offset);
        for d in 0..start.len() {
            start[d] = self.start[d].max(other.start[d]);
            let end = (self.start[d] + self.len[d]).min(other.start[d] + other.len[d]);
            len[d] = end.checked_sub(start[d]).filter(|&n| n > 0)?;
            a_offset += (start[d] - self.start[d]) * self.strides[d];
            b_offset += (start[d] - other.start[d]) * other.strides[d];
        }
        let (a_strides, b_strides) = (self.strides.clone(), other.strides.clone());
        Some(Overlap { start, len, a_offset, b_offset, a_strides, b_strides })
    }
}

impl Overlap {
    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.len.iter().product()
    }

    /// Calls `f(offset in the first, offset in the second, length)` for the longest runs that are contiguous in the
    /// storage of both, in row-major order of the box.
    pub fn runs(&self, mut f: impl FnMut(usize, usize, usize)) {
        let mut runs = Runs::new(&mut f);
        runs.add(&self.len, (self.a_offset, &self.a_strides), (self.b_offset, &self.b_strides));
        runs.finish();
    }
}
