//! The messages of a call in flight, with the memory that MPI reads and writes.

use std::ptr::NonNull;

use super::library::{MessageHandle, Mpi, MpiError, MpiGuard, MpiResult};
use crate::tensor::{DType, Tensor};

/// The messages of a call. If this value is dropped before MPI has finished them, their memory leaks: instead of
/// that, give it to the engine with `abandon`.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    pieces: Vec<MessagePiece>,
    /// The number of pieces, from the first on, that MPI has finished.
    through: usize,
    /// The tensors that are sent.
    sources: Vec<Tensor>,
    /// The tensors that are received, in order of position; nothing else holds them.
    results: Vec<Tensor>,
    bytes: usize,
}

#[derive(Debug)]
struct MessagePiece {
    /// `None` once MPI has finished the piece.
    handle: Option<MessageHandle>,
    /// The number of bytes to be received; `None` for a send.
    wanted: Option<usize>,
}

/// The error of a call's messages.
#[derive(Debug)]
pub(super) enum TransferError {
    Mpi(MpiError),
    /// The number of bytes that arrived is not the expected one.
    Length {
        got: usize,
        wanted: usize,
    },
}

impl Transfers {
    /// Returns the bytes that are sent or received.
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// Starts sending a contiguous CPU tensor. A tensor without elements is a message as well.
    pub fn send(&mut self, mpi: &Mpi, guard: &MpiGuard<'_>, x: Tensor, to: usize, tag: u32) -> MpiResult<()> {
        let bytes = x.as_bytes().expect("contiguous, on the CPU: checked by the channel");
        let (start, len) = (bytes.as_ptr(), bytes.len());
        self.sources.push(x);
        self.bytes += len;
        for (at, n) in cuts(len, mpi.piece_bytes) {
            // SAFETY: the piece is in the tensor's block, which is kept here until MPI has finished all handles, or
            // leaks; nothing writes to it while it is shared.
            let handle = unsafe { guard.send(start.add(at), n, to, tag)? };
            self.pieces.push(MessagePiece { handle: Some(handle), wanted: None });
        }
        Ok(())
    }

    /// Starts receiving into a fresh tensor, which becomes the next result.
    pub fn receive(
        &mut self,
        mpi: &Mpi,
        guard: &MpiGuard<'_>,
        mut x: Tensor,
        from: usize,
        tag: u32,
    ) -> MpiResult<()> {
        let bytes = x.bytes_mut();
        let (start, len) = (bytes.as_mut_ptr(), bytes.len());
        self.results.push(x);
        self.bytes += len;
        for (at, n) in cuts(len, mpi.piece_bytes) {
            // SAFETY: the piece is in the tensor's block, which nothing else holds, and which is kept here untouched
            // until MPI has finished all handles, or leaks.
            let handle = unsafe { guard.receive(start.add(at), n, from, tag)? };
            self.pieces.push(MessagePiece { handle: Some(handle), wanted: Some(n) });
        }
        Ok(())
    }

    /// Starts a message without bytes.
    pub fn send_nothing(&mut self, guard: &MpiGuard<'_>, to: usize, tag: u32) -> MpiResult<()> {
        // SAFETY: no byte is read.
        let handle = unsafe { guard.send(NonNull::dangling().as_ptr(), 0, to, tag)? };
        self.pieces.push(MessagePiece { handle: Some(handle), wanted: None });
        Ok(())
    }

    /// Starts receiving a message without bytes.
    pub fn receive_nothing(&mut self, guard: &MpiGuard<'_>, from: usize, tag: u32) -> MpiResult<()> {
        // SAFETY: no byte is written.
        let handle = unsafe { guard.receive(NonNull::dangling().as_ptr(), 0, from, tag)? };
        self.pieces.push(MessagePiece { handle: Some(handle), wanted: Some(0) });
        Ok(())
    }

    /// Returns true once MPI has finished all messages. Testing one lets MPI move all of them, so the first
    /// unfinished one suffices.
    pub fn test(&mut self, guard: &MpiGuard<'_>) -> Result<bool, TransferError> {
        while let Some(piece) = self.pieces.get_mut(self.through) {
            if let Some(handle) = &mut piece.handle {
                let Some(got) = guard.test(handle).map_err(TransferError::Mpi)? else { return Ok(false) };
                piece.handle = None;
                if let Some(wanted) = piece.wanted
                    && got != wanted
                {
                    return Err(TransferError::Length { got, wanted });
                }
            }
            self.through += 1;
        }
        Ok(true)
    }

    pub fn is_done(&self) -> bool {
        self.through == self.pieces.len()
    }

    /// Returns the received tensors, once all have arrived.
    pub fn into_results(mut self) -> Vec<Tensor> {
        assert!(self.is_done(), "MPI has finished all messages");
        let mut results = std::mem::take(&mut self.results);
        for x in results.iter_mut().filter(|x| x.dtype() == DType::Bool) {
            // The sender is another process, and bools must be 0 or 1 in memory.
            x.bytes_mut().iter_mut().for_each(|b| *b = u8::from(*b != 0));
        }
        results
    }

    /// Cancels the receives that have not finished, and leaks the memory of all.
    pub fn give_up(mut self, guard: &MpiGuard<'_>) {
        for piece in &mut self.pieces {
            if let (Some(handle), Some(_)) = (piece.handle.take(), piece.wanted) {
                // Nothing can be done if this fails.
                let _ = guard.cancel(handle);
            }
        }
        self.leak();
    }

    fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.sources));
        std::mem::forget(std::mem::take(&mut self.results));
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        if !self.is_done() {
            self.leak();
        }
    }
}

/// Returns the (offset, length) of pieces of at most `piece` bytes; at least one.
fn cuts(len: usize, piece: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len.max(1)).step_by(piece).map(move |at| (at, piece.min(len - at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_all_and_nothing_twice() {
        let of = |len, piece| cuts(len, piece).collect::<Vec<_>>();
        assert_eq!(of(0, 4), [(0, 0)]);
        assert_eq!(of(4, 4), [(0, 4)]);
        assert_eq!(of(9, 4), [(0, 4), (4, 4), (8, 1)]);
        assert_eq!(of(3, 1), [(0, 1), (1, 1), (2, 1)]);
        assert_eq!(of(5 << 30, 1 << 30).len(), 5);
    }
}
