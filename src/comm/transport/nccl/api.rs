//! The functions of NCCL that the engine uses.

use std::fmt;

use crate::tensor::cuda::{Address, Handle};

/// A communicator, by the number that the library's wrapper gives it.
pub type Communicator = u64;

/// A failed call of the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclError {
    /// The function that failed.
    pub call: &'static str,
    /// The name of its code, e.g. `ncclRemoteError`.
    pub code: String,
    /// The library's message; may be empty.
    pub words: String,
}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {}", self.call, self.code)?;
        if self.words.is_empty() { Ok(()) } else { write!(f, " ({})", self.words) }
    }
}

/// The result of a call of the library.
pub type NcclResult<T> = std::result::Result<T, NcclError>;

/// The state of a communicator's last call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The call is done: its work is on the streams.
    Ready,
    /// The call is not done. Until then the communicator accepts only [`Nccl::progress`] and [`Nccl::abort`].
    Underway,
}

/// NCCL, or a replacement in tests. Communicators do not block: calls return at once, and [`Nccl::progress`] tells
/// when they are done. The calling thread has made the device current.
///
/// # Safety
/// An implementation uses the memory that it is given only as its methods document, in the order of the streams.
pub unsafe trait Nccl: Send + Sync + fmt::Debug {
    /// Returns the library's name and version, for reports.
    fn name(&self) -> String;

    /// Creates an id by which ranks join one communicator.
    fn unique_id(&self) -> NcclResult<Vec<u8>>;

    /// Starts to join the communicator `id` as member `rank` of `len`. All members call this.
    fn join(&self, id: &[u8], len: usize, rank: usize) -> NcclResult<Communicator>;

    /// Starts to split a communicator. All its members call this, in the same order among its splits. Members with
    /// the same `color` form a new communicator, ordered by `key`.
    fn split(&self, parent: Communicator, color: u32, key: usize) -> NcclResult<Communicator>;

    /// Returns the state of a communicator, or an error that happened since the last call.
    fn progress(&self, comm: Communicator) -> NcclResult<Progress>;

    /// Starts a group: the calls that follow on this thread are done as one.
    fn group_start(&self) -> NcclResult<()>;

    /// Ends a group. Its work is on the streams once the communicator is ready.
    fn group_end(&self) -> NcclResult<()>;

    /// Sends bytes to a member.
    ///
    /// # Safety
    /// The range is allocated until the stream has done the transfer.
    unsafe fn send(
        &self,
        from: Address,
        bytes: usize,
        to: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()>;

    /// Receives bytes from a member.
    ///
    /// # Safety
    /// As [`Nccl::send`]; nothing else uses the range until then.
    unsafe fn recv(
        &self,
        at: Address,
        bytes: usize,
        from: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()>;

    /// Gathers `bytes` bytes of every member to `at`, in order.
    ///
    /// # Safety
    /// As [`Nccl::recv`], with room for all members at `at`.
    unsafe fn all_gather(
        &self,
        from: Address,
        at: Address,
        bytes: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()>;

    /// Sends the root's bytes to all members, in place.
    ///
    /// # Safety
    /// As [`Nccl::recv`]; at the root the range is only read.
    unsafe fn broadcast(
        &self,
        at: Address,
        bytes: usize,
        root: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()>;

    /// Starts to finalize a communicator that has no work left. All members call this.
    fn finalize(&self, comm: Communicator) -> NcclResult<()>;

    /// Frees a finalized communicator.
    fn destroy(&self, comm: Communicator) -> NcclResult<()>;

    /// Aborts a communicator's work, and frees it.
    fn abort(&self, comm: Communicator) -> NcclResult<()>;
}
