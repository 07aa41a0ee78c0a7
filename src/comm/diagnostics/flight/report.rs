//! The conclusions that follow from the records of all ranks.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

use super::record::{CallRecord, CallState, GroupRecord, RankRecord};
use crate::comm::calls::{Route, Sequence};
use crate::comm::diagnostics::wait_graph::cycle;
use crate::error::{CallId, Wait};
use crate::tensor::sort_by_key;

/// The records of a world's ranks, and the conclusions from them. `Display` writes a summary, one line per conclusion
/// and rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlightReport {
    /// The records, by rank.
    pub records: Vec<RankRecord>,
    /// Ranks without a record: they were killed, ended without a failure, or never started.
    pub without_record: Vec<usize>,
    /// Per group, the first call in which the members' calls did not fit together; earliest first.
    pub mismatches: Vec<MismatchedCall>,
    /// Per group, the first call in which ranks waited for members that never came; earliest first.
    pub incomplete: Vec<IncompleteCall>,
    /// Ranks that waited for each other in a cycle; empty if there is none.
    pub cycle: Vec<Wait>,
    /// The first rank that failed for a reason of its own, and the reason.
    pub first: Option<(usize, String)>,
}

/// A call in which the members' calls did not fit together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MismatchedCall {
    /// The call as its first member made it.
    pub id: CallId,
    /// The different calls with their operators, each with the ranks that made it.
    pub brought: Vec<(String, Vec<usize>)>,
}

/// A call that some members never reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncompleteCall {
    /// The call.
    pub id: CallId,
    /// The members that reached it.
    pub waiting: Vec<usize>,
    /// The members that did not, each with its last recorded call, if there is one.
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

/// The key by which calls of several ranks match: the group's number, the sequence, the number in the sequence.
type MatchKey = (usize, Sequence, u64);

/// One member's call.
#[derive(Clone, Copy)]
struct MemberCall<'a> {
    record: &'a RankRecord,
    call: &'a CallRecord,
    /// The rank's index in the group.
    index: usize,
}

/// The calls of all ranks, matched by group and number.
struct CallMatches<'a> {
    records: &'a [RankRecord],
    calls: BTreeMap<MatchKey, Vec<MemberCall<'a>>>,
    /// The last call that a rank made in a group's sequence; for messages, the last one sent.
    reached: HashMap<(usize, Sequence, usize), u64>,
    /// The calls that some members waited in or saw fail and that other members never reached; earliest first.
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

    /// Returns the first mismatch of each sequence, earliest first.
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
        sort_by_key(&mut all, |(began, _)| *began);
        all.into_iter().map(|(_, mismatch)| mismatch).collect()
    }

    /// Returns the members that never reached a call that other members waited in.
    fn absent(&self, (group, sequence, seq): MatchKey) -> Vec<usize> {
        let Some(first) = self.calls.get(&(group, sequence, seq)).and_then(|came| came.first()) else {
            return vec![];
        };
        let ranks = &first.record.group(first.call).ranks;
        let has_come =
            |rank: usize| self.reached.get(&(group, sequence, rank)).is_some_and(|last| *last >= seq);
        match sequence {
            Sequence::Collective => ranks.iter().copied().filter(|&rank| !has_come(rank)).collect(),
            // A sender does not wait for its receiver, and a rank does not wait for itself.
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

    /// Returns a cycle of ranks that waited for each other, or an empty list.
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
        // Only a rank that another one waits for can be part of a cycle.
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

    fn agrees_in_form(&self, other: &MemberCall<'_>) -> bool {
        self.call.brought.agrees_in_form(self.index, &other.call.brought, other.index)
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
        // A call that fits one member's fits every member's.
        _ => rest.iter().all(|one| one.agrees(first)),
    }
}

fn mismatch(came: &[MemberCall<'_>]) -> MismatchedCall {
    let mut brought: Vec<(String, Vec<usize>)> = Vec::new();
    // Calls that fit in all else differ in their tensors.
    let is_of_several = came.iter().all(|one| one.agrees_in_form(&came[0]));
    for MemberCall { record, call, .. } in came {
        let operator =
            if call.operator.is_empty() { String::new() } else { format!(" (for {})", call.operator) };
        let tensor = if is_of_several { format!(" of {}", call.brought.subject()) } else { String::new() };
        let text = format!("{}{tensor}{operator}", call.brought);
        match brought.iter_mut().find(|(said, _)| *said == text) {
            Some((_, ranks)) => ranks.push(record.rank),
            None => brought.push((text, vec![record.rank])),
        }
    }
    MismatchedCall { id: came[0].id(), brought }
}

/// Writes one line each for the ranks read, mismatches, incomplete calls, the cycle, and each rank's last call and
/// failure.
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
            if let Some(busy) = &record.busy {
                write!(f, "; {busy}")?;
            }
            writeln!(f, "{}{}", if record.cause.is_empty() { "" } else { "; " }, record.cause)?;
        }
        Ok(())
    }
}
