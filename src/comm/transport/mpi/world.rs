//! The state that a rank, its channels and its watchdog share.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::group::{MpiGroup, Tags};
use super::library::{Mpi, MpiGuard};
use super::transfers::Transfers;
use crate::base::lock;
use crate::comm::transport::coordinated::{CallNumber, GroupMember, Membership, OpenGroups};
use crate::error::{CommFault, Error, Result};

/// A rank's side of a world of MPI processes.
#[derive(Debug)]
pub(super) struct MpiWorld {
    pub membership: Arc<Membership>,
    pub mpi: Mpi,
    /// True if this machine has more ranks than cores, so that spinning takes time from other ranks.
    pub crowded: bool,
    tags: Tags,
    groups: OpenGroups<MpiGroup>,
    /// Transfers that no request waits for any more, and that MPI has not finished.
    abandoned: Mutex<Vec<Transfers>>,
    /// The number of calls in flight whose request lives.
    pub in_flight: AtomicUsize,
    /// True once MPI must not be called any more; set with the lock held.
    closed: AtomicBool,
}

impl MpiWorld {
    pub fn new(membership: Arc<Membership>, mpi: Mpi, crowded: bool) -> MpiWorld {
        MpiWorld {
            membership,
            tags: Tags::up_to(mpi.tag_limit),
            mpi,
            crowded,
            groups: OpenGroups::default(),
            abandoned: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        }
    }

    /// Locks MPI, unless it has ended.
    pub fn guard(&self) -> Option<MpiGuard<'_>> {
        let guard = self.mpi.guard();
        (!self.closed.load(Ordering::Relaxed)).then_some(guard)
    }

    /// Keeps transfers that no request waits for until MPI has finished them.
    pub fn abandon(&self, transfers: Transfers) {
        if !transfers.is_done() {
            lock(&self.abandoned).push(transfers);
        }
    }

    /// Lets MPI move the messages in flight. Returns true if there are any.
    pub fn progress(&self) -> bool {
        let Some(guard) = self.mpi.try_guard() else { return true };
        let mut abandoned = lock(&self.abandoned);
        // The memory of transfers that failed is leaked. No request waits for them, and the other end gets its own
        // error.
        abandoned.retain_mut(|transfers| matches!(transfers.test(&guard), Ok(false)));
        let in_flight = self.in_flight.load(Ordering::Relaxed) > 0;
        if in_flight {
            // An error is returned by the call whose message it concerns.
            let _ = guard.make_progress();
        }
        in_flight || !abandoned.is_empty()
    }

    /// Returns the group, which is opened if it is new.
    pub fn group(&self, ranks: &[usize], name: &str) -> Result<Arc<MpiGroup>> {
        if let Some(group) = self.groups.find(ranks, name) {
            return Ok(group);
        }
        let state = GroupMember::open(&self.membership, ranks, name);
        // A group of one rank sends nothing.
        let number = if ranks.len() == 1 { 0 } else { self.number(&state)? };
        Ok(self.groups.keep(ranks, name, MpiGroup::new(state, number, self.tags)))
    }

    /// Returns the coordinator's number of a group, the same on all members.
    fn number(&self, group: &GroupMember) -> Result<u32> {
        let answer = self.membership.get(&format!("#{}", group.key()), self.membership.deadline);
        let bytes = answer.and_then(|bytes| bytes.try_into().ok());
        let no_answer = || group.given_up(&CallNumber::CONNECT, "connect");
        let number = bytes.map(u64::from_le_bytes).ok_or_else(no_answer)?;
        match u32::try_from(number) {
            Ok(number) if number < self.tags.groups_len() => Ok(number),
            _ => Err(Error::unsupported(
                "group",
                "MPI has no tags for more groups",
                format!("group {} of {}", number + 1, self.tags.groups_len()),
                "open each group once, under one name",
            )),
        }
    }

    /// Ends MPI after every rank's program has ended.
    pub fn close(&self) -> Result<()> {
        let guard = self.mpi.guard();
        self.closed.store(true, Ordering::Relaxed);
        lock(&self.abandoned).drain(..).for_each(|transfers| transfers.give_up(&guard));
        guard.finish().map_err(|e| {
            let (id, reason) = (self.membership.world_id("end"), e.to_string());
            CommFault::Transport { id, rank: self.membership.rank, reason }.into()
        })
    }
}
