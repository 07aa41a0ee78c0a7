//! What the coordinator knows: who brought what to which call, who is over, and the first fault.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use super::message::{FirstFault, Message, Notice};
use crate::comm::calls::Sequence;
use crate::comm::calls::label;
use crate::comm::calls::{CallSignature, Route};
use crate::comm::diagnostics::cycle;
use crate::error::{CallId, CommFault, LastCall, Wait};

/// A question that begins so is answered with a number of its own, from 0 on, the same for everyone.
const NUMBERED: &str = "#";

/// Whom news is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    All,
    Rank(usize),
}

/// The coordinator's book.
#[derive(Debug)]
pub(super) struct CallTable {
    deadline_s: f64,
    groups: HashMap<u64, Members>,
    /// The calls to which somebody has not come yet.
    slots: BTreeMap<Key, Vec<Option<CallSignature>>>,
    /// The last call of each rank to which all members have come.
    last: Vec<Option<(Key, Names)>>,
    ended: Vec<bool>,
    values: HashMap<String, Vec<u8>>,
    /// How many keys have been numbered.
    numbered: u64,
    asked: Vec<(String, usize)>,
    first_fault: Option<FirstFault>,
}

type Key = (u64, Sequence, u64);

/// A call's name, and that of the operator that wants it.
type Names = (Cow<'static, str>, Cow<'static, str>);

#[derive(Debug)]
struct Members {
    label: String,
    ranks: Vec<usize>,
    /// The last collective to which all have come.
    last: Option<(u64, Names)>,
}

impl CallTable {
    pub fn new(world_len: usize, deadline_s: f64) -> CallTable {
        CallTable {
            deadline_s,
            groups: HashMap::new(),
            slots: BTreeMap::new(),
            last: vec![None; world_len],
            ended: vec![false; world_len],
            values: HashMap::new(),
            numbered: 0,
            asked: Vec::new(),
            first_fault: None,
        }
    }

    /// True once every rank's program is over.
    pub fn is_over(&self) -> bool {
        self.first_fault.is_some() || self.ended.iter().all(|&e| e)
    }

    pub fn has_ended(&self, rank: usize) -> bool {
        self.ended[rank]
    }

    /// Takes a rank's note, and says what is to be told.
    pub fn take(&mut self, from: usize, note: Message) -> Vec<(To, Notice)> {
        match note {
            Message::Put { key, value } => return self.put(key, value),
            Message::Get { key } => return self.get(from, key),
            Message::Ended => self.ended[from] = true,
            _ => {}
        }
        if self.first_fault.is_some() {
            return vec![];
        }
        let first_fault = match note {
            Message::Open { group, name, ranks } => {
                let label = label(&name, &ranks);
                self.groups.entry(group).or_insert(Members { label, ranks, last: None });
                None
            }
            Message::Came { group, sequence, seq, brief } => self.came(from, (group, sequence, seq), brief),
            Message::Late { group, sequence, seq, call, compared } => {
                Some(self.late(from, (group, sequence, seq), call, compared))
            }
            Message::Broken { id, reason } => Some(CommFault::Transport { id, rank: from, reason }),
            Message::Ended => self.slots.keys().find_map(|&key| self.left_alone(key)),
            Message::Failed { cause } => return self.decide(FirstFault::Failed { rank: from, cause }),
            Message::Put { .. } | Message::Get { .. } => None,
        };
        first_fault.map_or(vec![], |fault| self.decide(FirstFault::Fault(fault)))
    }

    fn decide(&mut self, first_fault: FirstFault) -> Vec<(To, Notice)> {
        self.first_fault = Some(first_fault.clone());
        vec![(To::All, Notice::FirstFault(first_fault))]
    }

    fn put(&mut self, key: String, value: Vec<u8>) -> Vec<(To, Notice)> {
        let (now, later) = std::mem::take(&mut self.asked).into_iter().partition(|(k, _)| *k == key);
        self.asked = later;
        let answer =
            |(key, rank): (String, usize)| (To::Rank(rank), Notice::Value { key, value: value.clone() });
        let answers = Vec::into_iter(now).map(answer).collect();
        self.values.insert(key, value);
        answers
    }

