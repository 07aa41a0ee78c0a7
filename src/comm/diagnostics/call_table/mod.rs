//! The coordinator's table of unfinished calls: who made which call, who has ended, who waits for whom.
//!
//! Ranks report their calls in any order. Every report is checked before it is used: the ranks of a group, the two
//! ends of a message, the amount of memory that one rank makes the table hold. A report that no correct rank sends is
//! refused with a text, for an error that names the rank.

mod busy;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use super::announced_work::{AnnouncedWork, BusyTime};
use super::table_group::{CallKey, Name, OpenCall, TableGroup, shortened};
use super::wait_graph::{Blame, RankWaits, blame, cycle};
use crate::comm::calls::{CallSignature, NAME_BYTES, Route, Sequence, group_number, label};
use crate::error::{CallId, CommFault, LastCall};
use crate::tensor::Shape;

/// Bytes that one rank may make the table hold for its groups and its unfinished calls, plus
/// [`BUDGET_BYTES_PER_RANK`] per rank of the world, since a call's lists of shapes grow with the world.
const BUDGET_BYTES: usize = 64 << 20;
const BUDGET_BYTES_PER_RANK: usize = 64 << 10;
/// Approximate size of a group or a call without its lists: entries in three trees or tables, and their slack.
const ENTRY_BYTES: usize = 1024;
/// Number of waits per rank that the search for a cycle follows. A cycle through a later wait is reported as a late
/// rank.
const SEARCHED: usize = 16;

/// A description of a report that no correct rank sends.
pub(in crate::comm) type ProtocolViolation = String;

/// The unfinished calls of a world.
#[derive(Debug)]
pub(in crate::comm) struct CallTable {
    deadline: Duration,
    groups: HashMap<u64, TableGroup>,
    /// The calls that some participants have not reached yet.
    open: BTreeMap<CallKey, OpenCall>,
    /// Per rank, the last call that all its participants have reached.
    last: Vec<Option<(CallKey, Name, Name)>>,
    /// Per rank, the open calls in which it waits.
    open_of: Vec<BTreeSet<CallKey>>,
    ended: Vec<bool>,
    ended_len: usize,
    /// Per rank, the bytes that it makes the table hold.
    held: Vec<usize>,
    /// The work that each rank has announced.
    work: Vec<AnnouncedWork>,
}

impl CallTable {
    /// Makes the table of a world of `world_len` ranks, whose calls time out after `deadline`.
    pub fn new(world_len: usize, deadline: Duration) -> CallTable {
        CallTable {
            deadline,
            groups: HashMap::new(),
            open: BTreeMap::new(),
            last: vec![None; world_len],
            open_of: vec![BTreeSet::new(); world_len],
            ended: vec![false; world_len],
            ended_len: 0,
            held: vec![0; world_len],
            work: (0..world_len).map(|_| AnnouncedWork::default()).collect(),
        }
    }

    /// Returns true once every rank's program has ended.
    pub fn all_have_ended(&self) -> bool {
        self.ended_len == self.ended.len()
    }

    pub fn has_ended(&self, rank: usize) -> bool {
        self.ended[rank]
    }

    /// Registers that rank `from` opens a group.
    ///
    /// # Errors
    /// Refuses a long name, ranks outside the world, duplicate ranks, and a group without `from`.
    pub fn open(
        &mut self,
        from: usize,
        name: &str,
        ranks: &[usize],
        now: Instant,
    ) -> Result<(), ProtocolViolation> {
        let world_len = self.last.len();
        if name.len() > NAME_BYTES {
            return Err(format!(
                "a group's name has {} bytes, but at most {NAME_BYTES} are allowed",
                name.len()
            ));
        }
        if ranks.len() > world_len {
            return Err(format!("a group has {} members in a world of {world_len}", ranks.len()));
        }
        let text = label(name, ranks);
        if let Some(rank) = ranks.iter().find(|&&rank| rank >= world_len) {
            return Err(format!("group {text} names rank {rank} in a world of {world_len}"));
        }
        if !ranks.contains(&from) {
            return Err(format!("it opens {text}, which it is not in"));
        }
        let number = group_number(name, ranks);
        if let Some(members) = self.groups.get_mut(&number) {
            if members.name != name || members.ranks != ranks {
                return Err(format!("{} and {text} have one number", members.label));
            }
            if members.opened.insert(from) {
                members.busy = members.busy.and(self.work[from].busy_time(now));
            }
            return Ok(());
        }
        if ranks.iter().collect::<HashSet<_>>().len() != ranks.len() {
            return Err(format!("group {text} names a rank twice"));
        }
        self.charge(from, ENTRY_BYTES + name.len() + text.len() + 8 * size_of_val(ranks))?;
        let mut members = TableGroup::new(name, text, ranks, from);
        members.busy = self.work[from].busy_time(now);
        self.groups.insert(number, members);
        Ok(())
    }

