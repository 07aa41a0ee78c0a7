//! What the records of all ranks say together.

use std::collections::BTreeMap;
use std::fmt;

use super::record::{Brought, CallRecord, RankRecord, State};
use crate::comm::calls::{Sequence, label};
use crate::comm::diagnostics::wait_graph::circle;
use crate::error::{CallId, Wait};

/// The records of a world's ranks, and what follows from them. Its text is what a person reads first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The records, by rank.
    pub records: Vec<RankRecord>,
    /// Ranks that left no record: they were killed, had ended well, or never failed.
    pub silent: Vec<usize>,
    /// The first call of each group to which members brought what does not belong together, earliest first.
    pub differences: Vec<Difference>,
    /// Calls in which ranks waited for others that never came, earliest first.
    pub behind: Vec<Behind>,
    /// Ranks that waited for each other; empty where none did.
    pub circle: Vec<Wait>,
    /// The rank that failed first on its own account, and why.
    pub first: Option<(usize, String)>,
}

/// A call to which ranks brought what does not belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The call, as the first of the ranks made it.
    pub id: CallId,
    /// What was brought, each with the ranks that brought it, and the operators that wanted it.
    pub brought: Vec<(String, Vec<usize>)>,
}

/// A call that some members never came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behind {
    /// The call.
    pub id: CallId,
    /// The members that came.
    pub waiting: Vec<usize>,
    /// Those that did not, each with the last call that it made, if it left a record of any.
    pub absent: Vec<(usize, Option<String>)>,
}

/// A call of a group, by whoever made it.
type Key = (String, Vec<usize>, u64, Sequence, u64);

/// A key without its number: the calls of one group by one sequence.
type Calls = (String, Vec<usize>, u64, Sequence);

impl Report {
    pub(super) fn new(records: Vec<RankRecord>) -> Report {
        let world_len = records.first().map_or(0, |record| record.world_len);
        let silent =
            (0..world_len).filter(|&rank| records.iter().all(|record| record.rank != rank)).collect();
        let first = records.iter().filter(|record| !record.is_echo && !record.cause.is_empty());
        let first = first.min_by_key(|record| record.began_unix_us.saturating_add(record.failed_us));
        let first = first.map(|record| (record.rank, record.cause.clone()));
        let mut report =
            Report { records, silent, differences: vec![], behind: vec![], circle: vec![], first };
        report.differences = report.differences();
        let mut waits = report.unfinished();
        report.circle = waits
            .iter()
            .find_map(|(id, rank, absent)| circle(*rank, id, absent, |r| of(&waits, r)))
            .unwrap_or_default();
        waits.dedup_by(|a, b| a.0.is_call(&b.0));
        report.behind = waits.iter().map(|(id, _, absent)| report.behind(id, absent)).collect();
        report
    }

    fn calls(&self) -> impl Iterator<Item = (usize, &CallRecord)> {
        self.records.iter().flat_map(|record| record.calls.iter().map(move |call| (record.rank, call)))
    }

    fn differences(&self) -> Vec<Difference> {
        let mut met: BTreeMap<Key, Vec<(usize, &CallRecord)>> = BTreeMap::new();
        for (rank, call) in self.calls() {
            met.entry(key(call)).or_default().push((rank, call));
        }
        let mut first: BTreeMap<Calls, (u64, Difference)> = BTreeMap::new();
        for ((group, ranks, generation, sequence, _), calls) in met {
            let place = (group, ranks, generation, sequence);
            if first.contains_key(&place) {
                continue;
            }
            if let Some(difference) = difference(&calls) {
                let at = calls.iter().map(|(_, call)| call.started_us).min().unwrap_or(0);
                first.insert(place, (at, difference));
            }
        }
        let mut all: Vec<_> = first.into_values().collect();
        all.sort_by_key(|(at, _)| *at);
        all.into_iter().map(|(_, difference)| difference).collect()
    }

    /// The calls that ranks waited in or were told the failure of, and members that never came, earliest first.
    fn unfinished(&self) -> Vec<(CallId, usize, Vec<usize>)> {
        let mut open: Vec<(u64, CallId, usize, Vec<usize>)> = Vec::new();
        for (rank, call) in
            self.calls().filter(|(_, call)| matches!(call.state, State::Waiting | State::Failed))
        {
            let absent: Vec<usize> =
                members(call).into_iter().filter(|&r| r != rank && !self.came(r, call)).collect();
            if !absent.is_empty() {
                open.push((call.started_us, id(call), rank, absent));
            }
        }
        open.sort_by_key(|(at, ..)| *at);
        open.into_iter().map(|(_, id, rank, absent)| (id, rank, absent)).collect()
    }

