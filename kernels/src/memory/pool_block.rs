//! Blocks of a thread's pool: short ones have size classes, longer ones are spans of [segments](super::segments).

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::segments::{MIN_SPAN_BYTES, Segment, span_bytes};
use super::system_block;

/// The size of the smallest block.
const MIN_BYTES: usize = 64;
/// The number of size classes, four per doubling, which waste at most a fifth of a block. Longer blocks are spans.
pub(crate) const CLASSES: usize = 4 * (MIN_SPAN_BYTES / MIN_BYTES).ilog2() as usize + 1;

/// The memory of a pool's block.
pub(crate) enum BlockMemory {
    /// A block of a class's length: a part of a segment, or from the system by itself.
    Class { class: usize, segment: Option<Arc<Segment>> },
    /// A span of a segment, which lives as long.
    Span { _segment: Arc<Segment> },
}

/// A pool's block that no buffer uses.
pub(crate) struct FreeBlock {
    pub(crate) ptr: NonNull<u8>,
    pub(crate) memory: BlockMemory,
}

// SAFETY: no pointers into the block exist, so it may be freed or reused on any thread.
unsafe impl Send for FreeBlock {}

impl FreeBlock {
    /// Returns a block of zeros from the system, if it has room.
    pub(crate) fn fresh(len_bytes: usize) -> Option<FreeBlock> {
        if len_bytes > MIN_SPAN_BYTES {
            let segment = Segment::new(span_bytes(len_bytes)?)?;
            return Some(FreeBlock { ptr: segment.start(), memory: BlockMemory::Span { _segment: segment } });
        }
        let class = class_of(len_bytes);
        let ptr = system_block::allocate(class_bytes(class))?;
        Some(FreeBlock { ptr, memory: BlockMemory::Class { class, segment: None } })
    }

    /// Gives the block back to the system: a part of a segment with the last one of it.
    pub(crate) fn free(self) {
        if let BlockMemory::Class { class, segment: None } = self.memory {
            // SAFETY: the block was allocated with its class's length, and this is its only owner.
            unsafe { system_block::free(self.ptr, class_bytes(class)) };
        }
    }
}

/// The blocks of a thread's pool that other threads have dropped.
pub(crate) struct ReturnQueue(pub(crate) Mutex<Vec<FreeBlock>>);

impl ReturnQueue {
    pub(crate) fn push(&self, block: FreeBlock) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(block);
    }

    /// Passes each queued block to `take`; the queue keeps its capacity.
    pub(crate) fn drain(&self, take: impl FnMut(FreeBlock)) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).drain(..).for_each(take);
    }
}

impl Drop for ReturnQueue {
    fn drop(&mut self) {
        self.drain(FreeBlock::free);
    }
}

/// Returns the size class of the smallest block that holds `len_bytes`. Class `c` has `MIN_BYTES * 2^(c / 4) * (4 + c %
/// 4) / 4` bytes.
pub(crate) fn class_of(len_bytes: usize) -> usize {
    let units = len_bytes.div_ceil(MIN_BYTES).max(1);
    if units <= 4 {
        return [0, 0, 4, 6, 8][units];
    }
    let octave = usize::BITS as usize - 1 - (units - 1).leading_zeros() as usize;
    let step = (units << 2).div_ceil(1 << octave) - 4;
    4 * octave + step
}

/// Returns the largest class whose blocks take at most `len_bytes`, which is at least the smallest block's.
pub(crate) fn class_within(len_bytes: usize) -> usize {
    let class = class_of(len_bytes.min(MIN_SPAN_BYTES));
    (0..=class).rev().find(|&class| class_bytes(class) <= len_bytes).expect("the smallest block fits")
}

pub(crate) fn class_bytes(class: usize) -> usize {
    let (octave, step) = (class / 4, class % 4);
    ((MIN_BYTES << octave) / 4 * (4 + step)).next_multiple_of(system_block::ALIGN)
}

#[cfg(test)]
mod tests {
    use super::super::system_block::ALIGN;
    use super::*;

    #[test]
    fn classes_hold_and_waste_little() {
        for n in (0..5000).chain((0..40).map(|k| (1usize << k) + 1)).chain((7..40).map(|k| 1usize << k)) {
            let bytes = class_bytes(class_of(n));
            assert!(bytes >= n, "{n} bytes do not fit into {bytes}");
            assert!(n < 512 || bytes * 4 <= n * 5 + 4 * ALIGN, "{n} bytes take {bytes}");
        }
    }

    #[test]
    fn a_length_holds_the_largest_class_within_it() {
        for n in (64..70_000).step_by(64).chain([MIN_SPAN_BYTES, 16 << 20]) {
            let class = class_within(n);
            assert!(class_bytes(class) <= n && (class + 1 == CLASSES || class_bytes(class + 1) > n), "{n}");
        }
    }

    #[test]
    fn every_length_up_to_a_span_has_a_class() {
        assert_eq!(class_of(MIN_SPAN_BYTES), CLASSES - 1);
        assert_eq!(class_bytes(CLASSES - 1), MIN_SPAN_BYTES);
    }
}
