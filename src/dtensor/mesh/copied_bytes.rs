//! The bytes that a rank copies between tensors and what its collectives send and receive.

use std::cell::Cell;

thread_local!(static COPIED_BYTES: Cell<u64> = const { Cell::new(0) });

/// Counts bytes that this rank copies.
pub(in crate::dtensor) fn note_copied(bytes: usize) {
    COPIED_BYTES.set(COPIED_BYTES.get() + bytes as u64);
}

/// Returns the bytes that this rank has copied so far.
pub(in crate::dtensor) fn copied_bytes() -> u64 {
    COPIED_BYTES.get()
}
