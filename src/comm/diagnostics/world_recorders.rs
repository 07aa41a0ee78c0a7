//! The recorders of ranks that share memory, and the answers that need all of them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::flight::{SlowRank, write};
use super::recorder::{RankWait, Recorder};
use super::wait_graph::{Blame, RankWaits, blame, cycle};
use crate::comm::calls::{BusyWork, Sequence};
use crate::error::{BusyRank, CallId, CommFault, LastCall};
use crate::tensor::sort_by_key;

/// The settings of the flight recorder.
#[derive(Clone, Debug, Default)]
pub(crate) struct FlightSettings {
    /// The folder for records of failed ranks. If absent, the environment variable names it.
    pub dir: Option<PathBuf>,
}

/// The recorders of all ranks of a world that consists of threads of this process.
#[derive(Debug)]
pub(crate) struct WorldRecorders {
    recorders: Box<[Arc<Recorder>]>,
}

impl WorldRecorders {
    pub(crate) fn new(world_len: usize, flights: &FlightSettings) -> Arc<WorldRecorders> {
        let dir = flights.dir.clone().or_else(write::dir_from_env);
        let recorder = |rank| Arc::new(Recorder::new(rank, world_len, dir.clone()));
        Arc::new(WorldRecorders { recorders: (0..world_len).map(recorder).collect() })
    }

    pub(crate) fn len(&self) -> usize {
        self.recorders.len()
    }

    pub(crate) fn recorder(&self, rank: usize) -> &Arc<Recorder> {
        &self.recorders[rank]
    }

    /// Returns the last calls that the ranks of a group have completed.
    pub(crate) fn last(&self, name: &str, ranks: &[usize]) -> Vec<LastCall> {
        let last = |&rank: &usize| {
            let (on_group, in_world) = self.recorders[rank].last(name, ranks);
            LastCall { rank, on_group, in_world }
        };
        ranks.iter().map(last).collect()
    }

    /// Returns the cycle of waits through `rank`'s wait in a call, if there is one.
    pub(crate) fn cycle(&self, rank: usize, id: &CallId) -> Option<CommFault> {
        let own = self.recorders[rank].waits().into_iter().find(|wait| wait.id.is_call(id))?;
        let calls = |rank: usize| {
            let waits = self.recorders[rank].waits().into_iter();
            waits.map(|wait| (wait.id.clone(), self.absent(&wait))).collect()
        };
        let waits = cycle(rank, &own.id, &self.absent(&own), calls)?;
        let last = waits.iter().filter_map(|wait| {
            let waits = self.recorders[wait.rank].waits().into_iter().find(|own| own.id.is_call(&wait.id))?;
            let (on_group, in_world) = self.recorders[wait.rank].last(&waits.group.name, &waits.group.ranks);
            Some(LastCall { rank: wait.rank, on_group, in_world })
        });
        // Sorted, so that all ranks report the cycle in the same order.
        let mut last: Vec<LastCall> = last.collect();
        sort_by_key(&mut last, |last| last.rank);
        Some(CommFault::Cycle { id: own.id, rank, waits, last })
    }

    /// Follows the waits of ranks that are absent from a call of `rank` to the ranks that wait for none.
    pub(crate) fn blame(&self, rank: usize, absent: &[usize]) -> Blame {
        blame(rank, absent, |rank| {
            // A rank gives up while it waits, so that is read second.
            let waits = self.recorders[rank].waits().into_iter();
            let waits: Vec<_> = waits.map(|wait| (wait.id.clone(), self.absent(&wait))).collect();
            match self.recorders[rank].gave_up() {
                Some((id, named)) if waits.is_empty() => {
                    RankWaits { is_cause: named.contains(&rank), waits: vec![(id, named)] }
                }
                _ => RankWaits { waits, is_cause: false },
            }
        })
    }

    /// Returns the given ranks and all that they wait for, directly or through other ranks.
    pub(crate) fn awaited(&self, ranks: &[usize]) -> Vec<usize> {
        let mut all = ranks.to_vec();
        let mut at = 0;
        while let Some(&rank) = all.get(at) {
            at += 1;
            for next in self.recorders[rank].waits().iter().flat_map(|wait| self.absent(wait)) {
                if !all.contains(&next) {
                    all.push(next);
                }
            }
        }
        all
    }

    /// Returns the work that the given ranks have announced.
    fn busy(&self, ranks: &[usize]) -> Vec<BusyRank> {
        let busy = |&rank: &usize| {
            let BusyWork { what, spent, limit } = self.recorders[rank].announcer.work()?;
            Some(BusyRank { rank, what, spent, limit })
        };
        ranks.iter().filter_map(busy).collect()
    }

    /// Returns the waits that have become longer than `patience`. Each is returned once.
    pub(crate) fn slow(&self, patience: Duration, deadline: Duration) -> Vec<SlowRank> {
        let mut slow = Vec::new();
        for recorder in &self.recorders {
            for wait in recorder.slow(patience) {
                let absent = self.absent(&wait);
                // The missing rank may just have arrived.
                if !absent.is_empty() {
                    let waited = wait.since.elapsed();
                    let waits_for = self.blame(recorder.rank, &absent).ranks;
                    let (rank, id, busy) = (recorder.rank, wait.id, self.busy(&waits_for));
                    slow.push(SlowRank { rank, id, waits_for, busy, waited, deadline });
                }
            }
        }
        slow
    }

    /// Writes the records of all ranks that have not written theirs yet.
    pub(crate) fn write(&self, cause: &str) {
        self.recorders.iter().for_each(|recorder| recorder.write(cause, true));
    }

    /// Returns the members that have not started the call.
    fn absent(&self, wait: &RankWait) -> Vec<usize> {
        let members: Vec<usize> = match wait.sequence {
            Sequence::Collective => wait.group.ranks.to_vec(),
            Sequence::Message { from, .. } => vec![wait.group.ranks[from]],
        };
        members.into_iter().filter(|&rank| !self.recorders[rank].has_come(wait)).collect()
    }
}
