//! The scratch memory of a thread, kept from call to call.

use std::cell::Cell;
use std::sync::Arc;

use super::super::caches::CACHE_LINE_BYTES;
use super::super::real::Num;
use crate::tensor::no_room::unwind;
use crate::tensor::pool::no_room;
use crate::tensor::segments::Segment;

/// The largest scratch memory that a thread keeps after a call.
const KEEP_BYTES: usize = 10 << 20;
/// From this size on, scratch memory is a part of a longer segment, which lies in huge pages. Bytes that are not used take
/// addresses, not memory.
const HUGE_FROM_BYTES: usize = 256 << 10;
const HUGE_BYTES: usize = 16 << 20;

thread_local! {
    /// Nothing else has this segment.
    static SCRATCH: Cell<Option<Arc<Segment>>> = const { Cell::new(None) };
}

/// Calls `f` with arrays of these lengths, aligned to cache lines, with arbitrary contents.
pub(super) fn with_scratch<T: Num, const N: usize>(lens: [usize; N], f: impl FnOnce([&mut [T]; N])) {
    let lines = lens.map(|len| len.div_ceil(CACHE_LINE_BYTES / size_of::<T>()));
    let wanted = lines.iter().sum::<usize>().max(1).saturating_mul(CACHE_LINE_BYTES);
    let kept = SCRATCH.take().filter(|kept| kept.len_bytes() >= wanted);
    let scratch = kept.unwrap_or_else(|| segment::<T>(wanted));
    let mut start = scratch.start().cast::<T>();
    let arrays = std::array::from_fn(|i| {
        let array = start;
        // SAFETY: the lines lie one after the other inside the segment, which nothing else uses before this function returns.
        // It begins with a line, its bytes are initialised, and every bit pattern is a number.
        unsafe {
            start = start.add(lines[i] * (CACHE_LINE_BYTES / size_of::<T>()));
            std::slice::from_raw_parts_mut(array.as_ptr(), lens[i])
        }
    });
    f(arrays);
    if wanted <= KEEP_BYTES {
        SCRATCH.set(Some(scratch));
    }
}

/// Returns a segment of at least `wanted` bytes. Unwinds up to `catch_no_room` if the system has no room.
fn segment<T>(wanted: usize) -> Arc<Segment> {
    let is_huge = (HUGE_FROM_BYTES..=KEEP_BYTES).contains(&wanted) && !cfg!(miri);
    let huge = is_huge.then(|| Segment::new(HUGE_BYTES)).flatten();
    let segment = huge.or_else(|| Segment::new(wanted));
    segment
        .unwrap_or_else(|| unwind(no_room(format!("a list of {} numbers", wanted / size_of::<T>()), wanted)))
}
