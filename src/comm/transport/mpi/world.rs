//! The state that a rank, its channels and its watchdog share.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::group::{MpiGroup, Tags};
use super::library::{Mpi, MpiGuard};
use super::transfers::Transfers;
use crate::comm::lock::lock;
use crate::comm::transport::coordinated::{CallNumber, GroupMember, Membership, OpenGroups};
use crate::error::{CommFault, Error, Result};

/// A rank's side of a world of MPI's processes.
#[derive(Debug)]
pub(super) struct MpiWorld {
    pub membership: Arc<Membership>,
    pub mpi: Mpi,
    /// True if this machine has more ranks than cores: spinning takes time from the others.
    pub crowded: bool,
    tags: Tags,
    groups: OpenGroups<MpiGroup>,
    /// What nobody waits for any more, and MPI is not through with.
    abandoned: Mutex<Vec<Transfers>>,
    /// The number of calls in flight that somebody holds.
    pub in_flight: AtomicUsize,
    /// True once nobody may call MPI any more; set by who has the port.
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

    /// The right to call MPI, as long as there is one.
    pub fn port(&self) -> Option<MpiGuard<'_>> {
        let port = self.mpi.port();
        (!self.closed.load(Ordering::Relaxed)).then_some(port)
    }

    /// Keeps transfers that nobody waits for until MPI is through with them.
    pub fn abandon(&self, transfers: Transfers) {
        if !transfers.is_done() {
            lock(&self.abandoned).push(transfers);
        }
    }

    /// Looks after what is in flight; true if something is.
    pub fn progress(&self) -> bool {
        let Some(port) = self.mpi.try_port() else { return true };
        let mut abandoned = lock(&self.abandoned);
        // Transfers that failed have lost their memory to MPI: there is nobody to tell of it but who waits at the other end.
        abandoned.retain_mut(|transfers| matches!(transfers.test(&port), Ok(false)));
        let in_flight = self.in_flight.load(Ordering::Relaxed) > 0;
        if in_flight {
            // Its errors come with the calls that they befall.
            let _ = port.poke();
        }
        in_flight || !abandoned.is_empty()
    }

    /// The group, made or found.
    pub fn group(&self, ranks: &[usize], name: &str) -> Result<Arc<MpiGroup>> {
        if let Some(group) = self.groups.find(ranks, name) {
            return Ok(group);
        }
        let state = GroupMember::open(&self.membership, ranks, name);
        // A group of one sends nothing.
        let number = if ranks.len() == 1 { 0 } else { self.number(&state)? };
        Ok(self.groups.keep(ranks, name, MpiGroup::new(state, number, self.tags)))
    }

    /// The coordinator's number of a group, the same for all members.
    fn number(&self, group: &GroupMember) -> Result<u32> {
        let answer = self.membership.get(&format!("#{}", group.key()));
        let bytes = answer.and_then(|bytes| bytes.try_into().ok());
        let no_answer = || group.given_up(&CallNumber::CONNECT, "connect");
        let number = bytes.map(u64::from_le_bytes).ok_or_else(no_answer)?;
        match u32::try_from(number) {
            Ok(number) if number < self.tags.groups_len() => Ok(number),
            _ => Err(Error::unsupported(
                "group",
                "MPI's tags tell no more groups apart",
                format!("group {} of {}", number + 1, self.tags.groups_len()),
                "make groups once, under one name",
            )),
        }
    }

    /// Ends MPI in peace: every rank's program is over.
    pub fn close(&self) -> Result<()> {
        let port = self.mpi.port();
        self.closed.store(true, Ordering::Relaxed);
        lock(&self.abandoned).drain(..).for_each(|transfers| transfers.give_up(&port));
        port.finish().map_err(|e| {
            let (id, reason) = (self.membership.world_id("end"), e.to_string());
            CommFault::Transport { id, rank: self.membership.rank, reason }.into()
        })
    }
}
