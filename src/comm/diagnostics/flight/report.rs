//! The conclusions from the records of all ranks.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

use super::record::{CallRecord, CallState, GroupRecord, RankRecord};
use crate::comm::calls::{Route, Sequence};
use crate::comm::diagnostics::wait_graph::cycle;
use crate::error::{CallId, Wait};

/// The records of a world's ranks, and what follows from them. Its text is what a person reads first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlightReport {
    /// The records, by rank.
    pub records: Vec<RankRecord>,
    /// Ranks that left no record: they were killed, had ended well, or never failed.
    pub without_record: Vec<usize>,
    /// The first call of each group to which members brought what does not belong together, earliest first.
    pub mismatches: Vec<MismatchedCall>,
    /// The first call of each group in which ranks waited for others that never came, earliest first.
    pub incomplete: Vec<IncompleteCall>,
    /// Ranks that waited for each other; empty if none did.
    pub cycle: Vec<Wait>,
    /// The rank that failed first on its own account, and why.
    pub first: Option<(usize, String)>,
}

/// A call to which ranks brought what does not belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MismatchedCall {
    /// The call, as the first of the ranks made it.
    pub id: CallId,
    /// The calls that were brought, each with the ranks that brought it, and the operators that wanted it.
    pub brought: Vec<(String, Vec<usize>)>,
}

/// A call that some members never came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncompleteCall {
    /// The call.
    pub id: CallId,
    /// The members that came.
    pub waiting: Vec<usize>,
    /// Those that did not, each with the last call that it made, if it left a record of any.
    pub absent: Vec<(usize, Option<String>)>,
}

impl FlightReport {
    pub(super) fn new(records: Vec<RankRecord>) -> FlightReport {
        let world_len = records.first().map_or(0, |record| record.world_len);
        let known: HashSet<usize> = records.iter().map(|record| record.rank).collect();
        let without_record = (0..world_len).filter(|rank| !known.contains(rank)).collect();
        let first = records.iter().filter(|record| !record.is_echo && !record.cause.is_empty());
        let first = first.min_by_key(|record| record.began_unix_us.saturating_add(record.failed_us));
        let first = first.map(|record| (record.rank, record.cause.clone()));
        let matches = CallMatches::of(&records);
        let mismatches = matches.mismatches();
        let (incomplete, cycle) = (matches.incomplete(), matches.cycle());
        FlightReport { without_record, mismatches, incomplete, cycle, first, records }
    }
}

/// A call by whoever made it: the group's number, the sequence, and the place in it.
type MatchKey = (usize, Sequence, u64);

/// A call by one of its members.
#[derive(Clone, Copy)]
struct MemberCall<'a> {
    record: &'a RankRecord,
    call: &'a CallRecord,
    /// The rank's place in the group.
    index: usize,
}

/// The calls of all ranks, by where they meet.
struct CallMatches<'a> {
    records: &'a [RankRecord],
    calls: BTreeMap<MatchKey, Vec<MemberCall<'a>>>,
    /// The last call that a rank made in a group's sequence; of messages, the last one sent.
    reached: HashMap<(usize, Sequence, usize), u64>,
    /// The calls that ranks waited in or were told the failure of and to which others never came, earliest first.
    unfinished: Vec<MatchKey>,
}

