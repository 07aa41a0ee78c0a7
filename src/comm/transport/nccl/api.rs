//! What of NCCL the engine uses, and nothing more.

use std::fmt;

use crate::tensor::cuda::{Address, Handle};

/// A communicator, as its library names it.
pub type Communicator = u64;

/// The library's refusal: its function, its code by name, and its words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclError {
    /// The function that failed.
    pub call: &'static str,
    /// Its code, e.g. `ncclRemoteError`.
    pub code: String,
    /// What it says about it; may be empty.
    pub words: String,
}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {}", self.call, self.code)?;
        if self.words.is_empty() { Ok(()) } else { write!(f, " ({})", self.words) }
    }
}

/// What a call of the library gives.
pub type NcclResult<T> = std::result::Result<T, NcclError>;

/// Whether a communicator has done what it was reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It has: what was put on streams is on them.
    Ready,
    /// Not yet; nothing else may be asked of it but its progress and its end.
    Underway,
}

/// NCCL, or what stands in for it in tests. Communicators never block: calls return at once, and
/// [`Nccl::progress`] tells when they are through. The calling thread has bound the device.
///
/// # Safety
/// An implementation does with the memory it is given what the calls say, in the order of the streams.
pub unsafe trait Nccl: Send + Sync + fmt::Debug {
    /// The library and its version, for reports.
    fn name(&self) -> String;

    /// A new name under which ranks find each other.
    fn unique_id(&self) -> NcclResult<Vec<u8>>;

    /// Begins to join the communicator `id` as one of `len`. All of them do.
    fn join(&self, id: &[u8], len: usize, rank: usize) -> NcclResult<Communicator>;

    /// Begins to split a communicator; all its members do, in the same order among its splits. Those of one colour form a new
    /// one, ordered by `key`.
    fn split(&self, parent: Communicator, color: u32, key: usize) -> NcclResult<Communicator>;

    /// How far a communicator is, or what has gone wrong with it since.
    fn progress(&self, comm: Communicator) -> NcclResult<Progress>;

    /// Begins a group: what follows on this thread is done as one.
    fn group_start(&self) -> NcclResult<()>;

    /// Ends a group. What it holds is on its streams once the communicator is ready.
    fn group_end(&self) -> NcclResult<()>;

    /// Sends bytes to a member.
    ///
    /// # Safety
    /// The range is allocated until the stream has done the call.
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

    /// Gathers `bytes` bytes of every member at `at`, in order.
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

    /// Gives the root's bytes to all, in place.
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

    /// Begins to end a communicator whose work is done. All members do.
    fn finalize(&self, comm: Communicator) -> NcclResult<()>;

    /// Frees a communicator that is finalized.
    fn destroy(&self, comm: Communicator) -> NcclResult<()>;

    /// Gives up what a communicator does, and frees it.
    fn abort(&self, comm: Communicator) -> NcclResult<()>;
}
