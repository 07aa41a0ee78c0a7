//! One group at one of its members, and the tags of its messages.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::mem::discriminant;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHasher;

use crate::comm::calls::Sequence;
use crate::comm::calls::label;
use crate::comm::{Call, Route};
use crate::error::CallId;
use crate::tensor::{Shape, Tensor};

/// A group at one of its members.
#[derive(Debug)]
pub(super) struct Line {
    pub label: String,
    /// A number made from the label, for the coordinator.
    pub id: u64,
    pub ranks: Vec<usize>,
    pub index: usize,
    /// The coordinator's number, in all tags.
    number: u32,
    tags: Tags,
    seqs: Mutex<HashMap<Sequence, u64>>,
    /// Messages of this rank to itself, by sequence number.
    pub own: Mutex<HashMap<u64, Tensor>>,
}

impl Line {
    pub fn new(ranks: &[usize], name: &str, rank: usize, number: u32, tags: Tags) -> Line {
        let label = label(name, ranks);
        let index = ranks.iter().position(|&r| r == rank).expect("checked by the caller");
        Line {
            id: group_id(&label),
            label,
            ranks: ranks.to_vec(),
            index,
            number,
            tags,
            seqs: Mutex::default(),
            own: Mutex::default(),
        }
    }

    /// The number of this rank's next call of a sequence.
    pub fn advance(&self, sequence: Sequence) -> u64 {
        let mut seqs = lock(&self.seqs);
        let next = seqs.entry(sequence).or_default();
        *next += 1;
        *next - 1
    }

    pub fn call_id(&self, call: impl Into<Cow<'static, str>>, seq: u64) -> CallId {
        CallId::new(call, seq, &*self.label)
    }

    /// The tag of what both ends of a message know: their group, sequence and call; under all-to-all, its shape as well.
    pub fn tag(&self, sequence: Sequence, seq: u64, call: &Call, pair: Option<&Shape>) -> u32 {
        let mut hasher = FxHasher::default();
        seq.hash(&mut hasher);
        discriminant(&call.dtype).hash(&mut hasher);
        call.op.map(|op| discriminant(&op)).hash(&mut hasher);
        if sequence == Sequence::Collective {
            call.name.hash(&mut hasher);
            discriminant(&call.route).hash(&mut hasher);
        }
        if let Route::Broadcast { root } = call.route {
            root.hash(&mut hasher);
        }
        match pair {
            Some(shape) => shape[..].hash(&mut hasher),
            None => call.incoming.iter().for_each(|shape| shape[..].hash(&mut hasher)),
        }
        self.tags.of(self.number, sequence, hasher.finish())
    }
}

/// How a tag is made up: a group's number, a bit for the sequence, a fingerprint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tags {
    group_bits: u32,
    print_bits: u32,
}

impl Tags {
    /// Of tags up to `limit`, which is 32767 at least.
    pub fn up_to(limit: u32) -> Tags {
        let bits = (u64::from(limit) + 1).ilog2() - 1;
        Tags { group_bits: bits - bits / 2, print_bits: bits / 2 }
    }

    /// The number of groups that can be told apart.
    pub fn groups_len(self) -> u32 {
        1 << self.group_bits
    }

    fn of(self, number: u32, sequence: Sequence, hash: u64) -> u32 {
        let print = (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - self.print_bits)) as u32;
        (number << 1 | u32::from(sequence != Sequence::Collective)) << self.print_bits | print
    }
}

/// FNV-1a.
fn group_id(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, ReduceOp};

    #[test]
    fn groups_and_lanes_never_share_a_tag() {
        for limit in [32_767, 65_535, (1 << 19) - 1, (1 << 23) - 1, i32::MAX as u32, 40_000] {
            let tags = Tags::up_to(limit);
            let last = tags.groups_len() - 1;
            let message = Sequence::Message { from: 0, to: 1 };
            assert!(tags.of(last, message, u64::MAX / 3) <= limit && tags.groups_len() >= 128);
            let ranges = [0, 1, last]
                .map(|n| [Sequence::Collective, message].map(|l| tags.of(n, l, 0) >> tags.print_bits));
            let mut all: Vec<u32> = ranges.concat();
            all.dedup();
            assert_eq!(all.len(), 6, "{limit}");
        }
    }

    #[test]
    fn calls_that_differ_have_other_tags() {
        let line = Line::new(&[0, 1], "dp", 0, 3, Tags::up_to(i32::MAX as u32));
        let call = Call {
            name: "all_reduce",
            route: Route::Gather,
            op: Some(ReduceOp::Sum),
            dtype: DType::F32,
            outgoing: &[],
            incoming: &[Shape::from([3]), Shape::from([3])],
        };
        let sequence = Sequence::Collective;
        let tag = |seq, call: &Call| line.tag(sequence, seq, call, None);
        let first = tag(0, &call);
        assert_eq!(first, tag(0, &call));
        for other in [
            Call { name: "all_gather", ..call },
            Call { op: Some(ReduceOp::Max), ..call },
            Call { op: None, ..call },
            Call { dtype: DType::F64, ..call },
            Call { incoming: &[Shape::from([4]), Shape::from([4])], ..call },
            Call { route: Route::Broadcast { root: 1 }, ..call },
        ] {
            assert_ne!(tag(0, &other), first, "{other:?}");
        }
        assert_ne!(tag(1, &call), first);
        // The two ends of a message have different names.
        let sequence = Sequence::Message { from: 0, to: 1 };
        let end = |name, route| Call { name, route, op: None, ..call };
        let tags = [end("send", Route::Send { to: 1 }), end("recv", Route::Recv { from: 0 })];
        assert_eq!(line.tag(sequence, 0, &tags[0], None), line.tag(sequence, 0, &tags[1], None));
    }
}
