//! Regions: the set of global indices that one rank holds.

use smallvec::SmallVec;

use super::runs::Runs;
use crate::tensor::{Dims, Shape, short_list};

/// The set of global indices that one rank holds, and their offsets in the rank's row-major local storage.
///
/// A region is a union of disjoint boxes, ascending in both global index and local offset. It is one box, except for
/// a ragged shard over `k` flattened dims, which takes up to `2k - 1` boxes. An empty region has no boxes.
///
/// ```
/// use isoshard::placement::{Mesh, Spec};
/// let spec = Spec::parse("f32[4, 6]@(tp:S1)", &Mesh::parse("tp=2", 1)?)?;
/// let region = spec.region();
/// assert_eq!((region.start(1), region.extent(1)), (Some(3), Some(3)));
/// assert_eq!(region.offset_of(&[2, 4]), Some(7)); // row 2 of 3 columns, column 4 - 3
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// The shape of the local tensor.
    pub local: Shape,
    /// The boxes of global indices.
    pub boxes: SmallVec<[IndexBox; 1]>,
    /// The start of each dim, also of an empty region; `None` if dims are flattened.
    origin: Option<Dims>,
}

/// A box of global indices, with its offset and strides in one rank's local storage.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct IndexBox {
    /// The first global index.
    pub(crate) start: Dims,
    /// The number of indices along each global dim; never 0.
    pub len: Dims,
    /// The offset of the first index in local storage, in elements.
    pub(crate) offset: usize,
    /// The step in local storage per global dim, in elements.
    pub(crate) strides: Dims,
}

/// A box of global indices that two regions share, with its offset and strides in the local storage of both.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Overlap {
    /// The first global index.
    pub start: Dims,
    /// The number of indices along each global dim; never 0.
    pub len: Dims,
    /// The offset of the first index in the first region's storage, in elements.
    pub(crate) a_offset: usize,
    /// The offset of the first index in the second region's storage, in elements.
    pub(crate) b_offset: usize,
    /// The step in the first region's storage per global dim, in elements.
    pub a_strides: Dims,
    /// The step in the second region's storage per global dim, in elements.
    pub b_strides: Dims,
}

impl Region {
    /// Returns the region of a rank that holds the whole tensor.
    ///
    /// ```
    /// use isoshard::placement::Region;
    /// assert_eq!(Region::whole(&[3, 2].into()).numel(), 6);
    /// ```
    pub fn whole(shape: &Shape) -> Region {
        Region::of_box(Dims::from_elem(0, shape.len()), shape.clone())
    }

    /// Returns the indices `start[d]..start[d] + len[d]` of each dim `d`, stored row-major.
    ///
    /// ```
    /// use isoshard::placement::Region;
    /// let region = Region::of_box([2, 0].into_iter().collect(), [1, 3].into());
    /// assert_eq!((region.offset_of(&[2, 1]), region.offset_of(&[0, 1])), (Some(1), None));
    /// ```
    pub fn of_box(start: Dims, len: Shape) -> Region {
        let mut boxes = SmallVec::new();
        if !len.contains(&0) {
            let len_dims = Dims::from_slice(&len);
            boxes.push(IndexBox { start: start.clone(), len: len_dims, offset: 0, strides: len.strides() });
        }
        Region { local: len, boxes, origin: Some(start) }
    }

    /// Returns the range `lo..hi` of the flattened first `dims` dims of the box at `start` with extents `len`, with
    /// all of the box's other dims. It is stored with the shape `[hi - lo, rest...]`.
    pub(super) fn of_range(start: &[usize], len: &[usize], dims: usize, lo: usize, hi: usize) -> Region {
        let local: Shape = std::iter::once(hi - lo).chain(len[dims..].iter().copied()).collect();
        let mut boxes = SmallVec::new();
        if local.contains(&0) {
            return Region { local, boxes, origin: None };
        }
        let strides = Shape::from(len).strides();
        // `each`: elements per flattened index. `steps[d]`: flattened indices per step along prefix dim `d`.
        let each = strides[dims - 1];
        let steps: Dims = short_list(strides[..dims].iter().map(|s| s / each));
        let mut first = lo;
        while first < hi {
            // Find the outermost dim with a whole index that starts here and ends within the range.
            let d = (0..dims)
                .find(|&d| first.is_multiple_of(steps[d]) && hi - first >= steps[d])
                .expect("the innermost prefix dim has step 1");
            let index: Dims = short_list((0..dims).map(|d| first / steps[d] % len[d]));
            let count = ((hi - first) / steps[d]).min(len[d] - index[d]);
            let mut block = IndexBox {
                start: start.into(),
                len: len.into(),
                offset: (first - lo) * each,
                strides: strides.clone(),
            };
            for p in 0..=d {
                block.start[p] += index[p];
                block.len[p] = if p < d { 1 } else { count };
            }
            boxes.push(block);
            first += count * steps[d];
        }
        Region { local, boxes, origin: None }
    }