impl<'a> CallMatches<'a> {
    fn of(records: &'a [RankRecord]) -> CallMatches<'a> {
        let mut numbers: HashMap<&GroupRecord, usize> = HashMap::new();
        let mut calls: BTreeMap<MatchKey, Vec<MemberCall<'a>>> = BTreeMap::new();
        let mut reached = HashMap::new();
        for record in records {
            let groups: Vec<(usize, usize)> = record
                .groups
                .iter()
                .map(|group| {
                    let next = numbers.len();
                    let index = group.ranks.iter().position(|&rank| rank == record.rank);
                    (*numbers.entry(group).or_insert(next), index.expect("a record's groups have its rank"))
                })
                .collect();
            for call in &record.calls {
                let (number, index) = groups[call.group];
                let sequence = call.sequence(index);
                calls.entry((number, sequence, call.seq)).or_default().push(MemberCall {
                    record,
                    call,
                    index,
                });
                if !matches!(call.brought.route, Route::Recv { .. }) {
                    let last = reached.entry((number, sequence, record.rank)).or_insert(call.seq);
                    *last = call.seq.max(*last);
                }
            }
        }
        let mut matches = CallMatches { records, calls, reached, unfinished: vec![] };
        let waits = matches.calls.iter().filter_map(|(&place, came)| {
            let began = came.iter().filter(|one| one.waits()).map(|one| one.call.started_us).min()?;
            (!matches.absent(place).is_empty()).then_some((began, place))
        });
        let mut waits: Vec<(u64, MatchKey)> = waits.collect();
        waits.sort_unstable();
        matches.unfinished = waits.into_iter().map(|(_, place)| place).collect();
        matches
    }

    /// The first difference of each sequence, earliest first.
    fn mismatches(&self) -> Vec<MismatchedCall> {
        let mut seen = HashSet::new();
        let mut all: Vec<(u64, MismatchedCall)> = Vec::new();
        for (&(group, sequence, _), came) in &self.calls {
            if !seen.contains(&(group, sequence)) && !all_agree(came) {
                seen.insert((group, sequence));
                let began = came.iter().map(|one| one.call.started_us).min().unwrap_or(0);
                all.push((began, mismatch(came)));
            }
        }
        all.sort_by_key(|(began, _)| *began);
        all.into_iter().map(|(_, mismatch)| mismatch).collect()
    }

    /// The members that never came to a call for which others waited.
    fn absent(&self, (group, sequence, seq): MatchKey) -> Vec<usize> {
        let Some(first) = self.calls.get(&(group, sequence, seq)).and_then(|came| came.first()) else {
            return vec![];
        };
        let ranks = &first.record.group(first.call).ranks;
        let has_come =
            |rank: usize| self.reached.get(&(group, sequence, rank)).is_some_and(|last| *last >= seq);
        match sequence {
            Sequence::Collective => ranks.iter().copied().filter(|&rank| !has_come(rank)).collect(),
            // A sender does not wait for its receiver, nor a rank for itself.
            Sequence::Message { from, to } if from == to || has_come(ranks[from]) => vec![],
            Sequence::Message { from, .. } => vec![ranks[from]],
        }
    }

    fn incomplete(&self) -> Vec<IncompleteCall> {
        let mut seen = HashSet::new();
        let first = self.unfinished.iter().filter(|(group, sequence, _)| seen.insert((*group, *sequence)));
        let last = |rank: usize| {
            let at = self.records.binary_search_by_key(&rank, |record| record.rank).ok()?;
            Some(self.records[at].id(self.records[at].calls.last()?).to_string())
        };
        let incomplete = |&place: &MatchKey| {
            let came = &self.calls[&place];
            let waits = came.iter().find(|one| one.waits()).unwrap_or(&came[0]);
            let same = came.iter().filter(|one| one.call.brought.name == waits.call.brought.name);
            IncompleteCall {
                id: waits.id(),
                waiting: same.map(|one| one.record.rank).collect(),
                absent: self.absent(place).into_iter().map(|rank| (rank, last(rank))).collect(),
            }
        };
        first.map(incomplete).collect()
    }

    /// Ranks that waited for each other, if any did.
    fn cycle(&self) -> Vec<Wait> {
        let mut waits: HashMap<usize, Vec<(CallId, MatchKey)>> = HashMap::new();
        let mut waited_for: BTreeSet<usize> = BTreeSet::new();
        let mut order = Vec::new();
        for &place in &self.unfinished {
            waited_for.extend(self.absent(place));
            for one in self.calls[&place].iter().filter(|one| one.waits()) {
                waits.entry(one.record.rank).or_default().push((one.id(), place));
                order.push((one.record.rank, one.id(), place));
            }
        }
        let of = |rank: usize| {
            let all = waits.get(&rank).into_iter().flatten();
            all.map(|(id, place)| (id.clone(), self.absent(*place))).collect()
        };
        // Only a rank that others wait for can be part of a cycle.
        let starts = order.iter().filter(|(rank, ..)| waited_for.contains(rank));
        let mut found = starts.filter_map(|(rank, id, place)| cycle(*rank, id, &self.absent(*place), of));
        found.next().unwrap_or_default()
    }
}

impl MemberCall<'_> {
    fn waits(&self) -> bool {
        matches!(self.call.state, CallState::Waiting | CallState::Failed)
    }

    fn id(&self) -> CallId {
        self.record.id(self.call)
    }

    fn agrees(&self, other: &MemberCall<'_>) -> bool {
        self.call.brought.agrees(self.index, &other.call.brought, other.index)
    }
}

fn all_agree(came: &[MemberCall<'_>]) -> bool {
    let Some((first, rest)) = came.split_first() else { return true };
    match first.call.brought.route {
        Route::AllToAll => {
            came.iter().enumerate().all(|(i, one)| came[..i].iter().all(|other| one.agrees(other)))
        }
        // What agrees with one agrees with all.
        _ => rest.iter().all(|one| one.agrees(first)),
    }
}

fn mismatch(came: &[MemberCall<'_>]) -> MismatchedCall {
    let mut brought: Vec<(String, Vec<usize>)> = Vec::new();
    for MemberCall { record, call, .. } in came {
        let operator =
            if call.operator.is_empty() { String::new() } else { format!(" (for {})", call.operator) };
        let text = format!("{}{operator}", call.brought);
        match brought.iter_mut().find(|(said, _)| *said == text) {
            Some((_, ranks)) => ranks.push(record.rank),
            None => brought.push((text, vec![record.rank])),
        }
    }
    MismatchedCall { id: came[0].id(), brought }
}

/// A line each: what was read, what differs, who is behind, who waits for whom, and what each rank said.
impl fmt::Display for FlightReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FlightReport { records, without_record, mismatches, incomplete, cycle, first } = self;
        writeln!(f, "records of {} rank(s) of {}", records.len(), records.len() + without_record.len())?;
        if !without_record.is_empty() {
            writeln!(f, "no record: rank(s) {without_record:?}")?;
        }
        if let Some((rank, cause)) = first {
            writeln!(f, "first: rank {rank}: {cause}")?;
        }
        for MismatchedCall { id, brought } in mismatches {
            let each: Vec<String> =
                brought.iter().map(|(what, ranks)| format!("rank(s) {ranks:?} brought {what}")).collect();
            writeln!(f, "differs: {id}: {}", each.join(", "))?;
        }
        for Wait { rank, id, waits_for } in cycle {
            writeln!(f, "circle: rank {rank} waited in {id} for rank {waits_for}")?;
        }
        for IncompleteCall { id, waiting, absent } in incomplete {
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
            let last = record.calls.iter().rev().find(|call| call.state == CallState::Completed);
            let last = last.map_or("nothing".into(), |call| record.id(call).to_string());
            write!(f, "rank {}: {} call(s), completed {last} last", record.rank, record.calls_len)?;
            writeln!(f, "{}{}", if record.cause.is_empty() { "" } else { "; " }, record.cause)?;
        }
        Ok(())
    }
}
