//! A group as the call table knows it.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use crate::comm::calls::{CallSignature, Sequence};
use crate::error::CallId;

pub(super) type Name = Cow<'static, str>;

/// A call of a group: the group's number, the sequence, and the call's number in it.
pub(super) type CallKey = (u64, Sequence, u64);

/// The calls that the members who have come to one brought, with their index among those who meet there, ascending.
pub(super) type Arrivals = Vec<(usize, CallSignature)>;

/// A group's members.
#[derive(Debug)]
pub(super) struct TableGroup {
    pub name: String,
    pub label: String,
    pub ranks: Vec<usize>,
    /// Each rank's index in the group.
    index: HashMap<usize, usize>,
    /// The members that have opened the group.
    pub opened: HashSet<usize>,
    /// The last collective to which all have come.
    pub last: Option<(u64, Name, Name)>,
}

impl TableGroup {
    /// The group that a rank opens first; no rank is named twice.
    pub fn new(name: &str, label: String, ranks: &[usize], from: usize) -> TableGroup {
        let index = ranks.iter().enumerate().map(|(index, &rank)| (rank, index)).collect();
        let (name, ranks, opened) = (name.to_string(), ranks.to_vec(), HashSet::from([from]));
        TableGroup { name, label, ranks, index, opened, last: None }
    }

    /// The number of those who meet in a sequence: the group, or a sender and a receiver.
    pub fn len(&self, sequence: Sequence) -> usize {
        match sequence {
            Sequence::Collective => self.ranks.len(),
            Sequence::Message { .. } => 2,
        }
    }

    /// A rank's index among those who meet in a sequence; a rank that sends to itself is there twice.
    pub fn position(&self, sequence: Sequence, rank: usize, receives: bool) -> Option<usize> {
        let index = *self.index.get(&rank)?;
        match sequence {
            Sequence::Collective => Some(index),
            Sequence::Message { from, to } if from == to => (index == from).then_some(usize::from(receives)),
            Sequence::Message { from, .. } if index == from => Some(0),
            Sequence::Message { to, .. } => (index == to).then_some(1),
        }
    }

    /// The rank at an index of those who meet in a sequence.
    pub fn rank(&self, sequence: Sequence, at: usize) -> usize {
        match sequence {
            Sequence::Collective => self.ranks[at],
            Sequence::Message { from, to } => self.ranks[[from, to][at]],
        }
    }

    /// True where who comes there waits: a sender does not.
    pub fn waits(&self, sequence: Sequence, at: usize) -> bool {
        sequence == Sequence::Collective || at == 1
    }

    /// Those that have not come, by their number in the world.
    pub fn absent(&self, sequence: Sequence, arrivals: &Arrivals) -> Vec<usize> {
        let mut come = arrivals.iter().map(|(at, _)| *at).peekable();
        let away = (0..self.len(sequence)).filter(|at| come.next_if_eq(at).is_none());
        away.map(|at| self.rank(sequence, at)).collect()
    }

    pub fn id(&self, key: CallKey, signature: &CallSignature) -> CallId {
        self.named(key.2, &signature.name, &signature.operator)
    }

    pub fn named(&self, seq: u64, call: &Name, operator: &Name) -> CallId {
        CallId { call: call.clone(), seq, group: self.label.clone(), operator: operator.clone() }
    }
}
