//! The scratch memory of a thread, kept from call to call.

use std::cell::Cell;

use super::super::real::Num;

/// The largest scratch memory that a thread keeps after a call.
const KEEP_BYTES: usize = 10 << 20;

/// A cache line; its alignment suits the widest vectors.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

thread_local! {
    static SCRATCH: Cell<Vec<u64>> = const { Cell::new(Vec::new()) };
}

/// Calls `f` with arrays of these lengths, aligned to cache lines, with arbitrary contents.
pub(super) fn with_scratch<T: Num, const N: usize>(lens: [usize; N], f: impl FnOnce([&mut [T]; N])) {
    let per_line = size_of::<CacheLine>() / size_of::<T>();
    let lines = lens.map(|len| len.div_ceil(per_line));
    let mut scratch = SCRATCH.take();
    let wanted: usize = lines.iter().sum();
    // A line more, since the memory may begin inside one. The system gives zeros when they are first touched.
    let words = (wanted + 1) * (size_of::<CacheLine>() / size_of::<u64>());
    if scratch.len() < words {
        scratch = vec![0; words];
    }
    // SAFETY: every bit pattern is a line.
    let (_, mut rest, _) = unsafe { scratch.align_to_mut::<CacheLine>() };
    assert!(rest.len() >= wanted, "the memory covers the lines");
    let arrays = std::array::from_fn(|i| {
        let (array, after) = std::mem::take(&mut rest).split_at_mut(lines[i]);
        rest = after;
        // SAFETY: the memory is initialised, aligned, long enough and borrowed exclusively; every bit pattern is a
        // number.
        unsafe { std::slice::from_raw_parts_mut(array.as_mut_ptr().cast::<T>(), lens[i]) }
    });
    f(arrays);
    if size_of_val(&scratch[..]) <= KEEP_BYTES {
        SCRATCH.set(scratch);
    }
}