    fn get(&mut self, from: usize, key: String) -> Vec<(To, Notice)> {
        if key.starts_with(NUMBERED) && !self.values.contains_key(&key) {
            self.values.insert(key.clone(), self.numbered.to_le_bytes().to_vec());
            self.numbered += 1;
        }
        match self.values.get(&key) {
            Some(value) => vec![(To::Rank(from), Notice::Value { key, value: value.clone() })],
            None => {
                self.asked.push((key, from));
                vec![]
            }
        }
    }

    fn came(&mut self, from: usize, key: Key, brief: CallSignature) -> Option<CommFault> {
        let members = self.groups.get(&key.0)?;
        let ranks = members.at(key.1);
        let position = ranks.iter().position(|&r| r == from)?;
        if brief.route == Route::AllToAll
            && [&brief.outgoing, &brief.incoming].iter().any(|s| s.len() != ranks.len())
        {
            return None;
        }
        let slot = self.slots.entry(key).or_insert_with(|| vec![None; ranks.len()]);
        let facts = brief.view();
        // What is not all-to-all agrees with everyone if with one.
        let compared = if brief.route == Route::AllToAll { usize::MAX } else { 1 };
        let here = slot.iter().enumerate().filter_map(|(at, other)| Some((at, other.as_ref()?)));
        let differs = here.take(compared).find(|&(at, other)| !facts.agrees(position, &other.view(), at));
        if let Some((at, other)) = differs {
            let ((low, first), (high, second)) = if at < position {
                ((at, other), (position, &brief))
            } else {
                ((position, &brief), (at, other))
            };
            return Some(CommFault::Mismatch {
                id: members.id(key, names(&brief)),
                rank: ranks[high],
                brought: second.view().to_string(),
                other: ranks[low],
                other_brought: first.view().to_string(),
                last: self.last(key),
            });
        }
        slot[position] = Some(brief);
        if slot.iter().all(Option::is_some) {
            self.complete(key);
            return None;
        }
        self.left_alone(key)
    }

    /// All have come to a call.
    fn complete(&mut self, key: Key) {
        let (Some(slot), Some(members)) = (self.slots.remove(&key), self.groups.get_mut(&key.0)) else {
            return;
        };
        for (&rank, brief) in members.at(key.1).iter().zip(slot.iter().flatten()) {
            // Notes of several ranks may complete a later call first.
            let is_newer = |&((group, sequence, seq), _): &(Key, Names)| {
                (group, sequence) == (key.0, key.1) && seq > key.2
            };
            if !self.last[rank].as_ref().is_some_and(is_newer) {
                self.last[rank] = Some((key, names(brief)));
            }
        }
        if let (Sequence::Collective, Some(brief)) = (key.1, slot.iter().flatten().next())
            && members.last.as_ref().is_none_or(|(seq, _)| *seq < key.2)
        {
            members.last = Some((key.2, names(brief)));
        }
    }

    /// What the members of a call's group have completed.
    fn last(&self, key: Key) -> Vec<LastCall> {
        let Some(members) = self.groups.get(&key.0) else { return vec![] };
        let on_group = members
            .last
            .as_ref()
            .map(|(seq, by)| members.id((key.0, Sequence::Collective, *seq), by.clone()));
        let in_world = |rank: usize| {
            let (key, by) = self.last[rank].as_ref()?;
            Some(self.groups.get(&key.0)?.id(*key, by.clone()))
        };
        let last = |&rank: &usize| LastCall { rank, on_group: on_group.clone(), in_world: in_world(rank) };
        members.ranks.iter().map(last).collect()
    }

    /// A call that a missing rank has come to and waits in, as far as the coordinator can know.
    fn elsewhere(&self, rank: usize) -> Option<Wait> {
        let (id, absent) = self.waits(rank).into_iter().next()?;
        Some(Wait { rank, id, waits_for: *absent.first()? })
    }

