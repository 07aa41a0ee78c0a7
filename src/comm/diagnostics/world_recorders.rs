//! The recorders of ranks that share memory, and what is known from all of them together.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::flight::{SlowRank, write};
use super::recorder::{RankWait, Recorder};
use super::wait_graph::cycle;
use crate::comm::calls::Sequence;
use crate::error::{CallId, CommFault, LastCall, Wait};

/// The settings by which ranks are recorded.
#[derive(Clone, Debug, Default)]
pub(crate) struct FlightSettings {
    /// The folder of records that are written on failure; without one, that of the environment.
    pub dir: Option<PathBuf>,
}

/// The recorders of all ranks of a world whose ranks are threads of this process.
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

    /// The last calls that the ranks of a group have completed.
    pub(crate) fn last(&self, name: &str, ranks: &[usize]) -> Vec<LastCall> {
        let last = |&rank: &usize| {
            let (on_group, in_world) = self.recorders[rank].last(name, ranks);
            LastCall { rank, on_group, in_world }
        };
        ranks.iter().map(last).collect()
    }

    /// The cycle of waits that `rank` is in with a call of a group, if it is in one.
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
        // In the same order for whoever finds the cycle.
        let mut last: Vec<LastCall> = last.collect();
        last.sort_by_key(|last| last.rank);
        Some(CommFault::Cycle { id: own.id, rank, waits, last })
    }

    /// Where ranks wait that others miss, and for whom, and where these wait in turn: first those who wait for somebody that
    /// does not wait itself, which is where the trouble began.
    pub(crate) fn elsewhere(&self, missing: &[usize]) -> Vec<Wait> {
        let mut queue = missing.to_vec();
        let (mut roots, mut others) = (Vec::new(), Vec::new());
        let mut at = 0;
        while let Some(&rank) = queue.get(at) {
            at += 1;
            let Some(wait) = self.recorders[rank].waits().into_iter().next() else { continue };
            let absent = self.absent(&wait);
            let idle = absent.iter().find(|&&other| self.recorders[other].waits().is_empty());
            let Some(&waits_for) = idle.or(absent.first()) else { continue };
            let list = if idle.is_some() { &mut roots } else { &mut others };
            list.push(Wait { rank, id: wait.id, waits_for });
            if !queue.contains(&waits_for) {
                queue.push(waits_for);
            }
        }
        roots.append(&mut others);
        roots
    }

    /// Waits that have become longer than `patience`, each told once.
    pub(crate) fn slow(&self, patience: Duration, deadline: Duration) -> Vec<SlowRank> {
        let mut slow = Vec::new();
        for recorder in &self.recorders {
            for wait in recorder.slow(patience) {
                let waits_for = self.absent(&wait);
                // It may have come this very moment.
                if !waits_for.is_empty() {
                    let waited = wait.since.elapsed();
                    slow.push(SlowRank { rank: recorder.rank, id: wait.id, waits_for, waited, deadline });
                }
            }
        }
        slow
    }

    /// Writes the records of all ranks that have not written theirs.
    pub(crate) fn write(&self, cause: &str) {
        self.recorders.iter().for_each(|recorder| recorder.write(cause, true));
    }

    /// The members that have not come to the call.
    fn absent(&self, wait: &RankWait) -> Vec<usize> {
        let members: Vec<usize> = match wait.sequence {
            Sequence::Collective => wait.group.ranks.to_vec(),
            Sequence::Message { from, .. } => vec![wait.group.ranks[from]],
        };
        members.into_iter().filter(|&rank| !self.recorders[rank].has_come(wait)).collect()
    }
}
