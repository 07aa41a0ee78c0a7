//! The scratch memory of a thread, kept from call to call.

use std::cell::Cell;
use std::sync::Arc;

use crate::isa::caches::CACHE_LINE_BYTES;
use crate::memory::segments::Segment;
use crate::memory::system_block::WHOLE_PAGES_BYTES;
use crate::memory::{no_room, unwind};
use crate::num::real::Num;

/// The largest scratch memory that a thread keeps after a call.
const KEEP_BYTES: usize = 10 << 20;
/// From this size on, scratch memory is the start of a longer segment, which lies in huge pages. Bytes that are not used take
/// addresses, not memory.
const HUGE_FROM_BYTES: usize = 256 << 10;

thread_local! {
    /// Nothing else has this segment.
    static SCRATCH: Cell<Option<Arc<Segment>>> = const { Cell::new(None) };
}

/// Calls `f` with arrays of these lengths, aligned to cache lines, with arbitrary contents. Unwinds up to [`catch`](crate::memory::catch) if the
/// system has no room.
pub(in crate::gemm) fn with_scratch<T: Num, const N: usize>(lens: [usize; N], f: impl FnOnce([&mut [T]; N])) {
    let per_line = CACHE_LINE_BYTES / size_of::<T>();
    let lines = lens.map(|len| len.div_ceil(per_line));
    let wanted = lines.iter().sum::<usize>().max(1).saturating_mul(CACHE_LINE_BYTES);
    let kept = SCRATCH.take().filter(|kept| kept.len_bytes() >= wanted);
    let scratch = kept.unwrap_or_else(|| segment::<T>(wanted));
    assert!(scratch.len_bytes() >= wanted, "the memory covers the lines");
    // SAFETY: the segment has these initialised bytes, and begins with a line; nothing else uses it before this function
    // returns; every bit pattern is a number.
    let mut rest = unsafe {
        std::slice::from_raw_parts_mut(scratch.start().cast::<T>().as_ptr(), wanted / size_of::<T>())
    };
    let arrays = std::array::from_fn(|i| {
        let (array, after) = std::mem::take(&mut rest).split_at_mut(lines[i] * per_line);
        rest = after;
        &mut array[..lens[i]]
    });
    f(arrays);
    if wanted <= KEEP_BYTES {
        SCRATCH.set(Some(scratch));
    }
}

/// Returns a segment of at least `wanted` bytes.
fn segment<T>(wanted: usize) -> Arc<Segment> {
    let is_huge = (HUGE_FROM_BYTES..=KEEP_BYTES).contains(&wanted) && !cfg!(miri);
    let huge = is_huge.then(|| Segment::new(WHOLE_PAGES_BYTES)).flatten();
    huge.or_else(|| Segment::new(wanted)).unwrap_or_else(|| {
        let numbers = wanted / size_of::<T>();
        unwind(no_room(format!("a list of {numbers} numbers"), wanted))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{catch, fault_of};

    /// Arrays of one call and of a call inside it do not overlap.
    #[test]
    fn arrays_are_apart_and_begin_with_lines() {
        for lens in [[5, 0, 17], [70_000, 1, 300], [1, 1, 1]] {
            with_scratch::<f32, 3>(lens, |outer| {
                assert_eq!([0, 1, 2].map(|i| outer[i].len()), lens);
                assert!(outer.iter().all(|array| array.as_ptr().addr().is_multiple_of(CACHE_LINE_BYTES)));
                let mut number = 0.0;
                for array in outer {
                    number += 1.0;
                    array.fill(number);
                    with_scratch::<f64, 2>([9, 40_000], |inner| inner.into_iter().for_each(|x| x.fill(-1.0)));
                    assert!(array.iter().all(|&x| x == number));
                }
            });
        }
        with_scratch::<f32, 2>([33, 33], |[one, other]| {
            one.fill(1.0);
            other.fill(2.0);
            assert!(one.iter().all(|&x| x == 1.0));
        });
    }

    /// The next call has the memory of the last one, which had more.
    #[test]
    fn memory_is_kept_up_to_a_bound() {
        let place = |len: usize| {
            let mut place = 0;
            with_scratch::<f32, 1>([len], |[array]| place = array.as_ptr().addr());
            place
        };
        let first = place(100_000);
        assert!(place(100_000) == first && place(7) == first);
        place(KEEP_BYTES / 4 + 1);
        assert!(SCRATCH.take().is_none(), "more than the bound is not kept");
    }

    #[test]
    fn memory_that_no_system_has_is_an_error() {
        let called = |lens: [usize; 2]| {
            let run = || with_scratch::<f32, 2>(lens, |_| unreachable!("there is no such memory"));
            fault_of(catch(run).unwrap_err()).expect("a fault").to_string()
        };
        for lens in [[usize::MAX; 2], [1, usize::MAX / 8]] {
            assert!(called(lens).contains("a list of "), "{}", called(lens));
        }
    }
}
