//! Work that the members of a call do together, in chunks that they take in turn. No chunk belongs to a rank, so nothing
//! waits for a rank that is not in the call.

use super::sync::atomic::{AtomicUsize, Ordering};

/// The model checkers and Miri run the same work on few elements.
const MODEL: bool = cfg!(any(loom, shuttle, miri));

/// The smallest result that members make together; each makes smaller ones by itself, or the last to arrive does.
pub(super) const LARGE_BYTES: usize = if MODEL { 8 } else { 64 << 10 };

/// The size of a chunk: small enough to share the work evenly, large enough that taking one costs little.
pub(super) const CHUNK_BYTES: usize = if MODEL { 8 } else { 256 << 10 };

/// The numbers of chunks that are left, and of those that are done.
#[derive(Debug)]
pub(super) struct SharedChunks {
    len: usize,
    taken: AtomicUsize,
    done: AtomicUsize,
}

impl SharedChunks {
    pub(super) fn new(len: usize) -> SharedChunks {
        SharedChunks { len, taken: AtomicUsize::new(0), done: AtomicUsize::new(0) }
    }

    /// Calls `f` with the number of each chunk that no member has taken yet, until none is left: each number goes to one
    /// call. Returns true if this finished the last chunk.
    pub(super) fn work(&self, f: impl Fn(usize)) -> bool {
        let mut last = false;
        loop {
            let chunk = self.taken.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.len {
                return last;
            }
            f(chunk);
            last = self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.len;
        }
    }

    /// Returns true once all chunks are done, so that their results can be read.
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.len
    }
}

/// The first byte of memory that members write together.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstByte(pub(super) *mut u8);

// SAFETY: those that write through the pointer say why two threads never touch the same byte.
unsafe impl Send for FirstByte {}
// SAFETY: as above.
unsafe impl Sync for FirstByte {}
