//! A world of threads: the status of its ranks, its groups, and the ranks that continue after a failure.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::group::ThreadGroup;
use super::status::WorldStatus;
use super::survivors::Survivors;
use super::sync::{Mutex, MutexGuard};
use crate::base::unpoisoned;
use crate::comm::diagnostics::WorldRecorders;
use crate::error::{CommFault, Result};

/// Groups by generation, ranks and name.
type GroupTable = HashMap<(u64, Vec<usize>, String), Arc<ThreadGroup>>;

/// The ranks and groups of one SPMD program whose ranks are threads.
#[derive(Debug)]
pub(crate) struct ThreadWorld {
    status: Arc<WorldStatus>,
    groups: Mutex<GroupTable>,
    survivors: Survivors,
}

impl ThreadWorld {
    #[cfg(test)]
    pub(crate) fn new(len: usize, deadline: Duration) -> ThreadWorld {
        ThreadWorld::recorded(deadline, WorldRecorders::new(len, &Default::default()))
    }

    /// Creates the world of the ranks whose calls `recorders` record.
    pub(crate) fn recorded(deadline: Duration, recorders: Arc<WorldRecorders>) -> ThreadWorld {
        let survivors = Survivors::new(recorders.len());
        let status = Arc::new(WorldStatus::new(deadline, recorders));
        ThreadWorld { status, groups: Mutex::new(GroupTable::new()), survivors }
    }

    pub(super) fn status(&self) -> &WorldStatus {
        &self.status
    }

    pub(super) fn group(&self, generation: u64, ranks: &[usize], name: &str) -> Arc<ThreadGroup> {
        let mut groups = self.groups();
        groups
            .entry((generation, ranks.to_vec(), name.to_string()))
            .or_insert_with(|| Arc::new(ThreadGroup::new(self.status.clone(), generation, ranks, name)))
            .clone()
    }

    /// Records that `rank` failed, and wakes all ranks. Only the first failure counts.
    pub(crate) fn fail(&self, rank: usize, cause: String) {
        self.status.set_failed(rank, cause);
        self.wake();
    }

    /// Records that the program of `rank` has ended, and wakes all ranks, which need not wait for it any more.
    pub(crate) fn end(&self, rank: usize) {
        self.status.set_ended(rank);
        self.wake();
    }

    /// Returns the time for which the end of the remaining ranks is waited for, after a wait of `waited`.
    pub(crate) fn time_left(&self, waited: Duration) -> Duration {
        self.status.time_left(0..self.status.world_len(), waited)
    }

    /// Returns the sender of a message that was not received, and the fault, once all ranks have ended. After another fault,
    /// which programs may have handled, messages stay behind without being faults themselves.
    pub(crate) fn unreceived(&self) -> Option<(usize, CommFault)> {
        let groups = self.groups();
        if groups.values().any(|group| group.is_given_up()) {
            return None;
        }
        let faults = groups.values().filter_map(|group| group.unreceived());
        let fault = faults.min_by_key(|fault| fault.id().to_string())?;
        Some((fault.blamed()[0], fault))
    }

    /// Returns true if the other ranks have continued without `rank`.
    pub(crate) fn is_left(&self, rank: usize) -> bool {
        self.survivors.is_left(rank)
    }

    /// Returns the generation in which `rank` continues, and its ranks: those that ask before the deadline.
    pub(super) fn survivors(&self, rank: usize) -> Result<(u64, Vec<usize>)> {
        self.survivors.join(rank, &self.status)
    }

    /// Fails all other groups in a cycle of waiting ranks that the group `finder` has found.
    pub(super) fn fail_others_in(&self, cycle: &CommFault, finder: &ThreadGroup) {
        let groups: Vec<Arc<ThreadGroup>> = self.groups().values().cloned().collect();
        for group in groups.iter().filter(|group| group.label != finder.label) {
            if group.cycle().is_some() {
                group.fail(cycle);
            }
        }
    }

    fn wake(&self) {
        self.survivors.wake();
        for group in self.groups().values() {
            group.wake();
        }
    }

    fn groups(&self) -> MutexGuard<'_, GroupTable> {
        unpoisoned(self.groups.lock())
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    /// A failed or ended rank is not waited for. A rank that never asks is waited for until the deadline; if it asks
    /// later, it is refused.
    #[test]
    fn survivors_are_those_who_come() {
        let world = Arc::new(ThreadWorld::new(4, Duration::from_millis(50)));
        world.fail(3, "boom".into());
        let ask = |rank: usize| {
            let world = world.clone();
            std::thread::spawn(move || world.survivors(rank))
        };
        let (a, b) = (ask(2), ask(0));
        assert_eq!(a.join().unwrap(), Ok((1, vec![0, 2])));
        assert_eq!(b.join().unwrap(), Ok((1, vec![0, 2])));
        assert!(
            world
                .survivors(1)
                .unwrap_err()
                .to_string()
                .contains("rank 1, which asked too late to join [0, 2]")
        );
        assert!(world.is_left(1) && world.is_left(3) && !world.is_left(2));
        world.end(0);
        assert_eq!(world.survivors(2), Ok((2, vec![2])));
    }
}
