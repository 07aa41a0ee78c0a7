//! A group's communicator and stream, and what is in flight on it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::{Communicator, Nccl, NcclResult, Progress};
use crate::comm::lock::lock;
use crate::comm::transport::coordinated::{CallNumber, GroupMember};
use crate::tensor::cuda::{SideStream, StreamMark};

/// A group at one of its members, with its communicator and its stream.
#[derive(Debug)]
pub(super) struct NcclGroup {
    pub state: Arc<GroupMember>,
    /// True for a single rank that talks to nobody and has no communicator.
    pub alone: bool,
    /// None once it is aborted or destroyed.
    comm: Mutex<Option<Communicator>>,
    pub side: SideStream,
    /// The calls that are not known to be done, in the stream's order.
    pub in_flight: Mutex<VecDeque<CallOnStream>>,
}

/// A call on a group's stream.
#[derive(Debug)]
pub(super) struct CallOnStream {
    pub number: CallNumber,
    /// The places in the stream before the call and after it.
    pub began: StreamMark,
    pub done: Arc<StreamMark>,
    /// When it was seen to have begun.
    pub since: Option<Instant>,
}

impl NcclGroup {
    pub fn new(state: GroupMember, alone: bool, side: SideStream) -> NcclGroup {
        let (comm, in_flight) = (Mutex::default(), Mutex::default());
        NcclGroup { state: Arc::new(state), alone, comm, side, in_flight }
    }

    pub fn set(&self, comm: Communicator) {
        *lock(&self.comm) = Some(comm);
    }

    /// The result of `f` with the communicator, which is not aborted meanwhile; none if there is none any more.
    pub fn with<T>(&self, f: impl FnOnce(Communicator) -> T) -> Option<T> {
        lock(&self.comm).map(f)
    }

    /// How far the communicator is, unless it is being used right now.
    pub fn glance(&self, nccl: &dyn Nccl) -> NcclResult<Progress> {
        let Ok(comm) = self.comm.try_lock() else { return Ok(Progress::Ready) };
        comm.map_or(Ok(Progress::Ready), |comm| nccl.progress(comm))
    }

    /// Takes the communicator away for good.
    pub fn take(&self) -> Option<Communicator> {
        lock(&self.comm).take()
    }

    /// The first call in flight.
    pub fn first_in_flight(&self) -> Option<CallNumber> {
        lock(&self.in_flight).front().map(|first| first.number)
    }
}
