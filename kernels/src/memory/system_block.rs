//! Blocks of memory from the system, for the pools of [`storage`](super::storage).
//!
//! A fresh page costs a fault when it is first written, which takes longer than the kernels' work on it. So large blocks
//! ask for huge pages, and are not written here: the system's fresh pages are zeros.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use memmap2::MmapMut;

/// The alignment of blocks in bytes: that of the widest vector and of a cache line.
pub(crate) const ALIGN: usize = 64;

/// The size from which a block is large. A block of this size contains a whole huge page.
const LARGE_BYTES: usize = 2 * HUGE_PAGE_BYTES;

/// The size of a huge page of the common instruction sets.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The size from which a block begins with a huge page, so that the first of its bytes lie in one.
pub(crate) const WHOLE_PAGES_BYTES: usize = 8 * HUGE_PAGE_BYTES;

/// The alignment that every allocation has without being asked. Zeros of a larger alignment are written one by one.
const FREE_ALIGN: usize = align_of::<usize>();

/// The bytes that blocks leave to others: to the standard library's lists, whose lack ends the process. They carry an error
/// that no block was there for.
const SPARE_BYTES: usize = 4 << 20;

/// Held by a thread that looks for room, so that each finds what the others have left.
static LOOKING: Mutex<()> = Mutex::new(());

/// Returns a block of zeros, aligned to [`ALIGN`] bytes, if the system has one and [`SPARE_BYTES`] more. `len_bytes` is not 0.
pub(crate) fn allocate(len_bytes: usize) -> Option<NonNull<u8>> {
    let layout = layout_of(len_bytes)?;
    let start = {
        let _alone = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
        if !has_room(layout.size()) {
            return None;
        }
        // SAFETY: the layout has a non-zero size.
        NonNull::new(unsafe { alloc_zeroed(layout) })?
    };
    if len_bytes < LARGE_BYTES {
        return Some(start);
    }
    ask_for_huge_pages(start, layout.size());
    // The distance from the allocation's start is kept right before the block.
    let first = start.addr().get() + size_of::<usize>();
    let offset = first.next_multiple_of(large_align(len_bytes)) - start.addr().get();
    // SAFETY: the layout has room for the offset, of at most `size_of::<usize>() + large_align` bytes, before the block.
    unsafe {
        let block = start.add(offset);
        block.cast::<usize>().sub(1).write(offset);
        Some(block)
    }
}

/// Returns true if the system has so many bytes and [`SPARE_BYTES`]: it maps them, and takes them back before a page is
/// written. Miri's system has memory without end.
fn has_room(len_bytes: usize) -> bool {
    cfg!(miri) || MmapMut::map_anon(len_bytes.saturating_add(SPARE_BYTES)).is_ok()
}

/// Gives a block back.
///
/// # Safety
/// [`allocate`] returned the block for `len_bytes`, and no pointers into it are used any more.
pub(crate) unsafe fn free(block: NonNull<u8>, len_bytes: usize) {
    let layout = layout_of(len_bytes).expect("the block was allocated with this layout");
    // SAFETY: `allocate` has written the offset of a large block, and the block was allocated with this layout.
    unsafe {
        let offset = if len_bytes < LARGE_BYTES { 0 } else { block.cast::<usize>().sub(1).read() };
        dealloc(block.sub(offset).as_ptr(), layout);
    }
}

/// Returns the layout of a block's allocation, or `None` if it is larger than any address space.
fn layout_of(len_bytes: usize) -> Option<Layout> {
    if len_bytes < LARGE_BYTES {
        return Layout::from_size_align(len_bytes, ALIGN).ok();
    }
    let before = size_of::<usize>() + large_align(len_bytes);
    Layout::from_size_align(len_bytes.checked_add(before)?, FREE_ALIGN).ok()
}

/// Returns the alignment of a large block.
fn large_align(len_bytes: usize) -> usize {
    if len_bytes < WHOLE_PAGES_BYTES { ALIGN } else { HUGE_PAGE_BYTES }
}

/// Asks the system for huge pages inside an allocation. It may not have any, which changes nothing but the speed.
#[cfg(all(target_os = "linux", not(miri)))]
fn ask_for_huge_pages(start: NonNull<u8>, len_bytes: usize) {
    use std::ffi::{c_int, c_void};
    unsafe extern "C" {
        fn madvise(start: *mut c_void, len_bytes: usize, advice: c_int) -> c_int;
    }
    const MADV_HUGEPAGE: c_int = 14;
    let skipped = start.addr().get().next_multiple_of(HUGE_PAGE_BYTES) - start.addr().get();
    let whole = len_bytes.saturating_sub(skipped) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if whole > 0 {
        // SAFETY: the range is part of the allocation, and the advice changes no byte of it.
        unsafe { madvise(start.as_ptr().add(skipped).cast(), whole, MADV_HUGEPAGE) };
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn ask_for_huge_pages(_: NonNull<u8>, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_all_sizes_are_aligned_zeros() {
        // Miri looks at some bytes.
        let step = if cfg!(miri) { 4093 } else { 1 };
        let large = [LARGE_BYTES - 64, LARGE_BYTES, LARGE_BYTES + 64, 5 * LARGE_BYTES];
        for len in [64, 4096, WHOLE_PAGES_BYTES - 64, WHOLE_PAGES_BYTES].into_iter().chain(large) {
            // The second block may have the first one's place, and so bytes that are not zeros yet.
            for _ in 0..2 {
                let block = allocate(len).expect("there is room");
                let align = if len < WHOLE_PAGES_BYTES { ALIGN } else { HUGE_PAGE_BYTES };
                assert_eq!(block.addr().get() % align, 0, "{len}");
                // SAFETY: the block has `len` bytes, and ends with the loop.
                let bytes = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), len) };
                assert!(bytes.iter().step_by(step).all(|&b| b == 0) && bytes[len - 1] == 0, "{len}");
                bytes.fill(0xff);
                // SAFETY: as above.
                unsafe { free(block, len) };
            }
        }
        // Miri ends the program if its own memory is short.
        assert!(allocate(usize::MAX).is_none() && (cfg!(miri) || allocate(1 << 60).is_none()));
    }

    /// The number of page faults of this thread so far, from the system's count.
    #[cfg(all(target_os = "linux", not(miri)))]
    fn faults() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("Linux has it");
        // The tenth field; the second one ends with a parenthesis.
        stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(7)?.parse().ok()).expect("a number")
    }

    /// The pool keeps large results, so only the first step pays for their pages.
    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn later_steps_have_no_page_faults() {
        use crate::memory::{PoolBlock, trim_pool};
        trim_pool();
        let full = |bytes: usize| {
            let mut block = PoolBlock::uninit(bytes).expect("there is room");
            // SAFETY: the block has these bytes, and this is its only owner.
            unsafe { block.as_mut_ptr().write_bytes(1, bytes) };
            block
        };
        let step = || {
            let before = faults();
            let x = full(16 << 20);
            drop((full(12 << 20), x));
            faults() - before
        };
        let (first, later) = (step(), [step(), step()]);
        // 28 MiB are 7,168 pages of 4 KiB.
        assert!(later.iter().all(|&n| n < 50), "{first} faults, then {later:?}");
    }
}