    /// Returns true if the region holds no index.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// // Three rows on four ranks: the last rank holds none.
    /// let spec = Spec::parse("f32[3]@(dp:S0)", &Mesh::parse("dp=4", 3)?)?;
    /// assert!(spec.region().is_empty());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn is_empty(&self) -> bool {
        self.boxes.is_empty()
    }

    /// Returns the number of elements.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let spec = Spec::parse("f32[5, 3]@(dp:S0)", &Mesh::parse("dp=2", 0)?)?;
    /// assert_eq!(spec.region().numel(), 9);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn numel(&self) -> usize {
        self.local.numel()
    }

    /// Returns the first global index of `dim`, or `None` if dims are flattened (a ragged shard over several dims).
    /// For an empty region this is the index at which its elements would begin.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let spec = Spec::parse("f32[5, 2]@(dp:S0)", &Mesh::parse("dp=2", 1)?)?;
    /// assert_eq!(spec.region().start(0), Some(3));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn start(&self, dim: usize) -> Option<usize> {
        self.origin.as_ref().map(|origin| origin[dim])
    }

    /// Returns the number of global indices of `dim`, or `None` if dims are flattened.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let mesh = Mesh::parse("dp=2", 1)?;
    /// assert_eq!(Spec::parse("f32[5, 2]@(dp:S0)", &mesh)?.region().extent(0), Some(2));
    /// assert_eq!(Spec::parse("f32[5, 2]@(dp:RS(0..2; 3,2))", &mesh)?.region().extent(0), None);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn extent(&self, dim: usize) -> Option<usize> {
        self.origin.as_ref().map(|_| self.local[dim])
    }

    /// Returns the offset of the global `index` in local storage, in elements, or `None` if this rank does not hold
    /// it.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let spec = Spec::parse("f32[5, 2]@(dp:S0)", &Mesh::parse("dp=2", 1)?)?;
    /// assert_eq!((spec.region().offset_of(&[4, 0]), spec.region().offset_of(&[0, 0])), (Some(2), None));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn offset_of(&self, index: &[usize]) -> Option<usize> {
        self.boxes.iter().find_map(|b| {
            let mut offset = b.offset;
            for (d, &i) in index.iter().enumerate() {
                let inside = i.checked_sub(b.start[d]).filter(|&inside| inside < b.len[d])?;
                offset += inside * b.strides[d];
            }
            Some(offset)
        })
    }

    /// Returns the indices that both regions of one tensor hold, in ascending order of their first index. The order
    /// is the same if the two regions are swapped.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let mesh = Mesh::parse("dp=2", 0)?;
    /// let [rows, columns] = ["f32[4, 6]@(dp:S0)", "f32[4, 6]@(dp:S1)"].map(|text| Spec::parse(text, &mesh));
    /// let common = rows?.region().intersect(&columns?.region());
    /// assert_eq!((common.len(), common[0].numel()), (1, 6)); // 2 rows of 3 columns
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn intersect(&self, other: &Region) -> SmallVec<[Overlap; 1]> {
        let mut overlaps: SmallVec<[Overlap; 1]> = SmallVec::new();
        // All indices of one box of a region come before all indices of the next, row-major; so do the overlaps'.
        for a in &self.boxes {
            overlaps.extend(other.boxes.iter().filter_map(|b| a.intersect(b)));
        }
        overlaps
    }

    /// Calls `f(global linear index, local offset, length)` for each longest run that is contiguous both in the row-major
    /// order of the `global` shape and in local storage, ascending in both.
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
    /// Returns the number of elements.
    ///
    /// ```
    /// use isoshard::placement::Region;
    /// let whole = Region::whole(&[2, 3].into());
    /// assert_eq!(whole.intersect(&whole)[0].numel(), 6);
    /// ```
    pub fn numel(&self) -> usize {
        self.len.iter().product()
    }

    /// Returns the range of the first region's storage from the first of these indices to the last.
    pub(crate) fn span(&self) -> std::ops::Range<usize> {
        let last: usize = self.len.iter().zip(&self.a_strides).map(|(n, stride)| (n - 1) * stride).sum();
        self.a_offset..self.a_offset + last + 1
    }

    /// Calls `f(offset in the first region, offset in the second, length)` for each longest run that is contiguous in
    /// the storage of both, in row-major order of the box.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let mesh = Mesh::parse("dp=2", 0)?;
    /// let [rows, columns] = ["f32[4, 6]@(dp:S0)", "f32[4, 6]@(dp:S1)"].map(|text| Spec::parse(text, &mesh));
    /// let mut runs = Vec::new();
    /// rows?.region().intersect(&columns?.region())[0].runs(|a, b, len| runs.push((a, b, len)));
    /// assert_eq!(runs, [(0, 0, 3), (6, 3, 3)]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn runs(&self, mut f: impl FnMut(usize, usize, usize)) {
        let mut runs = Runs::new(&mut f);
        runs.add(&self.len, (self.a_offset, &self.a_strides), (self.b_offset, &self.b_strides));
        runs.finish();
    }
}