    /// The calls that a rank has come to and others have not, each with those.
    fn waits(&self, rank: usize) -> Vec<(CallId, Vec<usize>)> {
        let mut waits = Vec::new();
        for (&key, slot) in &self.slots {
            let Some(members) = self.groups.get(&key.0) else { continue };
            let ranks = members.at(key.1);
            // A sender does not wait.
            let own =
                ranks.iter().rposition(|&r| r == rank).filter(|&at| key.1 == Sequence::Collective || at == 1);
            if let Some(brief) = own.and_then(|at| slot[at].as_ref()) {
                let absent = (0..ranks.len()).filter(|&at| slot[at].is_none()).map(|at| ranks[at]).collect();
                waits.push((members.id(key, names(brief)), absent));
            }
        }
        waits
    }

    /// The fault of a call that waits for a rank whose program is over.
    fn left_alone(&self, key: Key) -> Option<CommFault> {
        let (slot, members) = (self.slots.get(&key)?, self.groups.get(&key.0)?);
        let ranks = members.at(key.1);
        // A message that nobody fetches disturbs nobody.
        let waits = |at: usize| !matches!(key.1, Sequence::Message { .. }) || at == 1;
        let waiting = (0..ranks.len()).find(|&at| slot[at].is_some() && waits(at))?;
        let missing: Vec<usize> = (0..ranks.len())
            .filter(|&at| slot[at].is_none() && self.ended[ranks[at]])
            .map(|at| ranks[at])
            .collect();
        if missing.is_empty() {
            return None;
        }
        let brief = slot[waiting].as_ref()?;
        Some(CommFault::Missing {
            id: members.id(key, names(brief)),
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
    fn late(&self, from: usize, key: Key, call: Cow<'static, str>, compared: bool) -> CommFault {
        let (deadline_s, members) = (self.deadline_s, self.groups.get(&key.0));
        let id = match members {
            Some(members) => members.id(key, (call, Cow::Borrowed(""))),
            None => CallId::new(call, key.2, "?"),
        };
        if let (Some(slot), Some(members)) = (self.slots.get(&key), members) {
            let ranks = members.at(key.1);
            let missing: Vec<usize> =
                (0..ranks.len()).filter(|&at| slot[at].is_none()).map(|at| ranks[at]).collect();
            let own = ranks.iter().position(|&r| r == from).and_then(|at| slot[at].as_ref());
            if let (Some(brief), false) = (own, missing.is_empty()) {
                let id = CallId { operator: brief.operator.clone(), ..id };
                let last = self.last(key);
                if let Some(waits) = cycle(from, &id, &missing, |rank| self.waits(rank)) {
                    let last =
                        waits.iter().filter_map(|wait| last.iter().find(|last| last.rank == wait.rank));
                    let last = last.cloned().collect();
                    return CommFault::Cycle { id, rank: from, waits, last };
                }
                let brought = brief.view().to_string();
                let elsewhere = missing.iter().filter_map(|&rank| self.elsewhere(rank)).collect();
                let ended = false;
                return CommFault::Missing {
                    id,
                    rank: from,
                    brought,
                    missing,
                    ended,
                    deadline_s,
                    elsewhere,
                    last,
                };
            }
        }
        let who = match compared {
            true => "all members have come",
            false => "what the members bring is not compared, so nobody knows who is missing",
        };
        CommFault::Transport {
            id,
            rank: from,
            reason: format!("not finished within {deadline_s:.1} s; {who}"),
        }
    }
}

impl Members {
    /// Who meets in a sequence.
    fn at(&self, sequence: Sequence) -> Vec<usize> {
        match sequence {
            Sequence::Collective => self.ranks.clone(),
            Sequence::Message { from, to } => {
                [from, to].iter().filter_map(|&i| self.ranks.get(i).copied()).collect()
            }
        }
    }

    fn id(&self, (_, _, seq): Key, (call, operator): Names) -> CallId {
        CallId { call, seq, group: self.label.clone(), operator }
    }
}

fn names(brief: &CallSignature) -> Names {
    (brief.name.clone(), brief.operator.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, Shape};

    fn brief(name: &'static str, route: Route, n: usize) -> CallSignature {
        let incoming = vec![Shape::from([n])];
        CallSignature {
            name: name.into(),
            route,
            op: None,
            dtype: DType::F32,
            outgoing: vec![],
            incoming,
            operator: "".into(),
        }
    }

    fn open(world: usize) -> CallTable {
        let mut book = CallTable::new(world, 0.5);
        let ranks: Vec<usize> = (0..world).collect();
        for rank in 0..world {
            assert!(
                book.take(rank, Message::Open { group: 7, name: "dp".into(), ranks: ranks.clone() })
                    .is_empty()
            );
        }
        book
    }

    fn came(book: &mut CallTable, rank: usize, seq: u64, brief: CallSignature) -> Option<String> {
        text(book.take(rank, Message::Came { group: 7, sequence: Sequence::Collective, seq, brief }))
    }

    fn text(news: Vec<(To, Notice)>) -> Option<String> {
        news.into_iter().next().map(|(to, news)| match news {
            Notice::FirstFault(FirstFault::Fault(fault)) if to == To::All => fault.to_string(),
            other => format!("{other:?}"),
        })
    }

    #[test]
    fn calls_are_compared_in_whatever_order_they_come() {
        let mut book = open(3);
        for seq in [0, 2, 1] {
            for rank in [1, 0, 2] {
                assert_eq!(came(&mut book, rank, seq, brief("all_gather", Route::Gather, 3)), None);
            }
        }
        assert!(book.slots.is_empty(), "a call that all have come to is forgotten");
        assert_eq!(came(&mut book, 2, 3, brief("all_gather", Route::Gather, 3)), None);
        assert_eq!(
            came(&mut book, 0, 3, brief("all_gather", Route::Gather, 4)).unwrap(),
            "all_gather #3 on group dp{0, 1, 2}: rank 2 brought all_gather f32[3], rank 0 brought all_gather f32[4]; \
             every rank must make the same calls in the same order; last completed: rank(s) [0, 1, 2] all_gather #2"
        );
        assert_eq!(
            came(&mut book, 1, 3, brief("barrier", Route::Barrier, 0)),
            None,
            "the first fault is the first_fault"
        );
    }

    #[test]
    fn who_is_late_and_who_is_over() {
        let mut book = open(3);
        came(&mut book, 1, 0, brief("all_gather", Route::Gather, 3));
        let late = Message::Late {
            group: 7,
            sequence: Sequence::Collective,
            seq: 0,
            call: "all_gather".into(),
            compared: true,
        };
        assert_eq!(
            text(book.take(1, late.clone())).unwrap(),
            "all_gather #0 on group dp{0, 1, 2}: rank(s) [0, 2] did not come within 0.5 s; rank 1 waited with all_gather \
             f32[3]; last completed: rank(s) [0, 1, 2] nothing"
        );
        let mut book = open(1);
        came(&mut book, 0, 0, brief("all_gather", Route::Gather, 3));
        assert!(
            text(book.take(0, late)).unwrap().contains("not finished within 0.5 s; all members have come")
        );
        let mut book = open(2);
        came(&mut book, 1, 0, brief("all_gather", Route::Gather, 3));
        assert!(text(book.take(0, Message::Ended)).unwrap().contains("rank(s) [0] had ended; rank 1 waited"));
        let mut book = open(2);
        assert_eq!(text(book.take(0, Message::Ended)), None);
        assert!(
            came(&mut book, 1, 0, brief("all_gather", Route::Gather, 3)).unwrap().contains("[0] had ended")
        );
    }

    #[test]
    fn who_waits_for_whom_and_what_was_completed() {
        let mut book = open(3);
        let (name, ranks) = ("ep".to_string(), vec![0, 1]);
        book.take(0, Message::Open { group: 8, name, ranks });
        let came = |book: &mut CallTable, rank, group, operator| {
            let brief =
                CallSignature { operator: Cow::Borrowed(operator), ..brief("all_gather", Route::Gather, 3) };
            text(book.take(
                rank,
                Message::Came { group, sequence: Sequence::Collective, seq: u64::from(group == 7), brief },
            ))
        };
        (0..3).for_each(|rank| {
            assert_eq!(super::tests::came(&mut book, rank, 0, brief("barrier", Route::Barrier, 0)), None)
        });
        let late = |group, seq| Message::Late {
            group,
            sequence: Sequence::Collective,
            seq,
            call: "all_gather".into(),
            compared: true,
        };
        let mut lone = open(3);
        assert_eq!(came(&mut book, 0, 7, "matmul"), None);
        assert_eq!(came(&mut book, 1, 8, ""), None);
        assert_eq!(
            text(book.take(0, late(7, 1))).unwrap(),
            "all_gather #1 on group dp{0, 1, 2} (for matmul): ranks wait for each other in a circle: rank 0 waits in \
             all_gather #1 on group dp{0, 1, 2} (for matmul) for rank 1, which waits in all_gather #0 on group ep{0, 1} for \
             rank 0; ranks must come to the groups they share in one order; last completed: rank(s) [0, 1] barrier #0"
        );
        // Who waits elsewhere, for somebody who does not wait.
        let (name, ranks) = ("ep".to_string(), vec![1, 2]);
        lone.take(1, Message::Open { group: 8, name, ranks });
        assert_eq!((came(&mut lone, 0, 7, ""), came(&mut lone, 1, 8, "")), (None, None));
        assert_eq!(
            text(lone.take(0, late(7, 1))).unwrap(),
            "all_gather #1 on group dp{0, 1, 2}: rank(s) [1, 2] did not come within 0.5 s; rank 0 waited with all_gather \
             f32[3]; rank 1 waited in all_gather #0 on group ep{1, 2} for rank 2; last completed: rank(s) [0, 1, 2] nothing"
        );
    }

    #[test]
    fn messages_have_lanes_of_their_own() {
        let mut book = open(3);
        let mut message = |rank: usize, (from, to): (usize, usize), route, n| {
            let note = Message::Came {
                group: 7,
                sequence: Sequence::Message { from, to },
                seq: 0,
                brief: brief("m", route, n),
            };
            text(book.take(rank, note))
        };
        assert_eq!(message(0, (0, 1), Route::Send { to: 1 }, 2), None);
        assert_eq!(message(2, (2, 1), Route::Send { to: 1 }, 5), None);
        assert_eq!(message(1, (0, 1), Route::Recv { from: 0 }, 2), None);
        assert!(
            message(1, (2, 1), Route::Recv { from: 2 }, 2)
                .unwrap()
                .contains("rank 1 brought m f32[2], rank 2")
        );
        let mut book = open(2);
        let sequence = Sequence::Message { from: 0, to: 1 };
        let send = brief("send", Route::Send { to: 1 }, 2);
        book.take(0, Message::Came { group: 7, sequence, seq: 0, brief: send });
        assert_eq!(text(book.take(1, Message::Ended)), None, "a message that nobody fetches disturbs nobody");
        assert!(!book.is_over());
        book.take(0, Message::Ended);
        assert!(book.is_over());
    }

    #[test]
    fn values_are_handed_to_whoever_asks() {
        let mut book = open(2);
        let value = |rank| vec![(To::Rank(rank), Notice::Value { key: "k".into(), value: vec![3] })];
        assert_eq!(book.take(1, Message::Get { key: "k".into() }), []);
        assert_eq!(book.take(0, Message::Put { key: "k".into(), value: vec![3] }), value(1));
        assert_eq!(book.take(0, Message::Get { key: "k".into() }), value(0));
        book.take(1, Message::Failed { cause: "boom".into() });
        assert_eq!(book.take(0, Message::Get { key: "k".into() }), value(0), "also after a failure");
        for (rank, key, number) in [(1, "#b", 0u64), (0, "#a", 1), (0, "#b", 0), (1, "#a", 1)] {
            let value = number.to_le_bytes().to_vec();
            let answer = vec![(To::Rank(rank), Notice::Value { key: key.into(), value })];
            assert_eq!(book.take(rank, Message::Get { key: key.into() }), answer, "whoever asks first");
        }
    }
}
