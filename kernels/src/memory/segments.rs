//! Large blocks of a thread's pool: spans of segments, which are blocks from the system.
//!
//! The tensors of a step differ in size: what the forward pass keeps makes room for gradients, which are shorter. So a free
//! span is divided for a shorter block, and spans that are free side by side are one. A request takes the shortest span
//! that is long enough.

use std::ptr::NonNull;
use std::sync::Arc;

use super::system_block;

/// The shortest span in bytes. Shorter blocks have size classes instead, which are faster to find.
pub(crate) const MIN_SPAN_BYTES: usize = 128 << 10;
/// Lengths are multiples of a page.
const PAGE_BYTES: usize = 4096;
/// The length of a segment that shorter spans share, so that they lie side by side in huge pages. Bytes that no span has
/// used take addresses, not memory. (Lengths that grow with the pool from 8 MiB on cost a step of GPT-2's kind 268 MiB instead
/// of 254.)
pub(crate) const SHARED_BYTES: usize = 64 << 20;
/// The size of a pool from which its segments are shared: a smaller one takes no more than it needs.
pub(crate) const SHARED_FROM_BYTES: usize = 1 << 20;

/// A block from the system, which goes back when neither its pool nor a buffer uses it.
pub(crate) struct Segment {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: a segment is only an address and a length; buffers own its bytes.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Returns a segment of zeros, or `None` if the system has no room. `len_bytes` is not 0.
    pub(crate) fn new(len_bytes: usize) -> Option<Arc<Segment>> {
        Some(Arc::new(Segment { start: system_block::allocate(len_bytes)?, len_bytes }))
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the block was allocated with this length; buffers in it hold the segment, so there are none.
        unsafe { system_block::free(self.start, self.len_bytes) };
    }
}

/// Returns the bytes of the span that a block of `len_bytes` takes, or `None` if no address space has so many.
pub(crate) fn span_bytes(len_bytes: usize) -> Option<usize> {
    len_bytes.max(MIN_SPAN_BYTES).checked_next_multiple_of(PAGE_BYTES)
}

/// A part of a segment.
struct Span {
    start: NonNull<u8>,
    len_bytes: usize,
    is_free: bool,
    segment: Arc<Segment>,
}

impl Span {
    fn is_whole_segment(&self) -> bool {
        self.len_bytes == self.segment.len_bytes
    }
}

/// The spans of a pool's segments, by address: together they are all bytes of the segments.
#[derive(Default)]
pub(crate) struct SpanList {
    spans: Vec<Span>,
}

impl SpanList {
    /// Adds a free segment.
    pub(crate) fn add(&mut self, segment: Arc<Segment>) {
        let (start, len_bytes) = (segment.start, segment.len_bytes);
        let at = self.spans.partition_point(|span| span.start < start);
        self.spans.insert(at, Span { start, len_bytes, is_free: true, segment });
    }

    /// Takes the shortest free span of `wanted` bytes or more, without what it has beyond them. Returns its start, its
    /// length and its segment.
    pub(crate) fn take(&mut self, wanted: usize) -> Option<(NonNull<u8>, usize, Arc<Segment>)> {
        let fits = |(_, span): &(usize, &Span)| span.is_free && span.len_bytes >= wanted;
        let (at, _) = self.spans.iter().enumerate().filter(fits).min_by_key(|(_, span)| span.len_bytes)?;
        let span = &mut self.spans[at];
        span.is_free = false;
        let (start, segment) = (span.start, span.segment.clone());
        let rest = span.len_bytes - wanted;
        if rest < MIN_SPAN_BYTES {
            return Some((start, span.len_bytes, segment));
        }
        span.len_bytes = wanted;
        // SAFETY: the rest is the end of the span, inside its segment.
        let after = unsafe { start.add(wanted) };
        let rest = Span { start: after, len_bytes: rest, is_free: true, segment: segment.clone() };
        self.spans.insert(at + 1, rest);
        Some((start, wanted, segment))
    }

    /// Takes a span back, and returns its length.
    ///
    /// # Panics
    /// Panics if no taken span starts there.
    pub(crate) fn give(&mut self, start: NonNull<u8>) -> usize {
        let at = self.spans.binary_search_by_key(&start, |span| span.start).expect("a span of this pool");
        let span = &mut self.spans[at];
        assert!(!std::mem::replace(&mut span.is_free, true), "a span is given back once");
        let len_bytes = span.len_bytes;
        self.join_next(at);
        if at > 0 {
            self.join_next(at - 1);
        }
        len_bytes
    }

    /// Makes a span and the next one of its segment one, if both are free.
    fn join_next(&mut self, at: usize) {
        let [span, next] = match self.spans.get_mut(at..at + 2) {
            Some([span, next]) => [span, next],
            _ => return,
        };
        if span.is_free && next.is_free && Arc::ptr_eq(&span.segment, &next.segment) {
            span.len_bytes += next.len_bytes;
            self.spans.remove(at + 1);
        }
    }

