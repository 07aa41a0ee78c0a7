//! Memory use of dispatch, collectives, bridges, packed documents, layout queries and dry runs. This program's
//! allocator counts per thread, so that tests may run at the same time.

mod bridge;
mod checkpoint;
mod comm;
mod dispatch;
mod documents;
mod dry;
mod fsdp_scale;
mod placement;
mod recompute;
mod scale;
mod scale_page;
mod shapes;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
    static TAKEN: Cell<usize> = const { Cell::new(0) };
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// The number of allocations of this thread so far.
fn calls() -> usize {
    CALLS.get()
}

/// The bytes of all blocks of 4096 bytes or more that this thread has allocated so far: those of tensors.
fn taken() -> usize {
    TAKEN.get()
}

/// Returns the result of `f`, and the largest number of bytes that this thread held meanwhile, beyond those held
/// before.
fn peak_of<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = f();
    (result, (PEAK.get() - before) as usize)
}

fn count(bytes: usize) {
    CALLS.set(CALLS.get() + 1);
    if bytes >= 4096 {
        TAKEN.set(TAKEN.get() + bytes);
    }
    LIVE.set(LIVE.get() + bytes as isize);
    PEAK.set(PEAK.get().max(LIVE.get()));
}

// SAFETY: every call goes to the system allocator unchanged; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, memory: Layout) -> *mut u8 {
        count(memory.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(memory) }
    }

    unsafe fn alloc_zeroed(&self, memory: Layout) -> *mut u8 {
        count(memory.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(memory) }
    }

    unsafe fn dealloc(&self, at: *mut u8, memory: Layout) {
        LIVE.set(LIVE.get() - memory.size() as isize);
        // SAFETY: `at` came from above, so from the system allocator.
        unsafe { System.dealloc(at, memory) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;
