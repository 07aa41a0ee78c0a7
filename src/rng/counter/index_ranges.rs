//! The elements that a fill writes: one range of global indices, or the many ranges of a shard.

use std::ops::Range;

use crate::error::Result;
use crate::placement::Region;
use crate::tensor::Shape;

/// The elements of a fill: a `u64`, the global linear index of a range's first element, or [`IndexRanges`]. Sealed.
#[expect(private_bounds, reason = "sealed")]
pub trait Indices: IndexSource {}

impl<I: IndexSource> Indices for I {}

/// Ranges of ascending global indices, one after another in local storage. The last range ends with the output.
///
/// One fill of many short ranges costs less than one fill per range. From about 400 elements per range it costs as much per
/// element as a single range.
///
/// ```
/// use isoshard::{placement::{Mesh, Spec}, rng::{Generator, IndexRanges, uniform}};
/// let mesh = Mesh::parse("tp=2", 1)?;
/// let spec = Spec::parse("f32[3, 6]@(tp:S1)", &mesh)?;
/// let draw = Generator::new(7).next_draw();
/// let (mut whole, mut part) = ([0.0f32; 18], [0.0f32; 9]);
/// uniform(draw, 0, &mut whole);
/// IndexRanges::of(&spec.region(), &spec.shape, |at, here| {
///     uniform(draw, at, &mut part[here]);
///     Ok(())
/// })?;
/// assert_eq!(part[3..6], whole[9..12]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct IndexRanges<'a> {
    /// The global index of the first element.
    first: u64,
    /// Its local offset. Only distances between offsets matter.
    offset: usize,
    rest: &'a [IndexRange],
}

impl IndexRanges<'_> {
    /// Calls `fill` with the index ranges of a region of a tensor of shape `global`, many at a time, and with their place in
    /// the region's local storage.
    ///
    /// ```
    /// use isoshard::{placement::{Mesh, Spec}, rng::IndexRanges};
    /// let mesh = Mesh::parse("tp=2", 1)?; // rank 1 stores columns 2 and 3
    /// let spec = Spec::parse("f32[2, 4]@(tp:S1)", &mesh)?;
    /// IndexRanges::of(&spec.region(), &spec.shape, |at, here| {
    ///     assert_eq!(here.map(|i| at.index(i)).collect::<Vec<_>>(), [2, 3, 6, 7]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the first error of `fill`, which is not called again.
    pub fn of(
        region: &Region,
        global: &Shape,
        mut fill: impl FnMut(IndexRanges<'_>, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        IndexRanges::batches(region, global, &mut fill)
    }

    fn batches(
        region: &Region,
        global: &Shape,
        fill: &mut dyn FnMut(IndexRanges<'_>, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let mut some = [IndexRange::default(); BATCH];
        let (mut len, mut end) = (0, 0);
        let mut done = Ok(());
        let mut flush = |some: &[IndexRange], end: usize| {
            if let ([first, rest @ ..], Ok(())) = (some, &done) {
                let all = IndexRanges { first: first.global, offset: first.offset, rest };
                done = fill(all, first.offset..end);
            }
        };
        region.runs(global, |start, offset, run_len| {
            if len == BATCH {
                flush(&some, end);
                len = 0;
            }
            some[len] = IndexRange { global: start, offset };
            (len, end) = (len + 1, offset + run_len);
        });
        flush(&some[..len], end);
        done
    }

    /// Returns the global index of element `i`. The example is at [`IndexRanges::of`].
    ///
    /// ```
    /// # use isoshard::{placement::Region, rng::IndexRanges};
    /// # IndexRanges::of(&Region::whole(&[3].into()), &[3].into(), |at, _| {
    /// assert_eq!(at.index(2), 2); // of a whole tensor
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    #[inline]
    pub fn index(&self, i: usize) -> u64 {
        let offset = self.offset.wrapping_add(i);
        match self.rest[..self.rest.partition_point(|s| s.offset <= offset)].last() {
            None => self.first.wrapping_add(i as u64),
            Some(s) => s.global.wrapping_add((offset - s.offset) as u64),
        }
    }

    /// Returns the global index of the first element.
    #[inline(always)]
    pub(in crate::rng) fn first(&self) -> u64 {
        self.first
    }

    /// Returns the length of the first range.
    #[inline(always)]
    pub(in crate::rng) fn first_len(&self) -> usize {
        self.rest.first().map_or(usize::MAX, |next| next.offset - self.offset)
    }

    /// Returns the ranges without the first `len` elements.
    pub(crate) fn after(mut self, len: usize) -> Self {
        self.advance(len);
        self
    }

    /// Skips the first `len` elements.
    #[inline(always)]
    pub(in crate::rng) fn advance(&mut self, len: usize) {
        let mut left = len;
        while let Some((next, rest)) = self.rest.split_first()
            && next.offset - self.offset <= left
        {
            left -= next.offset - self.offset;
            *self = IndexRanges { first: next.global, offset: next.offset, rest };
        }
        self.first = self.first.wrapping_add(left as u64);
        // In the last range offsets do not matter.
        self.offset = self.offset.wrapping_add(left);
    }

    /// Writes the global indices of the first elements.
    #[inline(always)]
    pub(in crate::rng) fn write(mut self, out: &mut [u64]) {
        let mut at = 0;
        while at < out.len() {
            let len = self.first_len().min(out.len() - at);
            for (i, out) in out[at..at + len].iter_mut().enumerate() {
                *out = self.first.wrapping_add(i as u64);
            }
            self.advance(len);
            at += len;
        }
    }
}

/// Ranges per call of `fill`.
const BATCH: usize = 256;

/// The start of one range.
#[derive(Clone, Copy, Debug, Default)]
struct IndexRange {
    global: u64,
    offset: usize,
}

/// The ranges behind [`Indices`].
pub(crate) trait IndexSource: Copy {
    /// Returns the ranges.
    fn ranges(&self) -> IndexRanges<'_>;
}

impl IndexSource for u64 {
    #[inline(always)]
    fn ranges(&self) -> IndexRanges<'_> {
        IndexRanges { first: *self, offset: 0, rest: &[] }
    }
}

impl IndexSource for IndexRanges<'_> {
    #[inline(always)]
    fn ranges(&self) -> IndexRanges<'_> {
        *self
    }
}
