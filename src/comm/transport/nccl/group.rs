//! A group's communicator and stream, and the calls in flight.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Communicator, Nccl, NcclResult, Progress};
use crate::base::lock;
use crate::comm::transport::coordinated::{CallNumber, GroupMember};
use crate::tensor::cuda::{SideStream, StreamMark};

/// A group as one of its members sees it, with its communicator and its stream.
#[derive(Debug)]
pub(super) struct NcclGroup {
    pub state: Arc<GroupMember>,
    /// True for a single rank, which has no communicator.
    pub has_no_comm: bool,
    /// `None` once it is aborted or destroyed.
    comm: Mutex<Option<Communicator>>,
    pub side: SideStream,
    /// The calls that may not be done yet, in the stream's order.
    pub in_flight: Mutex<VecDeque<CallOnStream>>,
}

/// A call on a group's stream.
#[derive(Debug)]
pub(super) struct CallOnStream {
    pub number: CallNumber,
    /// Marks on the stream before the call and after it.
    pub began: StreamMark,
    pub done: Arc<StreamMark>,
    /// The time at which the watchdog saw that the call had begun.
    pub since: Option<Instant>,
    /// The time after that at which the call is late.
    pub patience: Duration,
}

impl NcclGroup {
    pub fn new(state: GroupMember, has_no_comm: bool, side: SideStream) -> NcclGroup {
        let (comm, in_flight) = (Mutex::default(), Mutex::default());
        NcclGroup { state: Arc::new(state), has_no_comm, comm, side, in_flight }
    }

    pub fn set(&self, comm: Communicator) {
        *lock(&self.comm) = Some(comm);
    }

    /// Calls `f` with the communicator, which is not aborted meanwhile. Returns `None` if there is no communicator
    /// any more.
    pub fn with<T>(&self, f: impl FnOnce(Communicator) -> T) -> Option<T> {
        lock(&self.comm).map(f)
    }

    /// Returns the communicator's state, or `Ready` while another thread uses it.
    pub fn progress(&self, nccl: &dyn Nccl) -> NcclResult<Progress> {
        let Ok(comm) = self.comm.try_lock() else { return Ok(Progress::Ready) };
        comm.map_or(Ok(Progress::Ready), |comm| nccl.progress(comm))
    }

    /// Takes the communicator, so that later calls find none.
    pub fn take(&self) -> Option<Communicator> {
        lock(&self.comm).take()
    }

    /// Returns the first call in flight.
    pub fn first_in_flight(&self) -> Option<CallNumber> {
        lock(&self.in_flight).front().map(|first| first.number)
    }
}
