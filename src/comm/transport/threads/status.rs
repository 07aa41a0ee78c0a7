//! The status of a world's ranks: which have failed or ended, and which wait for each other in a cycle.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::sync::atomic::{AtomicBool, Ordering};
use super::sync::{Mutex, MutexGuard};
use crate::base::{lock, unpoisoned};
use crate::comm::calls::BusyWork;
use crate::comm::diagnostics::{AnnouncedWork, WorldRecorders, time_left};
use crate::error::{BusyRank, CommFault};

/// The status of a world's ranks, read by all groups while they wait.
#[derive(Debug)]
pub(super) struct WorldStatus {
    pub(super) deadline: Duration,
    pub(super) recorders: Arc<WorldRecorders>,
    /// True once `first_failure` is set.
    has_failed: AtomicBool,
    first_failure: OnceLock<(usize, String)>,
    /// The cause of each rank's failure.
    failures: Box<[OnceLock<String>]>,
    ended: Box<[AtomicBool]>,
    /// Each rank's announced work. Not one of the model checkers' locks, because nothing waits for a change of it.
    work: Box<[std::sync::Mutex<AnnouncedWork>]>,
    /// The cycles of waiting ranks that were found, with their generation.
    cycles: Mutex<Vec<(u64, CommFault)>>,
}

impl WorldStatus {
    pub(super) fn new(deadline: Duration, recorders: Arc<WorldRecorders>) -> WorldStatus {
        let len = recorders.len();
        WorldStatus {
            deadline,
            recorders,
            has_failed: AtomicBool::new(false),
            first_failure: OnceLock::new(),
            failures: (0..len).map(|_| OnceLock::new()).collect(),
            ended: (0..len).map(|_| AtomicBool::new(false)).collect(),
            work: (0..len).map(|_| Default::default()).collect(),
            cycles: Mutex::new(Vec::new()),
        }
    }

    pub(super) fn world_len(&self) -> usize {
        self.ended.len()
    }

    /// Records that `rank` failed. Only its first failure counts, and only the first one in the world.
    pub(super) fn set_failed(&self, rank: usize, cause: String) {
        self.failures[rank].get_or_init(|| cause.clone());
        self.first_failure.get_or_init(|| (rank, cause));
        self.has_failed.store(true, Ordering::Release);
    }

    /// Records that the program of `rank` has ended.
    pub(super) fn set_ended(&self, rank: usize) {
        self.ended[rank].store(true, Ordering::Release);
    }

    /// Returns the rank that failed first, and its cause.
    pub(super) fn first_failure(&self) -> Option<&(usize, String)> {
        self.first_failure.get().filter(|_| self.has_failed.load(Ordering::Acquire))
    }

    /// Returns the first failed rank in the list `ranks`, and its cause.
    pub(super) fn failure_among(&self, ranks: &[usize]) -> Option<(usize, &String)> {
        ranks.iter().find_map(|&rank| Some((rank, self.failures[rank].get()?)))
    }

    pub(super) fn has_ended(&self, rank: usize) -> bool {
        self.ended[rank].load(Ordering::Acquire)
    }

    /// Returns true if the rank has neither failed nor ended.
    pub(super) fn is_running(&self, rank: usize) -> bool {
        self.failures[rank].get().is_none() && !self.has_ended(rank)
    }

    /// Replaces the announced work of `rank`.
    pub(super) fn announce(&self, rank: usize, work: Option<BusyWork>) {
        lock(&self.work[rank]).set(work, Instant::now()).expect("an announcer bounds names");
    }

    /// Returns the time for which a wait goes on that has lasted for `waited` and depends on `ranks`.
    pub(super) fn time_left(&self, ranks: impl Iterator<Item = usize>, waited: Duration) -> Duration {
        let now = Instant::now();
        let running = ranks.filter(|&rank| self.is_running(rank));
        time_left(running.map(|rank| lock(&self.work[rank]).busy_time(now)), self.deadline, waited, now)
    }

    /// Returns the work that `ranks` have announced.
    pub(super) fn busy(&self, ranks: &[usize]) -> Vec<BusyRank> {
        let now = Instant::now();
        ranks.iter().filter_map(|&rank| lock(&self.work[rank]).report(rank, now)).collect()
    }

    /// Records a cycle that was found in a group of `generation`.
    pub(super) fn add_cycle(&self, generation: u64, cycle: &CommFault) {
        self.cycles().push((generation, cycle.clone()));
    }

    /// Returns the cycle that the group of this generation and label is part of.
    pub(super) fn cycle_of(&self, generation: u64, label: &str) -> Option<CommFault> {
        let with = |(found_in, fault): &&(u64, CommFault)| match fault {
            CommFault::Cycle { waits, .. } => {
                *found_in == generation && waits.iter().any(|wait| wait.id.group == label)
            }
            _ => false,
        };
        self.cycles().iter().find(with).map(|(_, fault)| fault.clone())
    }

    fn cycles(&self) -> MutexGuard<'_, Vec<(u64, CommFault)>> {
        unpoisoned(self.cycles.lock())
    }
}
