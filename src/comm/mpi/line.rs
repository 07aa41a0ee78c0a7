//! One group at one of its members, and the tags of its messages.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::mem::discriminant;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHasher;

use crate::comm::group::label;
use crate::comm::office::Lane;
use crate::comm::{Call, Route};
use crate::error::CallId;
use crate::tensor::{Shape, Tensor};

/// A group at one of its members.
#[derive(Debug)]
pub(super) struct Line {
    pub label: String,
    /// A number made from the label, for the office.
    pub id: u64,
    pub ranks: Vec<usize>,
    pub index: usize,
    /// The office's number, in all tags.
    number: u32,
    tags: Tags,
    seqs: Mutex<HashMap<Lane, u64>>,
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

    /// The number of this rank's next call of a lane.
    pub fn advance(&self, lane: Lane) -> u64 {
        let mut seqs = lock(&self.seqs);
        let next = seqs.entry(lane).or_default();
        *next += 1;
        *next - 1
    }

    pub fn call_id(&self, call: &'static str, seq: u64) -> CallId {
        CallId::new(call, seq, &*self.label)
    }

    /// The tag of what both ends of a message know: their group, lane and call; under all-to-all, its shape as well.
    pub fn tag(&self, lane: Lane, seq: u64, call: &Call, pair: Option<&Shape>) -> u32 {
        let mut hasher = FxHasher::default();
        seq.hash(&mut hasher);
        discriminant(&call.dtype).hash(&mut hasher);
        call.op.map(|op| discriminant(&op)).hash(&mut hasher);
        if lane == Lane::Collective {
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
        self.tags.of(self.number, lane, hasher.finish())
    }
}

/// How a tag is made up: a group's number, a bit for the lane, a fingerprint.
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

    fn of(self, number: u32, lane: Lane, hash: u64) -> u32 {
        let print = (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - self.print_bits)) as u32;
        (number << 1 | u32::from(lane != Lane::Collective)) << self.print_bits | print
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
            let message = Lane::Message { from: 0, to: 1 };
            assert!(tags.of(last, message, u64::MAX / 3) <= limit && tags.groups_len() >= 128);
            let ranges = [0, 1, last]
                .map(|n| [Lane::Collective, message].map(|l| tags.of(n, l, 0) >> tags.print_bits));
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
        let lane = Lane::Collective;
        let tag = |seq, call: &Call| line.tag(lane, seq, call, None);
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
        let lane = Lane::Message { from: 0, to: 1 };
        let end = |name, route| Call { name, route, op: None, ..call };
        let tags = [end("send", Route::Send { to: 1 }), end("recv", Route::Recv { from: 0 })];
        assert_eq!(line.tag(lane, 0, &tags[0], None), line.tag(lane, 0, &tags[1], None));
    }
}
