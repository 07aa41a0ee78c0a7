//! One group's communicator and stream, and what is under way on it.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{Communicator, Nccl, NcclResult, Progress};
use crate::comm::calls::Sequence;
use crate::comm::calls::label;
use crate::error::CallId;
use crate::tensor::Tensor;
use crate::tensor::cuda::{Mark, Side};

/// A group at one of its members.
#[derive(Debug)]
pub(super) struct Line {
    pub label: String,
    /// A number made from the label.
    pub id: u64,
    pub ranks: Vec<usize>,
    pub index: usize,
    /// True for a single rank that talks to nobody and has no communicator.
    pub alone: bool,
    /// None once it is aborted or destroyed.
    comm: Mutex<Option<Communicator>>,
    pub side: Side,
    seqs: Mutex<HashMap<Sequence, u64>>,
    pub flights: Mutex<VecDeque<Flight>>,
    /// Messages of this rank to itself, by sequence number.
    pub own: Mutex<HashMap<u64, Tensor>>,
}

/// A call under way.
#[derive(Debug)]
pub(super) struct Flight {
    pub call: &'static str,
    pub sequence: Sequence,
    pub seq: u64,
    /// Where the stream came to it, and where it was through.
    pub began: Mark,
    pub done: Arc<Mark>,
    /// When it was seen to have begun.
    pub since: Option<Instant>,
}

impl Line {
    pub fn new(ranks: &[usize], name: &str, rank: usize, alone: bool, side: Side) -> Line {
        let label = label(name, ranks);
        let index = ranks.iter().position(|&r| r == rank).expect("checked by the caller");
        Line {
            id: hash(&label),
            label,
            ranks: ranks.to_vec(),
            index,
            alone,
            comm: Mutex::default(),
            side,
            seqs: Mutex::default(),
            flights: Mutex::default(),
            own: Mutex::default(),
        }
    }

    /// The number of this rank's next call of a sequence.
    pub fn advance(&self, sequence: Sequence) -> u64 {
        let mut seqs = lock(&self.seqs);
        let next = seqs.entry(sequence).or_default();
        *next += 1;
        *next - 1
    }

    pub fn call_id(&self, call: impl Into<Cow<'static, str>>, seq: u64) -> CallId {
        CallId::new(call, seq, &*self.label)
    }

    pub fn set(&self, comm: Communicator) {
        *lock(&self.comm) = Some(comm);
    }

    /// What `f` gives with the communicator, which nobody aborts meanwhile; none where there is none any more.
    pub fn with<T>(&self, f: impl FnOnce(Communicator) -> T) -> Option<T> {
        lock(&self.comm).map(f)
    }

    /// How far the communicator is, unless somebody is using it right now.
    pub fn glance(&self, nccl: &dyn Nccl) -> NcclResult<Progress> {
        let Ok(comm) = self.comm.try_lock() else { return Ok(Progress::Ready) };
        comm.map_or(Ok(Progress::Ready), |comm| nccl.progress(comm))
    }

    /// Takes the communicator away for good.
    pub fn take(&self) -> Option<Communicator> {
        lock(&self.comm).take()
    }
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
