//! What all ranks of one world share.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::hub::Hub;
use super::sync::atomic::{AtomicBool, Ordering};
use super::sync::{Mutex, MutexGuard};

/// Groups by ranks and name.
type Hubs = HashMap<(Vec<usize>, String), Arc<Hub>>;

/// The ranks, groups and failures of one SPMD program.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) deadline: Duration,
    failed: AtomicBool,
    first_failure: Mutex<Option<(usize, String)>>,
    ended: Box<[AtomicBool]>,
    hubs: Mutex<Hubs>,
}

impl World {
    pub(crate) fn new(len: usize, deadline: Duration) -> World {
        World {
            deadline,
            failed: AtomicBool::new(false),
            first_failure: Mutex::new(None),
            ended: (0..len).map(|_| AtomicBool::new(false)).collect(),
            hubs: Mutex::new(Hubs::new()),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.ended.len()
    }

    pub(super) fn hub(&self, ranks: &[usize], name: &str) -> Arc<Hub> {
        let mut hubs = self.hubs();
        hubs.entry((ranks.to_vec(), name.to_string()))
            .or_insert_with(|| Arc::new(Hub::new(ranks, name)))
            .clone()
    }

    /// Records that `rank` failed, and wakes everyone. Only the first failure counts.
    pub(crate) fn fail(&self, rank: usize, cause: String) {
        self.first_failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((rank, cause));
        self.failed.store(true, Ordering::Release);
        self.wake();
    }

    /// Records that `rank`'s program is over: nobody need wait for it.
    pub(crate) fn end(&self, rank: usize) {
        self.ended[rank].store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// The rank that failed first, and its cause.
    pub(super) fn first_failure(&self) -> Option<(usize, String)> {
        if !self.has_failed() {
            return None;
        }
        self.first_failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn has_ended(&self, rank: usize) -> bool {
        self.ended[rank].load(Ordering::Acquire)
    }

    fn wake(&self) {
        for hub in self.hubs().values() {
            hub.wake();
        }
    }

    fn hubs(&self) -> MutexGuard<'_, Hubs> {
        self.hubs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
