//! The table of calls that are under way: who brought what, who is over, who waits for whom.
//!
//! Ranks tell of their calls in any order. Whatever they say is held against the world first: a group's ranks, a message's two
//! ends, how much one rank makes the table hold. What no rank may say is returned in words, for an error that names the rank.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::wait_graph::cycle;
use crate::comm::calls::{CallSignature, NAME_BYTES, Route, Sequence, label};
use crate::error::{CallId, CommFault, LastCall, Wait};
use crate::tensor::Shape;

/// What one rank may make the table hold: its groups, and its calls that others have not come to.
const BUDGET_BYTES: usize = 64 << 20;
/// About what an entry takes beside its lists.
const ENTRY_BYTES: usize = 256;

/// What a rank said that no rank may say.
pub(in crate::comm) type Breach = String;

/// A call of a group: the group's number, the sequence, and the call's number in it.
type CallKey = (u64, Sequence, u64);

/// The calls of a world.
#[derive(Debug)]
pub(in crate::comm) struct CallTable {
    deadline_s: f64,
    groups: HashMap<u64, Members>,
    /// The calls to which somebody has not come yet.
    open: BTreeMap<CallKey, Arrivals>,
    /// The last call of each rank to which all members have come.
    last: Vec<Option<(CallKey, Name, Name)>>,
    ended: Vec<bool>,
    /// Bytes that each rank makes the table hold.
    held: Vec<usize>,
}

type Name = Cow<'static, str>;

/// What the members that have come to a call brought, by their index among those who meet there.
type Arrivals = BTreeMap<usize, CallSignature>;

#[derive(Debug)]
struct Members {
    name: String,
    label: String,
    ranks: Vec<usize>,
    /// The members that have opened the group.
    opened: HashSet<usize>,
    /// The last collective to which all have come.
    last: Option<(u64, Name, Name)>,
}

impl CallTable {
    /// Of a world of so many ranks, whose calls wait for `deadline_s` seconds.
    pub fn new(world_len: usize, deadline_s: f64) -> CallTable {
        CallTable {
            deadline_s,
            groups: HashMap::new(),
            open: BTreeMap::new(),
            last: vec![None; world_len],
            ended: vec![false; world_len],
            held: vec![0; world_len],
        }
    }

    /// True once every rank's program is over.
    pub fn all_have_ended(&self) -> bool {
        self.ended.iter().all(|&ended| ended)
    }

    pub fn has_ended(&self, rank: usize) -> bool {
        self.ended[rank]
    }

    /// A rank opens a group.
    ///
    /// # Errors
    /// Refuses ranks that are not in the world or named twice, a group without the rank, and another group by the same number.
    pub fn open(&mut self, from: usize, group: u64, name: &str, ranks: &[usize]) -> Result<(), Breach> {
        let world_len = self.last.len();
        if name.len() > NAME_BYTES {
            return Err(format!("a group's name has {} bytes, where {NAME_BYTES} may be", name.len()));
        }
        if ranks.len() > world_len {
            return Err(format!("a group has {} members in a world of {world_len}", ranks.len()));
        }
        if let Some(members) = self.groups.get_mut(&group) {
            if members.name != name || members.ranks != ranks {
                return Err(format!("{} and {} have one number", members.label, label(name, ranks)));
            }
            if !members.ranks.contains(&from) {
                return Err(format!("it opens {}, which it is not in", members.label));
            }
            members.opened.insert(from);
            return Ok(());
        }
        let text = label(name, ranks);
        if let Some(rank) = ranks.iter().find(|&&rank| rank >= world_len) {
            return Err(format!("group {text} names rank {rank} in a world of {world_len}"));
        }
        if ranks.iter().collect::<HashSet<_>>().len() != ranks.len() {
            return Err(format!("group {text} names a rank twice"));
        }
        if !ranks.contains(&from) {
            return Err(format!("it opens {text}, which it is not in"));
        }
        self.charge(from, ENTRY_BYTES + name.len() + text.len() + size_of_val(ranks))?;
        let (name, ranks, opened) = (name.to_string(), ranks.to_vec(), HashSet::from([from]));
        self.groups.insert(group, Members { name, label: text, ranks, opened, last: None });
        Ok(())
    }

