//! What all ranks of one world share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::available_parallelism;
use std::time::Duration;

use super::hub::Hub;

/// Ranks that run in this process, in all worlds: with more of them than cores, spinning takes time from the others.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Groups by ranks and name.
type Hubs = HashMap<(Vec<usize>, String), Arc<Hub>>;

/// The ranks, groups and failures of one SPMD program.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) deadline: Duration,
    failed: AtomicBool,
    first_failure: OnceLock<(usize, String)>,
    ended: Box<[AtomicBool]>,
    hubs: Mutex<Hubs>,
}

impl World {
    pub(crate) fn new(len: usize, deadline: Duration) -> World {
        World {
            deadline,
            failed: AtomicBool::new(false),
            first_failure: OnceLock::new(),
            ended: (0..len).map(|_| AtomicBool::new(false)).collect(),
            hubs: Mutex::default(),
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
        self.first_failure.get_or_init(|| (rank, cause));
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
    pub(super) fn first_failure(&self) -> Option<&(usize, String)> {
        self.first_failure.get().filter(|_| self.has_failed())
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

/// Counts a thread as a running rank while it lives.
pub(crate) struct Running;

impl Running {
    pub(crate) fn enter() -> Running {
        RUNNING.fetch_add(1, Ordering::Relaxed);
        Running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Polls `ready` for a few microseconds where cores are free, only a moment where they are not.
pub(super) fn spin(ready: impl Fn() -> bool) -> bool {
    static CORES: OnceLock<usize> = OnceLock::new();
    let cores = *CORES.get_or_init(|| available_parallelism().map_or(1, usize::from));
    let polls = if RUNNING.load(Ordering::Relaxed) <= cores { 600 } else { 20 };
    for _ in 0..polls {
        if ready() {
            return true;
        }
        std::hint::spin_loop();
    }
    ready()
}