    /// Registers that rank `from` has reached a call, and returns the fault if the call does not fit those of other
    /// members or a missing member has ended.
    ///
    /// # Errors
    /// Refuses a call on a group that the rank has not opened, a message of other members, lists without one entry
    /// per member, long names, and more unfinished calls than the rank's budget allows.
    pub fn arrive(
        &mut self,
        from: usize,
        key: CallKey,
        signature: CallSignature,
        now: Instant,
    ) -> Result<Option<CommFault>, ProtocolViolation> {
        let members = self.members(from, key)?;
        let longest = signature.name.len().max(signature.operator.len()).max(signature.made_by.len());
        if longest > NAME_BYTES {
            return Err(format!(
                "the name of a call has {longest} bytes, but at most {NAME_BYTES} are allowed"
            ));
        }
        let position = members.position(key.1, from, matches!(signature.route, Route::Recv { .. }));
        let position = position
            .ok_or_else(|| format!("it comes to a message of {} that is not its own", members.label))?;
        let (len, [sent, expected]) =
            (members.len(key.1), [&signature.outgoing, &signature.incoming].map(Vec::len));
        if signature.route == Route::AllToAll && (sent, expected) != (len, len) {
            return Err(format!(
                "its {} on {} has {sent} parts for {expected}",
                signature.name, members.label
            ));
        }
        let here = self.open.get(&key).map_or(&[][..], |call| &call.arrivals);
        let Err(place) = here.binary_search_by_key(&position, |(at, _)| *at) else {
            return Err(format!("it comes to {} twice", members.id(key, &signature)));
        };
        let view = signature.view();
        // Except for all-to-all, a call that fits one member's fits every member's.
        let compared = if signature.route == Route::AllToAll { usize::MAX } else { 1 };
        let differs =
            here.iter().take(compared).find(|(at, other)| !view.agrees(position, &other.view(), *at));
        if let Some((at, other)) = differs {
            let ((low, first), (high, second)) = if *at < position {
                ((*at, other), (position, &signature))
            } else {
                ((position, &signature), (*at, other))
            };
            let (brought, other_brought) = second.view().describe_both(high, &first.view(), low);
            return Ok(Some(CommFault::Mismatch {
                id: members.id(key, &signature),
                rank: members.rank(key.1, high),
                brought: shortened(brought),
                other: members.rank(key.1, low),
                other_brought: shortened(other_brought),
                last: self.last(key),
            }));
        }
        if here.len() + 1 == len {
            self.complete(key, place, position, signature, self.work[from].busy_time(now));
            return Ok(None);
        }
        let waits = members.waits(key.1, position);
        self.charge(from, cost(&signature))?;
        if waits {
            self.open_of[from].insert(key);
        }
        let call = self.open.entry(key).or_default();
        call.arrivals.insert(place, (position, signature));
        call.busy = call.busy.and(self.work[from].busy_time(now));
        Ok(if self.ended_len > 0 { self.ended_member_fault(key) } else { None })
    }

    /// Registers that a rank's program has ended, and its work with it. Returns the fault of a call that waits for the
    /// rank, if there is one, and once all have ended that of a message without a receive.
    pub fn ended(&mut self, from: usize, now: Instant) -> Option<CommFault> {
        if std::mem::replace(&mut self.ended[from], true) {
            return None;
        }
        self.ended_len += 1;
        self.work[from].end(now);
        let awaits = |(key, call): (&CallKey, &OpenCall)| {
            let position = self.groups.get(&key.0)?.position(key.1, from, false)?;
            call.arrivals
                .iter()
                .all(|(at, _)| *at != position)
                .then(|| self.ended_member_fault(*key))
                .flatten()
        };
        let awaited = self.open.iter().find_map(awaits);
        awaited.or_else(|| if self.all_have_ended() { self.unreceived() } else { None })
    }

