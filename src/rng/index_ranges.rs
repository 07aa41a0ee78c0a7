//! Which elements a fill writes: one range of global indices, or the many stretches that a cut tensor consists of.

use std::ops::Range;

use crate::error::Result;
use crate::placement::Region;
use crate::tensor::Shape;

/// What names the elements of a fill: a `u64`, the global linear index of the first of a range, or [`IndexRanges`].
/// Sealed.
#[expect(private_bounds, reason = "sealed")]
pub trait Indices: IndexSource {}

impl<I: IndexSource> Indices for I {}

/// IndexRanges of ascending global indices, one after another in local storage. The last goes on as far as the output
/// does.
///
/// A fill of many short stretches at once costs less than one of each by itself, and from some 400 elements a stretch on
/// about the same per element as a single range.
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
    /// Its local offset, of which only the distance to those of the rest counts.
    offset: usize,
    rest: &'a [IndexRange],
}

impl IndexRanges<'_> {
    /// Calls `fill` with the stretches of a region of a tensor of shape `global`, and with where in its local storage
    /// they lie, many at a time.
    ///
    /// # Errors
    /// The first of `fill`, which is not called again.
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

    /// The global index of element `i`.
    #[inline]
    pub fn index(&self, i: usize) -> u64 {
        let offset = self.offset.wrapping_add(i);
        match self.rest[..self.rest.partition_point(|s| s.offset <= offset)].last() {
            None => self.first.wrapping_add(i as u64),
            Some(s) => s.global.wrapping_add((offset - s.offset) as u64),
        }
    }

    /// The global index of the first element.
    #[inline(always)]
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// How many elements follow on the first, itself among them.
    #[inline(always)]
    pub(super) fn first_len(&self) -> usize {
        self.rest.first().map_or(usize::MAX, |next| next.offset - self.offset)
    }

    /// Leaves out the first `len` elements.
    #[inline(always)]
    pub(super) fn advance(&mut self, len: usize) {
        let mut left = len;
        while let Some((next, rest)) = self.rest.split_first()
            && next.offset - self.offset <= left
        {
            left -= next.offset - self.offset;
            *self = IndexRanges { first: next.global, offset: next.offset, rest };
        }
        self.first = self.first.wrapping_add(left as u64);
        // Where nothing follows, offsets count no more.
        self.offset = self.offset.wrapping_add(left);
    }

    /// Writes the global indices of the first elements.
    #[inline(always)]
    pub(super) fn write(mut self, out: &mut [u64]) {
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

/// IndexRanges handed out together.
const BATCH: usize = 256;

/// Where a stretch starts.
#[derive(Clone, Copy, Debug, Default)]
struct IndexRange {
    global: u64,
    offset: usize,
}

/// The stretches that stand behind [`Indices`].
pub(crate) trait IndexSource: Copy {
    /// Them.
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
