//! A call's messages in flight, with the memory that MPI reads and writes.

use std::ptr::NonNull;

use super::library::{MessageHandle, Mpi, MpiError, MpiGuard, MpiResult};
use crate::tensor::{DType, Tensor};

/// The messages of a call. Dropped before MPI is through with them, their memory leaks: whoever cannot wait hands them
/// to the engine.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    pieces: Vec<MessagePiece>,
    /// The pieces before this one are through.
    through: usize,
    /// What is sent.
    sources: Vec<Tensor>,
    /// What is received, in whatever order; shared with nobody.
    results: Vec<Tensor>,
    bytes: usize,
}

#[derive(Debug)]
struct MessagePiece {
    /// None once MPI is through with it.
    handle: Option<MessageHandle>,
    /// The bytes that shall come; none where the piece is sent.
    wanted: Option<usize>,
}

/// The reason for which transfers came to nothing.
#[derive(Debug)]
pub(super) enum TransferError {
    Mpi(MpiError),
    /// Another number of bytes has come than was expected.
    Length {
        got: usize,
        wanted: usize,
    },
}

impl Transfers {
    /// Bytes that are sent or received.
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// Starts sending a contiguous tensor of the CPU's. One without elements is a message as well.
    pub fn send(&mut self, mpi: &Mpi, port: &MpiGuard<'_>, x: Tensor, to: usize, tag: u32) -> MpiResult<()> {
        let bytes = x.as_bytes().expect("contiguous, on the CPU: checked by the channel");
        let (start, len) = (bytes.as_ptr(), bytes.len());
        self.sources.push(x);
        self.bytes += len;
        for (at, n) in cuts(len, mpi.piece_bytes) {
            // SAFETY: the piece lies in the tensor's block, which is kept here until MPI is through with all handles, or leaks;
            // while it is shared nobody writes it.
            let handle = unsafe { port.send(start.add(at), n, to, tag)? };
            self.pieces.push(MessagePiece { handle: Some(handle), wanted: None });
        }
        Ok(())
    }

    /// Starts receiving into a fresh tensor, the next of the results.
    pub fn receive(
        &mut self,
        mpi: &Mpi,
        port: &MpiGuard<'_>,
        mut x: Tensor,
        from: usize,
        tag: u32,
    ) -> MpiResult<()> {
        let bytes = x.bytes_mut();
        let (start, len) = (bytes.as_mut_ptr(), bytes.len());
        self.results.push(x);
        self.bytes += len;
        for (at, n) in cuts(len, mpi.piece_bytes) {
            // SAFETY: the piece lies in the tensor's block, which nobody else has, and which is kept here untouched until MPI
            // is through with all handles, or leaks.
            let handle = unsafe { port.receive(start.add(at), n, from, tag)? };
            self.pieces.push(MessagePiece { handle: Some(handle), wanted: Some(n) });
        }
        Ok(())
    }

    /// Starts a message without bytes.
    pub fn send_nothing(&mut self, port: &MpiGuard<'_>, to: usize, tag: u32) -> MpiResult<()> {
        // SAFETY: no byte is read.
        let handle = unsafe { port.send(NonNull::dangling().as_ptr(), 0, to, tag)? };
        self.pieces.push(MessagePiece { handle: Some(handle), wanted: None });
        Ok(())
    }

    /// Starts waiting for a message without bytes.
    pub fn receive_nothing(&mut self, port: &MpiGuard<'_>, from: usize, tag: u32) -> MpiResult<()> {
        // SAFETY: no byte is written.
        let handle = unsafe { port.receive(NonNull::dangling().as_ptr(), 0, from, tag)? };
        self.pieces.push(MessagePiece { handle: Some(handle), wanted: Some(0) });
        Ok(())
    }

    /// True once MPI is through with all. Whatever is tested moves the others as well: the first that is not done says enough.
    pub fn test(&mut self, port: &MpiGuard<'_>) -> Result<bool, TransferError> {
        while let Some(piece) = self.pieces.get_mut(self.through) {
            if let Some(handle) = &mut piece.handle {
                let Some(got) = port.test(handle).map_err(TransferError::Mpi)? else { return Ok(false) };
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

    /// What has come, all of it being here.
    pub fn into_results(mut self) -> Vec<Tensor> {
        assert!(self.is_done(), "nobody looks at what MPI still writes");
        let mut results = std::mem::take(&mut self.results);
        for x in results.iter_mut().filter(|x| x.dtype() == DType::Bool) {
            // Whoever sends is another process: only 0 and 1 are values here.
            x.bytes_mut().iter_mut().for_each(|b| *b = u8::from(*b != 0));
        }
        results
    }

    /// Withdraws what has not come, and forgets the rest.
    pub fn give_up(mut self, port: &MpiGuard<'_>) {
        for piece in &mut self.pieces {
            if let (Some(handle), Some(_)) = (piece.handle.take(), piece.wanted) {
                // What cannot even be withdrawn is past help.
                let _ = port.cancel(handle);
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

/// Where pieces of at most `piece` bytes begin, and how long they are: one at least.
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