    /// Returns the fault of the first message without a receive.
    fn unreceived(&self) -> Option<CommFault> {
        self.open.iter().find_map(|(key, call)| {
            let (members, (0, signature)) = (self.groups.get(&key.0)?, call.arrivals.first()?) else {
                return None;
            };
            let Sequence::Message { from, to } = key.1 else { return None };
            Some(CommFault::Unreceived {
                id: members.id(*key, signature),
                rank: members.ranks[from],
                brought: shortened(signature.view().to_string()),
                receiver: members.ranks[to],
            })
        })
    }

    fn charge(&mut self, from: usize, bytes: usize) -> Result<(), ProtocolViolation> {
        let budget = BUDGET_BYTES + self.held.len().saturating_mul(BUDGET_BYTES_PER_RANK);
        let held = &mut self.held[from];
        if *held + bytes > budget {
            return Err(format!("its groups and its unfinished calls take more than {budget} bytes"));
        }
        *held += bytes;
        Ok(())
    }

    /// Returns the group of a call that a rank reports.
    fn members(&self, from: usize, (group, sequence, _): CallKey) -> Result<&TableGroup, ProtocolViolation> {
        let members = self.groups.get(&group).filter(|members| members.opened.contains(&from));
        let members = members
            .ok_or_else(|| format!("it reports a call on group {group:#x}, which it has not opened"))?;
        if let Sequence::Message { from: a, to: b } = sequence
            && a.max(b) >= members.ranks.len()
        {
            return Err(format!("it reports a message from {a} to {b} on {}", members.label));
        }
        Ok(members)
    }

    /// Removes a call that all participants have reached, the last one with `signature`, which was busy until `busy`.
    fn complete(
        &mut self,
        key: CallKey,
        place: usize,
        position: usize,
        signature: CallSignature,
        busy: BusyTime,
    ) {
        let OpenCall { mut arrivals, busy: before } = self.open.remove(&key).unwrap_or_default();
        let Some(members) = self.groups.get_mut(&key.0) else { return };
        for (at, signature) in &arrivals {
            let rank = members.rank(key.1, *at);
            self.held[rank] -= cost(signature);
            if self.open_of[rank].remove(&key) {
                self.work[rank].count_wait(before.and(busy));
            }
        }
        arrivals.insert(place, (position, signature));
        for (at, signature) in &arrivals {
            let rank = members.rank(key.1, *at);
            // Reports of several ranks may complete a later call first.
            let is_newer =
                |last: &(CallKey, Name, Name)| (last.0.0, last.0.1) == (key.0, key.1) && last.0.2 > key.2;
            if !self.last[rank].as_ref().is_some_and(is_newer) {
                self.last[rank] = Some((key, signature.name.clone(), signature.operator.clone()));
            }
        }
        if let (Sequence::Collective, Some((_, signature))) = (key.1, arrivals.first())
            && members.last.as_ref().is_none_or(|(seq, ..)| *seq < key.2)
        {
            members.last = Some((key.2, signature.name.clone(), signature.operator.clone()));
        }
    }

    /// Returns the last calls that the members of a call's group have completed.
    fn last(&self, key: CallKey) -> Vec<LastCall> {
        let Some(members) = self.groups.get(&key.0) else { return vec![] };
        let on_group = members.last.as_ref().map(|(seq, call, by)| members.named(*seq, call, by));
        let in_world = |rank: usize| {
            let (key, call, by) = self.last[rank].as_ref()?;
            Some(self.groups.get(&key.0)?.named(key.2, call, by))
        };
        let last = |&rank: &usize| LastCall { rank, on_group: on_group.clone(), in_world: in_world(rank) };
        members.ranks.iter().map(last).collect()
    }

