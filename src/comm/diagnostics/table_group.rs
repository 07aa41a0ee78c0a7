//! A group in the call table.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use super::announced_work::BusyTime;
use crate::comm::calls::{CallSignature, Sequence};
use crate::error::CallId;

/// The longest text of a call in a fault, in bytes; longer texts are cut off.
const SHOWN_BYTES: usize = 4096;

pub(super) type Name = Cow<'static, str>;

/// The key of a call: the group's number, the sequence, and the call's number in the sequence.
pub(super) type CallKey = (u64, Sequence, u64);

/// The calls of the members that have arrived, each with the member's position among the call's participants, in
/// ascending order.
pub(super) type Arrivals = Vec<(usize, CallSignature)>;

/// A call that some participants have not reached yet.
#[derive(Debug, Default)]
pub(super) struct OpenCall {
    pub arrivals: Arrivals,
    /// The busy time of the members that have arrived, up to their arrivals.
    pub busy: BusyTime,
}

/// A group, its members, and their progress.
#[derive(Debug)]
pub(super) struct TableGroup {
    pub name: String,
    pub label: String,
    pub ranks: Vec<usize>,
    /// Each rank's index in the group.
    index: HashMap<usize, usize>,
    /// The members that have opened the group.
    pub opened: HashSet<usize>,
    /// The busy time of the members that have opened the group, up to then.
    pub busy: BusyTime,
    /// The last collective that all members have reached: number, name, operator.
    pub last: Option<(u64, Name, Name)>,
}

impl TableGroup {
    /// Makes the group when its first member, `from`, opens it. `ranks` holds no duplicates.
    pub fn new(name: &str, label: String, ranks: &[usize], from: usize) -> TableGroup {
        let index = ranks.iter().enumerate().map(|(index, &rank)| (rank, index)).collect();
        let (name, ranks, opened) = (name.to_string(), ranks.to_vec(), HashSet::from([from]));
        TableGroup { name, label, ranks, index, opened, busy: BusyTime::default(), last: None }
    }

    /// Returns the number of participants of a sequence's calls: all members, or a sender and a receiver.
    pub fn len(&self, sequence: Sequence) -> usize {
        match sequence {
            Sequence::Collective => self.ranks.len(),
            Sequence::Message { .. } => 2,
        }
    }

    /// Returns a rank's position among a sequence's participants. A rank that sends to itself has two.
    pub fn position(&self, sequence: Sequence, rank: usize, receives: bool) -> Option<usize> {
        let index = *self.index.get(&rank)?;
        match sequence {
            Sequence::Collective => Some(index),
            Sequence::Message { from, to } if from == to => (index == from).then_some(usize::from(receives)),
            Sequence::Message { from, .. } if index == from => Some(0),
            Sequence::Message { to, .. } => (index == to).then_some(1),
        }
    }

    /// Returns the rank at a position of a sequence's participants.
    pub fn rank(&self, sequence: Sequence, at: usize) -> usize {
        match sequence {
            Sequence::Collective => self.ranks[at],
            Sequence::Message { from, to } => self.ranks[[from, to][at]],
        }
    }

    /// Returns true if the participant at a position waits for the others. A sender does not.
    pub fn waits(&self, sequence: Sequence, at: usize) -> bool {
        sequence == Sequence::Collective || at == 1
    }

    /// Returns the ranks that have not arrived.
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

/// Returns a call's text as faults show it.
pub(super) fn shortened(mut text: String) -> String {
    if text.len() > SHOWN_BYTES {
        text.truncate((0..=SHOWN_BYTES).rfind(|&end| text.is_char_boundary(end)).unwrap_or(0));
        text.push_str(" ...");
    }
    text
}
