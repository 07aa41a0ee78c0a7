//! A large all-reduce, done once for all members, by whoever waits for it.
//!
//! Members take chunks of the result in turn and fold them from everybody's tensors. No chunk belongs to a rank, so
//! nobody waits for one that does not wait itself.

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use super::slot::Slot;
use crate::comm::fold::fold_range;
use crate::tensor::{ReduceOp, Tensor};

/// Small enough to share the work evenly, large enough that taking one costs nothing.
const CHUNK_BYTES: usize = 256 << 10;

/// The result in the making.
#[derive(Debug)]
pub(super) struct Reduction {
    /// Not read before all chunks are done.
    out: Tensor,
    /// The first byte of `out`.
    at: AtomicPtr<u8>,
    chunk_len: usize,
    chunks: usize,
    taken: AtomicUsize,
    done: AtomicUsize,
}

impl Reduction {
    /// Room for the reduction of tensors like this one.
    pub(super) fn like(x: &Tensor) -> Reduction {
        let mut out = Tensor::stale(x.dtype(), x.shape());
        let at = AtomicPtr::new(out.bytes_mut().as_mut_ptr());
        let chunk_len = CHUNK_BYTES / x.dtype().size_bytes();
        let chunks = x.numel().div_ceil(chunk_len);
        Reduction { out, at, chunk_len, chunks, taken: AtomicUsize::new(0), done: AtomicUsize::new(0) }
    }

    /// Folds chunks until none is left to take; true if the last one was finished here.
    pub(super) fn work(&self, op: ReduceOp, slot: &Slot) -> bool {
        let size = self.out.dtype().size_bytes();
        let mut last = false;
        loop {
            let chunk = self.taken.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.chunks {
                return last;
            }
            let start = chunk * self.chunk_len;
            let end = (start + self.chunk_len).min(self.out.numel());
            // SAFETY: `at` points to the buffer of `out`, which this structure keeps alive, gives to nobody and does
            // not read until `done` equals `chunks`. Chunk numbers are handed out once each and their ranges are
            // disjoint and inside `out`, so this is the only access to these (initialised) bytes.
            let bytes = unsafe {
                let first = self.at.load(Ordering::Relaxed).add(start * size);
                std::slice::from_raw_parts_mut(first, (end - start) * size)
            };
            fold_range(op, slot.contributions(), start..end, bytes);
            last = self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.chunks;
        }
    }

    /// True once every chunk is finished.
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.chunks
    }

    /// The result, shared by all members.
    pub(super) fn result(&self) -> Tensor {
        assert!(self.is_done(), "chunks are still being written");
        self.out.clone()
    }
}