    /// Returns the first unfinished calls in which a rank waits, each with the ranks that have not reached it.
    fn waits(&self, rank: usize) -> impl Iterator<Item = (CallId, Vec<usize>)> {
        self.open_of[rank].iter().take(SEARCHED).filter_map(move |key| {
            let (arrivals, members) = (&self.open.get(key)?.arrivals, self.groups.get(&key.0)?);
            let position = members.position(key.1, rank, true)?;
            let (_, signature) = arrivals.iter().find(|(at, _)| *at == position)?;
            Some((members.id(*key, signature), members.absent(key.1, arrivals)))
        })
    }

    /// Returns the fault of a call if one of the ranks that it waits for has ended.
    fn ended_member_fault(&self, key: CallKey) -> Option<CommFault> {
        let (arrivals, members) = (&self.open.get(&key)?.arrivals, self.groups.get(&key.0)?);
        // A message without a receiver is no fault.
        let (waiting, signature) = arrivals.iter().find(|(at, _)| members.waits(key.1, *at))?;
        let missing: Vec<usize> =
            members.absent(key.1, arrivals).into_iter().filter(|&rank| self.ended[rank]).collect();
        if missing.is_empty() {
            return None;
        }
        Some(CommFault::Missing {
            id: members.id(key, signature),
            rank: members.rank(key.1, *waiting),
            brought: shortened(signature.view().to_string()),
            missing,
            ended: true,
            deadline_s: self.deadline.as_secs_f64(),
            elsewhere: vec![],
            busy: vec![],
            last: self.last(key),
        })
    }

    /// Returns the fault of a call that has not finished within the deadline.
    ///
    /// # Errors
    /// Refuses a call on a group that the rank has not opened, and a long name.
    pub fn late(
        &self,
        from: usize,
        key: CallKey,
        call: &Name,
        compared: bool,
        now: Instant,
    ) -> Result<CommFault, ProtocolViolation> {
        let members = self.members(from, key)?;
        if call.len() > NAME_BYTES {
            return Err(format!(
                "the name of a call has {} bytes, but at most {NAME_BYTES} are allowed",
                call.len()
            ));
        }
        let deadline_s = self.deadline.as_secs_f64();
        let position = members.position(key.1, from, true);
        if let Some(OpenCall { arrivals, .. }) = self.open.get(&key)
            && let Some((_, signature)) = arrivals.iter().find(|(at, _)| Some(*at) == position)
        {
            let missing = members.absent(key.1, arrivals);
            let id = members.named(key.2, call, &signature.operator);
            let last = self.last(key);
            if let Some(waits) = cycle(from, &id, &missing, |rank| self.waits(rank).collect()) {
                let last = waits.iter().filter_map(|wait| last.iter().find(|last| last.rank == wait.rank));
                let last = last.cloned().collect();
                return Ok(CommFault::Cycle { id, rank: from, waits, last });
            }
            let (brought, busy) = (shortened(signature.view().to_string()), self.busy(&missing, now));
            // A call that a rank has only started counts as a wait. If the others go on, they come to it before the
            // deadline.
            let Blame { ranks: missing, elsewhere } = blame(from, &missing, |rank| RankWaits {
                waits: self.waits(rank).collect(),
                is_cause: false,
            });
            let (rank, ended) = (from, false);
            return Ok(CommFault::Missing {
                id,
                rank,
                brought,
                missing,
                ended,
                deadline_s,
                elsewhere,
                busy,
                last,
            });
        }
        let who = match compared {
            true => "all members have come",
            false => "calls are not compared, so the missing ranks are not known",
        };
        let id = members.named(key.2, call, &"".into());
        let reason = format!("not finished within {deadline_s:.1} s; {who}");
        Ok(CommFault::Transport { id, rank: from, reason })
    }
}

/// Returns the approximate memory of a call that others have not reached.
fn cost(signature: &CallSignature) -> usize {
    let shape =
        |shape: &Shape| size_of::<Shape>() + if shape.len() > 5 { size_of_val(&shape[..]) } else { 0 };
    let shapes: usize = signature.outgoing.iter().chain(&signature.incoming).map(shape).sum();
    let texts = [&signature.name, &signature.operator, &signature.made_by].map(|text| text.len());
    ENTRY_BYTES + texts.iter().sum::<usize>() + shapes
}

#[cfg(test)]
mod tests;
