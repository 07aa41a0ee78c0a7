//! A large all-reduce, done once for all members, by whoever waits for it.
//!
//! Members take chunks of the result in turn and fold them from everybody's tensors. No chunk belongs to a rank, so
//! nobody waits for one that does not wait itself.

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use super::slot::Slot;
use crate::comm::Reduce;
use crate::comm::fold::fold_range;
use crate::tensor::{DType, Tensor};

/// Small enough to share the work evenly, large enough that taking one costs nothing.
const CHUNK_BYTES: usize = 256 << 10;

/// The result in the making.
#[derive(Debug)]
pub(super) struct Reduction {
    reduce: Reduce,
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
    /// Room for the results.
    pub(super) fn new(reduce: &Reduce, dtype: DType) -> Reduction {
        let mut out = Tensor::stale(dtype, reduce.out_shape());
        let at = AtomicPtr::new(out.bytes_mut().as_mut_ptr());
        let chunk_len = CHUNK_BYTES / dtype.size_bytes();
        let chunks = reduce.shape.numel().div_ceil(chunk_len);
        let (taken, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Reduction { reduce: reduce.clone(), out, at, chunk_len, chunks, taken, done }
    }

    /// Folds chunks until none is left to take; true if the last one was finished here.
    pub(super) fn work(&self, slot: &Slot) -> bool {
        let (size, each) = (self.out.dtype().size_bytes(), self.reduce.shape.numel());
        let mut last = false;
        loop {
            let chunk = self.taken.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.chunks {
                return last;
            }
            let start = chunk * self.chunk_len;
            let end = (start + self.chunk_len).min(each);
            let row = |k: usize| {
                // SAFETY: `at` points to the buffer of `out`, which this structure keeps alive, gives to nobody and
                // does not read until `done` equals `chunks`. Chunk numbers are handed out once each; the ranges
                // `start..end` of the rows of `out`, each `each` elements long, are disjoint and inside `out`, so this
                // is the only access to these (initialised) bytes.
                unsafe {
                    let first = self.at.load(Ordering::Relaxed).add((k * each + start) * size);
                    std::slice::from_raw_parts_mut(first, (end - start) * size)
                }
            };
            let rows = (0..self.reduce.order.outs_len()).map(row).collect();
            fold_range(&self.reduce, slot.contributions(), start..end, rows);
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