    /// A rank comes to a call; the fault where what it brings does not belong to what others brought, or where somebody who
    /// has ended is missing.
    ///
    /// # Errors
    /// Refuses a call of a group that the rank has not opened, of a message that is not its own, with lists that are not one
    /// per member, and more calls ahead of the others than the table holds.
    pub fn came(
        &mut self,
        from: usize,
        key: CallKey,
        brief: CallSignature,
    ) -> Result<Option<CommFault>, Breach> {
        let (members, ranks) = self.members(from, key)?;
        let position = match brief.route {
            // A rank that sends to itself is told of in two sequences.
            Route::Recv { .. } => ranks.iter().rposition(|&rank| rank == from),
            _ => ranks.iter().position(|&rank| rank == from),
        };
        let position = position
            .ok_or_else(|| format!("it comes to a message of {} that is not its own", members.label))?;
        let [sent, expected] = [&brief.outgoing, &brief.incoming].map(Vec::len);
        if brief.route == Route::AllToAll && (sent, expected) != (ranks.len(), ranks.len()) {
            return Err(format!("its {} on {} has {sent} parts for {expected}", brief.name, members.label));
        }
        let empty = Arrivals::new();
        let here = self.open.get(&key).unwrap_or(&empty);
        if here.contains_key(&position) {
            return Err(format!("it comes to {} twice", members.id(key, &brief)));
        }
        let signature = brief.view();
        // What is not all-to-all agrees with everyone if with one.
        let compared = if brief.route == Route::AllToAll { usize::MAX } else { 1 };
        let differs =
            here.iter().take(compared).find(|&(&at, other)| !signature.agrees(position, &other.view(), at));
        if let Some((&at, other)) = differs {
            let ((low, first), (high, second)) = if at < position {
                ((at, other), (position, &brief))
            } else {
                ((position, &brief), (at, other))
            };
            return Ok(Some(CommFault::Mismatch {
                id: members.id(key, &brief),
                rank: ranks[high],
                brought: second.view().to_string(),
                other: ranks[low],
                other_brought: first.view().to_string(),
                last: self.last(key),
            }));
        }
        if here.len() + 1 == ranks.len() {
            self.complete(key, &ranks, position, brief);
            return Ok(None);
        }
        self.charge(from, cost(&brief))?;
        self.open.entry(key).or_default().insert(position, brief);
        Ok(self.left_alone(key))
    }

    /// A rank's program is over; the fault of a call that waits for it, if one does.
    pub fn ended(&mut self, from: usize) -> Option<CommFault> {
        self.ended[from] = true;
        self.open.keys().find_map(|&key| self.left_alone(key))
    }

    fn charge(&mut self, from: usize, bytes: usize) -> Result<(), Breach> {
        let held = &mut self.held[from];
        if *held + bytes > BUDGET_BYTES {
            return Err(format!(
                "its groups and its calls that others have not come to take more than {BUDGET_BYTES} bytes"
            ));
        }
        *held += bytes;
        Ok(())
    }

    /// The group of a call that a rank tells of, and who meets there.
    fn members(&self, from: usize, (group, sequence, _): CallKey) -> Result<(&Members, Vec<usize>), Breach> {
        let members = self.groups.get(&group).filter(|members| members.opened.contains(&from));
        let members = members
            .ok_or_else(|| format!("it tells of a call on group {group:#x}, which it has not opened"))?;
        if let Sequence::Message { from: a, to: b } = sequence
            && a.max(b) >= members.ranks.len()
        {
            return Err(format!("it tells of a message from {a} to {b} on {}", members.label));
        }
        Ok((members, members.at(sequence)))
    }

    /// All have come to a call, the last one with `brief`.
    fn complete(&mut self, key: CallKey, ranks: &[usize], position: usize, brief: CallSignature) {
        let mut arrivals = self.open.remove(&key).unwrap_or_default();
        for (&at, brief) in &arrivals {
            self.held[ranks[at]] -= cost(brief);
        }
        arrivals.insert(position, brief);
        for (&rank, brief) in ranks.iter().zip(arrivals.values()) {
            // Messages of several ranks may complete a later call first.
            let is_newer =
                |last: &(CallKey, Name, Name)| (last.0.0, last.0.1) == (key.0, key.1) && last.0.2 > key.2;
            if !self.last[rank].as_ref().is_some_and(is_newer) {
                self.last[rank] = Some((key, brief.name.clone(), brief.operator.clone()));
            }
        }
        let Some(members) = self.groups.get_mut(&key.0) else { return };
        if let (Sequence::Collective, Some(brief)) = (key.1, arrivals.values().next())
            && members.last.as_ref().is_none_or(|(seq, ..)| *seq < key.2)
        {
            members.last = Some((key.2, brief.name.clone(), brief.operator.clone()));
        }
    }

    /// What the members of a call's group have completed.
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