    /// True where a rank's record knows of this call or of a later one of its sequence.
    fn came(&self, rank: usize, to: &CallRecord) -> bool {
        let there = |call: &CallRecord| {
            (&call.group, &call.ranks, call.generation, call.sequence)
                == (&to.group, &to.ranks, to.generation, to.sequence)
        };
        let end = if matches!(to.brought.call, "recv") { "send" } else { "recv" };
        let is_message = to.sequence != Sequence::Collective;
        self.calls().any(|(r, call)| {
            r == rank && there(call) && call.seq >= to.seq && (!is_message || call.brought.call == end)
        })
    }

    fn behind(&self, id: &CallId, absent: &[usize]) -> Behind {
        let came = |rank: &usize| self.calls().any(|(r, call)| r == *rank && self::id(call).is_call(id));
        let last = |&rank: &usize| {
            let record = self.records.iter().find(|record| record.rank == rank);
            (rank, record.and_then(|record| Some(self::id(record.calls.last()?).to_string())))
        };
        Behind {
            id: id.clone(),
            waiting: self.records.iter().map(|record| record.rank).filter(came).collect(),
            absent: absent.iter().map(last).collect(),
        }
    }
}

fn of(waits: &[(CallId, usize, Vec<usize>)], rank: usize) -> Vec<(CallId, Vec<usize>)> {
    waits.iter().filter(|(_, r, _)| *r == rank).map(|(id, _, absent)| (id.clone(), absent.clone())).collect()
}

fn key(call: &CallRecord) -> Key {
    (call.group.clone(), call.ranks.clone(), call.generation, call.sequence, call.seq)
}

/// Who must come to a call.
fn members(call: &CallRecord) -> Vec<usize> {
    match call.sequence {
        Sequence::Collective => call.ranks.clone(),
        // A sender does not wait for its receiver.
        Sequence::Message { from, .. } => vec![call.ranks[from]],
    }
}

fn id(call: &CallRecord) -> CallId {
    CallId::new(call.brought.call, call.seq, label(&call.group, &call.ranks))
}

fn difference(calls: &[(usize, &CallRecord)]) -> Option<Difference> {
    let index = |rank: usize, call: &CallRecord| call.ranks.iter().position(|&r| r == rank);
    let agree =
        |(a, x): &(usize, &CallRecord), (b, y): &(usize, &CallRecord)| match (index(*a, x), index(*b, y)) {
            (Some(a), Some(b)) => Brought::agrees(&x.brought, a, &y.brought, b),
            // A record that names a group it is not in says nothing.
            _ => true,
        };
    let all_agree = calls.iter().enumerate().all(|(i, x)| calls[..i].iter().all(|y| agree(x, y)));
    if all_agree {
        return None;
    }
    let mut brought: Vec<(String, Vec<usize>)> = Vec::new();
    for (rank, call) in calls {
        let operator =
            if call.operator.is_empty() { String::new() } else { format!(" (for {})", call.operator) };
        let text = format!("{}{operator}", call.brought);
        match brought.iter_mut().find(|(said, _)| *said == text) {
            Some((_, ranks)) => ranks.push(*rank),
            None => brought.push((text, vec![*rank])),
        }
    }
    Some(Difference { id: id(calls[0].1), brought })
}

/// A line each: what was read, what differs, who is behind, who waits for whom, and what each rank said.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { records, silent, differences, behind, circle, first } = self;
        writeln!(f, "records of {} rank(s) of {}", records.len(), records.len() + silent.len())?;
        if !silent.is_empty() {
            writeln!(f, "no record: rank(s) {silent:?}")?;
        }
        if let Some((rank, cause)) = first {
            writeln!(f, "first: rank {rank}: {cause}")?;
        }
        for Difference { id, brought } in differences {
            let each: Vec<String> =
                brought.iter().map(|(what, ranks)| format!("rank(s) {ranks:?} brought {what}")).collect();
            writeln!(f, "differs: {id}: {}", each.join(", "))?;
        }
        for Wait { rank, id, waits_for } in circle {
            writeln!(f, "circle: rank {rank} waited in {id} for rank {waits_for}")?;
        }
        for Behind { id, waiting, absent } in behind {
            write!(f, "behind: {id}: rank(s) {waiting:?} came")?;
            for (rank, last) in absent {
                match last {
                    Some(last) => write!(f, "; rank {rank} did not, its last call is {last}")?,
                    None => write!(f, "; rank {rank} did not, and no call of it is known")?,
                }
            }
            writeln!(f)?;
        }
        for record in records {
            let last = record.calls.iter().rev().find(|call| call.state == State::Completed);
            let last = last.map_or("nothing".into(), |call| id(call).to_string());
            write!(f, "rank {}: {} call(s), completed {last} last", record.rank, record.calls_len)?;
            writeln!(f, "{}{}", if record.cause.is_empty() { "" } else { "; " }, record.cause)?;
        }
        Ok(())
    }
}