    /// Gives segments that are free as a whole back to the system, until these are `bytes` or more. Returns their bytes.
    pub(crate) fn trim(&mut self, bytes: usize) -> usize {
        let mut freed = 0;
        if bytes == 0 {
            return freed;
        }
        self.spans.retain(|span| {
            let goes_back = freed < bytes && span.is_free && span.is_whole_segment();
            freed += if goes_back { span.len_bytes } else { 0 };
            !goes_back
        });
        freed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{PoolBlock, pool_stats, set_memory_limit};

    /// Nothing touches the blocks, so that they take addresses and no memory.
    #[test]
    fn a_full_pool_gives_back_only_what_exceeds_its_limit() {
        if cfg!(miri) {
            return;
        }
        std::thread::spawn(|| {
            let blocks = [1; 3].map(|gib: usize| PoolBlock::uninit(gib << 30).expect("there are addresses"));
            assert_eq!(pool_stats().live_bytes, 3 << 30);
            drop(blocks);
            assert_eq!((pool_stats().live_bytes, pool_stats().free_bytes), (0, 2 << 30));
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn short_spans_share_a_segment_unless_the_limit_is_near() {
        if cfg!(miri) {
            return;
        }
        for (limit_bytes, free_bytes) in [(usize::MAX, SHARED_BYTES - (3 << 20)), (100 << 20, 0)] {
            let run = move || {
                set_memory_limit(limit_bytes);
                let _first = [512 << 10; 2].map(PoolBlock::uninit);
                assert_eq!(pool_stats().free_bytes, 0, "a small pool takes what it needs");
                let _more = [2 << 20, 1 << 20].map(PoolBlock::uninit);
                assert_eq!(pool_stats().free_bytes, free_bytes);
                let _long = PoolBlock::uninit(SHARED_BYTES + 1);
                assert_eq!(pool_stats().free_bytes, free_bytes);
            };
            std::thread::spawn(run).join().expect("no panic");
        }
    }

    impl SpanList {
        fn grow_and_take(&mut self, wanted: usize) -> (NonNull<u8>, usize) {
            let taken = self.take(wanted).or_else(|| {
                self.add(Segment::new(wanted).expect("there is room"));
                self.take(wanted)
            });
            let (start, len_bytes, _) = taken.expect("a segment that is long enough");
            (start, len_bytes)
        }

        /// Checks that spans cover their segments, and that no two free ones are neighbours.
        fn check(&self) {
            let mut end = None;
            for (i, span) in self.spans.iter().enumerate() {
                let (start, segment) = (span.start.addr().get(), span.segment.start.addr().get());
                assert!(end.is_none_or(|end| start >= end), "spans overlap");
                let before = i.checked_sub(1).map(|i| &self.spans[i]);
                match before.filter(|before| Arc::ptr_eq(&before.segment, &span.segment)) {
                    Some(before) => {
                        assert_eq!(end, Some(start));
                        assert!(!(before.is_free && span.is_free), "free neighbours are one span");
                    }
                    None => assert_eq!(start, segment),
                }
                assert!(start + span.len_bytes <= segment + span.segment.len_bytes);
                end = Some(start + span.len_bytes);
            }
            let (spans, mut segments) = (self.spans.iter(), self.spans.iter().collect::<Vec<_>>());
            segments.dedup_by(|a, b| Arc::ptr_eq(&a.segment, &b.segment));
            let of_segments: usize = segments.iter().map(|span| span.segment.len_bytes).sum();
            assert_eq!(spans.map(|span| span.len_bytes).sum::<usize>(), of_segments);
        }
    }

    #[test]
    fn random_requests_never_overlap_and_all_bytes_come_back() {
        let (mut list, mut taken, mut state) = (SpanList::default(), Vec::new(), 7u64);
        let mut random = |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        for _ in 0..if cfg!(miri) { 60 } else { 3000 } {
            if taken.is_empty() || random(5) < 3 && taken.len() < 60 {
                let wanted = span_bytes(random(1 << 20)).unwrap();
                let (start, len_bytes) = list.grow_and_take(wanted);
                assert!((wanted..wanted + MIN_SPAN_BYTES).contains(&len_bytes));
                taken.push((start, len_bytes));
            } else {
                let (start, len_bytes) = taken.swap_remove(random(taken.len()));
                assert_eq!(list.give(start), len_bytes);
            }
            list.check();
        }
        let all: usize = list.spans.iter().map(|span| span.len_bytes).sum();
        taken.iter().for_each(|&(start, _)| assert!(list.give(start) > 0));
        assert!(list.spans.iter().all(Span::is_whole_segment), "free neighbours were joined");
        assert!(list.trim(1) > 0 && list.trim(0) == 0, "one segment, and none");
        assert!(list.trim(usize::MAX) < all && list.spans.is_empty());
    }

    /// The place of a long block serves several shorter ones.
    #[test]
    fn a_long_span_is_divided_and_joined_again() {
        let mut list = SpanList::default();
        let (long, _) = list.grow_and_take(1 << 20);
        list.give(long);
        let short: Vec<_> = (0..4).map(|_| list.grow_and_take(256 << 10).0).collect();
        assert!(short[0] == long && list.spans.len() == 4, "no further segment");
        assert_eq!(list.trim(usize::MAX), 0, "the segment is in use");
        for i in [1, 3, 0, 2] {
            list.give(short[i]);
        }
        assert_eq!(list.grow_and_take(1 << 20), (long, 1 << 20));
    }

    #[test]
    fn lengths_are_whole_pages() {
        assert_eq!(span_bytes(0), Some(MIN_SPAN_BYTES));
        assert_eq!(span_bytes((1 << 20) + 1), Some((1 << 20) + PAGE_BYTES));
        assert_eq!(span_bytes(usize::MAX), None);
    }
}