    /// A call that a missing rank has come to and waits in, as far as is known here.
    fn elsewhere(&self, rank: usize) -> Option<Wait> {
        let (id, absent) = self.waits(rank).into_iter().next()?;
        Some(Wait { rank, id, waits_for: *absent.first()? })
    }

    /// The calls that a rank has come to and others have not, each with those.
    fn waits(&self, rank: usize) -> Vec<(CallId, Vec<usize>)> {
        let mut waits = Vec::new();
        for (&key, arrivals) in &self.open {
            let Some(members) = self.groups.get(&key.0) else { continue };
            let ranks = members.at(key.1);
            // A sender does not wait.
            let own =
                ranks.iter().rposition(|&r| r == rank).filter(|&at| key.1 == Sequence::Collective || at == 1);
            if let Some(brief) = own.and_then(|at| arrivals.get(&at)) {
                waits.push((members.id(key, brief), absent(&ranks, arrivals)));
            }
        }
        waits
    }

    /// The fault of a call that waits for a rank whose program is over.
    fn left_alone(&self, key: CallKey) -> Option<CommFault> {
        let (arrivals, members) = (self.open.get(&key)?, self.groups.get(&key.0)?);
        let ranks = members.at(key.1);
        // A message that nobody fetches disturbs nobody.
        let waits = |at: usize| !matches!(key.1, Sequence::Message { .. }) || at == 1;
        let (&waiting, brief) = arrivals.iter().find(|&(&at, _)| waits(at))?;
        let missing: Vec<usize> =
            absent(&ranks, arrivals).into_iter().filter(|&rank| self.ended[rank]).collect();
        if missing.is_empty() {
            return None;
        }
        Some(CommFault::Missing {
            id: members.id(key, brief),
            rank: ranks[waiting],
            brought: brief.view().to_string(),
            missing,
            ended: true,
            deadline_s: self.deadline_s,
            elsewhere: vec![],
            last: self.last(key),
        })
    }

    /// Why a call has not finished in time.
    ///
    /// # Errors
    /// Refuses a call of a group that the rank has not opened.
    pub fn late(&self, from: usize, key: CallKey, call: &Name, compared: bool) -> Result<CommFault, Breach> {
        let (members, ranks) = self.members(from, key)?;
        let deadline_s = self.deadline_s;
        let position = ranks.iter().position(|&rank| rank == from);
        if let Some(arrivals) = self.open.get(&key)
            && let Some(brief) = position.and_then(|at| arrivals.get(&at))
        {
            let missing = absent(&ranks, arrivals);
            let id = members.named(key.2, call, &brief.operator);
            let last = self.last(key);
            if let Some(waits) = cycle(from, &id, &missing, |rank| self.waits(rank)) {
                let last = waits.iter().filter_map(|wait| last.iter().find(|last| last.rank == wait.rank));
                let last = last.cloned().collect();
                return Ok(CommFault::Cycle { id, rank: from, waits, last });
            }
            let brought = brief.view().to_string();
            let elsewhere = missing.iter().filter_map(|&rank| self.elsewhere(rank)).collect();
            let (rank, ended) = (from, false);
            return Ok(CommFault::Missing { id, rank, brought, missing, ended, deadline_s, elsewhere, last });
        }
        let who = match compared {
            true => "all members have come",
            false => "what the members bring is not compared, so nobody knows who is missing",
        };
        let id = members.named(key.2, call, &"".into());
        let reason = format!("not finished within {deadline_s:.1} s; {who}");
        Ok(CommFault::Transport { id, rank: from, reason })
    }
}

/// About what a call takes in memory while others have not come to it.
fn cost(brief: &CallSignature) -> usize {
    let shape =
        |shape: &Shape| size_of::<Shape>() + if shape.len() > 5 { size_of_val(&shape[..]) } else { 0 };
    let shapes: usize = brief.outgoing.iter().chain(&brief.incoming).map(shape).sum();
    ENTRY_BYTES + brief.name.len() + brief.operator.len() + shapes
}

/// Those of `ranks` that have not come, by their number in the world.
fn absent(ranks: &[usize], arrivals: &Arrivals) -> Vec<usize> {
    let away = (0..ranks.len()).filter(|at| !arrivals.contains_key(at));
    away.map(|at| ranks[at]).collect()
}

impl Members {
    /// Who meets in a sequence.
    fn at(&self, sequence: Sequence) -> Vec<usize> {
        match sequence {
            Sequence::Collective => self.ranks.clone(),
            Sequence::Message { from, to } => [from, to].map(|i| self.ranks[i]).to_vec(),
        }
    }

