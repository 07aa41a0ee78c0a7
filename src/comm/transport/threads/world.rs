//! What all ranks of one world share.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::hub::Hub;
use super::sync::atomic::{AtomicBool, Ordering};
use super::sync::{Condvar, Mutex, MutexGuard};
use crate::comm::diagnostics::Roster;
use crate::error::{CommFault, Error, Result};

/// Groups by generation, ranks and name.
type Hubs = HashMap<(u64, Vec<usize>, String), Arc<Hub>>;

/// The ranks, groups and failures of one SPMD program.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) deadline: Duration,
    pub(super) roster: Arc<Roster>,
    failed: AtomicBool,
    first_failure: OnceLock<(usize, String)>,
    /// Why each rank failed that did.
    failures: Box<[OnceLock<String>]>,
    ended: Box<[AtomicBool]>,
    hubs: Mutex<Hubs>,
    meeting: Mutex<Meeting>,
    met: Condvar,
    /// Ranks that wait for each other, as they were found, with their generation.
    circles: Mutex<Vec<(u64, CommFault)>>,
}

/// Where ranks meet that go on without others.
#[derive(Debug)]
struct Meeting {
    /// The number of meetings that are over.
    generation: u64,
    /// The ranks that went on from the last one, ascending.
    members: Vec<usize>,
    /// Those that have come to the next one, and when the first came.
    come: Vec<usize>,
    since: Option<Instant>,
}

impl World {
    #[cfg(test)]
    pub(crate) fn new(len: usize, deadline: Duration) -> World {
        World::recorded(deadline, Roster::new(len, &Default::default()))
    }

    /// The world of the ranks whose calls `roster` records.
    pub(crate) fn recorded(deadline: Duration, roster: Arc<Roster>) -> World {
        let len = roster.len();
        let meeting = Meeting { generation: 0, members: (0..len).collect(), come: vec![], since: None };
        World {
            deadline,
            roster,
            failed: AtomicBool::new(false),
            first_failure: OnceLock::new(),
            ended: (0..len).map(|_| AtomicBool::new(false)).collect(),
            failures: (0..len).map(|_| OnceLock::new()).collect(),
            hubs: Mutex::new(Hubs::new()),
            meeting: Mutex::new(meeting),
            met: Condvar::new(),
            circles: Mutex::new(Vec::new()),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.ended.len()
    }

    pub(super) fn hub(&self, generation: u64, ranks: &[usize], name: &str) -> Arc<Hub> {
        let mut hubs = self.hubs();
        hubs.entry((generation, ranks.to_vec(), name.to_string()))
            .or_insert_with(|| Arc::new(Hub::new(generation, ranks, name)))
            .clone()
    }

    /// Records that `rank` failed, and wakes everyone. Only the first failure counts.
    pub(crate) fn fail(&self, rank: usize, cause: String) {
        self.failures[rank].get_or_init(|| cause.clone());
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

    /// The first of `ranks`, in their order, that has failed, and its cause.
    pub(super) fn failure_among(&self, ranks: &[usize]) -> Option<(usize, &String)> {
        ranks.iter().find_map(|&rank| Some((rank, self.failures[rank].get()?)))
    }

    /// True where the others have gone on without `rank`.
    pub(crate) fn is_left(&self, rank: usize) -> bool {
        !self.meeting().members.contains(&rank)
    }

    /// The generation that `rank` goes on in, and its ranks: those that come here before the deadline.
    pub(super) fn survivors(&self, rank: usize) -> Result<(u64, Vec<usize>)> {
        let mut meeting = self.meeting();
        if !meeting.members.contains(&rank) {
            return Err(Error::invalid(
                "survivors",
                "the others have gone on without this rank",
                format!("rank {rank}, which came too late for {:?}", meeting.members),
                "end its program",
            ));
        }
        let mine = meeting.generation + 1;
        meeting.come.push(rank);
        let end = *meeting.since.get_or_insert_with(Instant::now) + self.deadline;
        while meeting.generation < mine {
            let left = end.saturating_duration_since(Instant::now());
            let may_come = |r: &usize| self.failures[*r].get().is_none() && !self.has_ended(*r);
            let awaited = meeting.members.iter().any(|r| may_come(r) && !meeting.come.contains(r));
            if awaited && !left.is_zero() {
                meeting = self.met.wait_timeout(meeting, left).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let mut members = std::mem::take(&mut meeting.come);
            members.sort_unstable();
            *meeting = Meeting { generation: mine, members, come: vec![], since: None };
            self.met.notify_all();
        }
        Ok((mine, meeting.members.clone()))
    }

    /// Makes a circle that was found at one hub the fault of all others in it; the finder sees to its own.
    pub(super) fn spread(&self, fault: &CommFault, finder: &Hub) {
        // Known to all before one of them hears of it and ends.
        let circle = (finder.generation, fault.clone());
        self.circles.lock().unwrap_or_else(PoisonError::into_inner).push(circle);
        let hubs: Vec<Arc<Hub>> = self.hubs().values().cloned().collect();
        for hub in hubs.iter().filter(|hub| hub.label != finder.label) {
            if self.circle_of(hub).is_some() {
                hub.fail(fault);
            }
        }
    }

    /// The circle that a hub's group is part of.
    pub(super) fn circle_of(&self, hub: &Hub) -> Option<CommFault> {
        let circles = self.circles.lock().unwrap_or_else(PoisonError::into_inner);
        let with = |(generation, fault): &&(u64, CommFault)| match fault {
            CommFault::Cycle { waits, .. } => {
                *generation == hub.generation && waits.iter().any(|wait| wait.id.group == hub.label)
            }
            _ => false,
        };
        circles.iter().find(with).map(|(_, fault)| fault.clone())
    }

    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Whoever is between its look and its nap holds the lock.
        drop(self.meeting());
        self.met.notify_all();
        for hub in self.hubs().values() {
            hub.wake();
        }
    }

    fn hubs(&self) -> MutexGuard<'_, Hubs> {
        self.hubs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    /// Who has failed or ended is not waited for; who never comes is, until the deadline; who comes then is refused.
    #[test]
    fn survivors_are_those_who_come() {
        let world = Arc::new(World::new(4, Duration::from_millis(50)));
        world.fail(3, "boom".into());
        let ask = |rank: usize| {
            let world = world.clone();
            std::thread::spawn(move || world.survivors(rank))
        };
        let (a, b) = (ask(2), ask(0));
        assert_eq!(a.join().unwrap(), Ok((1, vec![0, 2])));
        assert_eq!(b.join().unwrap(), Ok((1, vec![0, 2])));
        assert!(
            world.survivors(1).unwrap_err().to_string().contains("rank 1, which came too late for [0, 2]")
        );
        assert!(world.is_left(1) && world.is_left(3) && !world.is_left(2));
        world.end(0);
        assert_eq!(world.survivors(2), Ok((2, vec![2])));
    }
}
