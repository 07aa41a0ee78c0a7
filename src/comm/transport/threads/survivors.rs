//! Rounds in which ranks agree on those that continue together after others have failed.

use std::time::Instant;

use super::status::WorldStatus;
use super::sync::{Condvar, Mutex, MutexGuard};
use crate::base::unpoisoned;
use crate::error::{Error, Result};

/// The ranks of a world that still work together, and the round that decides on the next ones.
#[derive(Debug)]
pub(super) struct Survivors {
    round: Mutex<SurvivorRound>,
    changed: Condvar,
}

#[derive(Debug)]
struct SurvivorRound {
    /// The number of finished rounds.
    generation: u64,
    /// The ranks that continued from the last round, ascending.
    members: Vec<usize>,
    /// The ranks that have joined the next round, and the time at which the first one did.
    joined: Vec<usize>,
    since: Option<Instant>,
}

impl Survivors {
    pub(super) fn new(world_len: usize) -> Survivors {
        let members = (0..world_len).collect();
        let round = SurvivorRound { generation: 0, members, joined: vec![], since: None };
        Survivors { round: Mutex::new(round), changed: Condvar::new() }
    }

    /// Returns true if the other ranks have continued without `rank`.
    pub(super) fn is_left(&self, rank: usize) -> bool {
        !self.round().members.contains(&rank)
    }

    /// Joins the next round. Returns the new generation and its ranks, which are those that join before the
    /// deadline, which counts anew from the end of work that a rank has announced.
    pub(super) fn join(&self, rank: usize, status: &WorldStatus) -> Result<(u64, Vec<usize>)> {
        let mut round = self.round();
        if !round.members.contains(&rank) {
            return Err(Error::invalid(
                "survivors",
                "the other ranks have continued without this rank",
                format!("rank {rank}, which asked too late to join {:?}", round.members),
                "end the program of this rank",
            ));
        }
        if round.joined.contains(&rank) {
            return Err(Error::invalid(
                "survivors",
                "another thread of this rank has joined the round",
                format!("rank {rank}"),
                "let one thread of a rank ask",
            ));
        }
        let mine = round.generation + 1;
        round.joined.push(rank);
        let since = *round.since.get_or_insert_with(Instant::now);
        while round.generation < mine {
            let is_awaited = |&rank: &usize| status.is_running(rank) && !round.joined.contains(&rank);
            let awaited: Vec<usize> = round.members.iter().copied().filter(is_awaited).collect();
            let left = status.time_left(awaited.iter().copied(), since.elapsed());
            if !awaited.is_empty() && !left.is_zero() {
                round = unpoisoned(self.changed.wait_timeout(round, left)).0;
                continue;
            }
            let mut members = std::mem::take(&mut round.joined);
            members.sort_unstable();
            *round = SurvivorRound { generation: mine, members, joined: vec![], since: None };
            self.changed.notify_all();
        }
        Ok((mine, round.members.clone()))
    }

    /// Wakes the ranks that have joined, to read the status of the others again.
    pub(super) fn wake(&self) {
        // A rank that has read the status and is not asleep yet holds the lock.
        drop(self.round());
        self.changed.notify_all();
    }

    fn round(&self) -> MutexGuard<'_, SurvivorRound> {
        unpoisoned(self.round.lock())
    }
}