    fn id(&self, key: CallKey, brief: &CallSignature) -> CallId {
        self.named(key.2, &brief.name, &brief.operator)
    }

    fn named(&self, seq: u64, call: &Name, operator: &Name) -> CallId {
        CallId { call: call.clone(), seq, group: self.label.clone(), operator: operator.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    fn brief(name: &'static str, route: Route, n: usize) -> CallSignature {
        let (name, incoming) = (name.into(), vec![Shape::from([n])]);
        CallSignature {
            name,
            route,
            op: None,
            dtype: DType::F32,
            outgoing: vec![],
            incoming,
            operator: "".into(),
        }
    }

    fn gather(n: usize) -> CallSignature {
        brief("all_gather", Route::Gather, n)
    }

    fn open(world: usize) -> CallTable {
        let mut table = CallTable::new(world, 0.5);
        let ranks: Vec<usize> = (0..world).collect();
        (0..world).for_each(|rank| table.open(rank, 7, "dp", &ranks).unwrap());
        table
    }

    fn collective(seq: u64) -> CallKey {
        (7, Sequence::Collective, seq)
    }

    fn came(table: &mut CallTable, rank: usize, seq: u64, brief: CallSignature) -> Option<String> {
        table.came(rank, collective(seq), brief).unwrap().map(|fault| fault.to_string())
    }

    fn late(table: &CallTable, rank: usize, seq: u64) -> String {
        table.late(rank, collective(seq), &"all_gather".into(), true).unwrap().to_string()
    }

    #[test]
    fn calls_are_compared_in_whatever_order_they_come() {
        let mut table = open(3);
        let empty = table.held.clone();
        for seq in [0, 2, 1] {
            for rank in [1, 0, 2] {
                assert_eq!(came(&mut table, rank, seq, gather(3)), None);
            }
        }
        assert!(table.open.is_empty() && table.held == empty, "a call that all have come to is forgotten");
        assert_eq!(came(&mut table, 2, 3, gather(3)), None);
        assert_eq!(
            came(&mut table, 0, 3, gather(4)).unwrap(),
            "all_gather #3 on group dp{0, 1, 2}: rank 2 brought all_gather f32[3], rank 0 brought all_gather f32[4]; \
             every rank must make the same calls in the same order; last completed: rank(s) [0, 1, 2] all_gather #2"
        );
    }

    #[test]
    fn who_is_late_and_who_is_over() {
        let mut table = open(3);
        came(&mut table, 1, 0, gather(3));
        assert_eq!(
            late(&table, 1, 0),
            "all_gather #0 on group dp{0, 1, 2}: rank(s) [0, 2] did not come within 0.5 s; rank 1 waited with all_gather \
             f32[3]; last completed: rank(s) [0, 1, 2] nothing"
        );
        let mut table = open(1);
        came(&mut table, 0, 0, gather(3));
        assert!(late(&table, 0, 0).contains("not finished within 0.5 s; all members have come"));
        let mut table = open(2);
        came(&mut table, 1, 0, gather(3));
        assert!(table.ended(0).unwrap().to_string().contains("rank(s) [0] had ended; rank 1 waited"));
        let mut table = open(2);
        assert_eq!(table.ended(0), None);
        assert!(came(&mut table, 1, 0, gather(3)).unwrap().contains("[0] had ended"));
    }

    #[test]
    fn who_waits_for_whom_and_what_was_completed() {
        let mut table = open(3);
        let came_to = |table: &mut CallTable, rank, group, operator: &'static str| {
            let key = (group, Sequence::Collective, u64::from(group == 7));
            table.came(rank, key, CallSignature { operator: operator.into(), ..gather(3) }).unwrap()
        };
        [0, 1].into_iter().for_each(|rank| table.open(rank, 8, "ep", &[0, 1]).unwrap());
        (0..3).for_each(|rank| {
            assert_eq!(came(&mut table, rank, 0, brief("barrier", Route::Barrier, 0)), None)
        });
        assert_eq!((came_to(&mut table, 0, 7, "matmul"), came_to(&mut table, 1, 8, "")), (None, None));
        assert_eq!(
            late(&table, 0, 1),
            "all_gather #1 on group dp{0, 1, 2} (for matmul): ranks wait for each other in a circle: rank 0 waits in \
             all_gather #1 on group dp{0, 1, 2} (for matmul) for rank 1, which waits in all_gather #0 on group ep{0, 1} for \
             rank 0; ranks must come to the groups they share in one order; last completed: rank(s) [0, 1] barrier #0"
        );
        // Who waits elsewhere, for somebody who does not wait.
        let mut table = open(3);
        [1, 2].into_iter().for_each(|rank| table.open(rank, 8, "ep", &[1, 2]).unwrap());
        assert_eq!((came_to(&mut table, 0, 7, ""), came_to(&mut table, 1, 8, "")), (None, None));
        assert_eq!(
            late(&table, 0, 1),
            "all_gather #1 on group dp{0, 1, 2}: rank(s) [1, 2] did not come within 0.5 s; rank 0 waited with all_gather \
             f32[3]; rank 1 waited in all_gather #0 on group ep{1, 2} for rank 2; last completed: rank(s) [0, 1, 2] nothing"
        );
    }

    #[test]
    fn messages_have_sequences_of_their_own() {
        let mut table = open(3);
        let mut message = |rank: usize, (from, to): (usize, usize), route, n| {
            let key = (7, Sequence::Message { from, to }, 0);
            table.came(rank, key, brief("m", route, n)).unwrap().map(|fault| fault.to_string())
        };
        assert_eq!(message(0, (0, 1), Route::Send { to: 1 }, 2), None);
        assert_eq!(message(2, (2, 1), Route::Send { to: 1 }, 5), None);
        assert_eq!(message(1, (0, 1), Route::Recv { from: 0 }, 2), None);
        let differs = message(1, (2, 1), Route::Recv { from: 2 }, 2).unwrap();
        assert!(differs.contains("rank 1 brought m f32[2], rank 2"), "{differs}");
        let mut table = open(2);
        let key = (7, Sequence::Message { from: 0, to: 1 }, 0);
        table.came(0, key, brief("send", Route::Send { to: 1 }, 2)).unwrap();
        assert_eq!(table.ended(1), None, "a message that nobody fetches disturbs nobody");
        assert!(!table.all_have_ended());
        table.ended(0);
        assert!(table.all_have_ended());
    }

    #[test]
    fn what_no_rank_may_say_is_refused() {
        let mut table = open(2);
        for (name, ranks, want) in [
            ("g", &[1, 999][..], "group g{1, 999} names rank 999 in a world of 2"),
            ("g", &[1, 1], "group g{1, 1} names a rank twice"),
            ("g", &[0], "it opens g{0}, which it is not in"),
            ("g", &[], "it opens g{}, which it is not in"),
            ("g", &[0, 1, 2], "a group has 3 members in a world of 2"),
        ] {
            let (shown, wanted) = (table.open(1, 9, name, ranks).unwrap_err(), want.to_string());
            assert_eq!(shown, wanted);
        }
        assert!(table.open(1, 9, &"n".repeat(2000), &[1]).unwrap_err().contains("name has 2000 bytes"));
        assert_eq!(table.open(1, 7, "tp", &[0, 1]).unwrap_err(), "dp{0, 1} and tp{0, 1} have one number");
        let message = |from, to| (7, Sequence::Message { from, to }, 0);
        for (key, brief, want) in [
            (
                (8, Sequence::Collective, 0),
                gather(1),
                "it tells of a call on group 0x8, which it has not opened",
            ),
            (message(0, 2), gather(1), "it tells of a message from 0 to 2 on dp{0, 1}"),
            (message(0, 0), gather(1), "it comes to a message of dp{0, 1} that is not its own"),
            (
                collective(0),
                brief("all_to_all", Route::AllToAll, 1),
                "its all_to_all on dp{0, 1} has 0 parts for 1",
            ),
        ] {
            assert_eq!(table.came(1, key, brief).unwrap_err(), want);
        }
        assert!(table.late(1, message(5, 5), &"send".into(), true).is_err());
        came(&mut table, 1, 0, gather(1));
        assert_eq!(
            table.came(1, collective(0), gather(1)).unwrap_err(),
            "it comes to all_gather #0 on group dp{0, 1} twice"
        );
    }

    #[test]
    fn a_rank_fills_no_more_than_its_budget() {
        let mut table = open(2);
        let filled = (0..1 << 20).find_map(|seq| table.came(1, collective(seq), gather(1)).err());
        assert!(filled.unwrap().contains("take more than 67108864 bytes"));
        assert!(table.held[1] <= BUDGET_BYTES);
        assert_eq!(came(&mut table, 0, 1 << 30, gather(1)), None, "the others have their own");
        // Who catches up makes room again.
        let held = table.held[1];
        assert_eq!(came(&mut table, 0, 0, gather(1)), None);
        assert!(table.held[1] < held);
        let mut table = open(2);
        assert!((10..1 << 20).any(|group| table.open(1, group, "g", &[1]).is_err()), "groups count too");
    }
}
