//! A group as one of its members sees it, and the tags of its messages.

use std::hash::{Hash, Hasher};
use std::mem::discriminant;
use std::sync::Arc;

use rustc_hash::FxHasher;

use crate::comm::calls::Sequence;
use crate::comm::calls::{Call, Route};
use crate::comm::transport::coordinated::{CallNumber, GroupMember};
use crate::tensor::Shape;

/// A group as one of its members sees it, with the tags of its messages.
#[derive(Debug)]
pub(super) struct MpiGroup {
    pub state: Arc<GroupMember>,
    /// The group's number at the coordinator, which is part of each tag.
    number: u32,
    tags: Tags,
}

impl MpiGroup {
    pub fn new(state: GroupMember, number: u32, tags: Tags) -> MpiGroup {
        MpiGroup { state: Arc::new(state), number, tags }
    }

    /// Returns the tag of a message of `call`, computed from values that both ends know. In an all-to-all, `pair` is
    /// the shape of the message.
    pub fn tag(
        &self,
        call: &Call<'_>,
        CallNumber { sequence, seq, .. }: CallNumber,
        pair: Option<&Shape>,
    ) -> u32 {
        let mut hasher = FxHasher::default();
        seq.hash(&mut hasher);
        discriminant(&call.dtype).hash(&mut hasher);
        call.op.map(|op| discriminant(&op)).hash(&mut hasher);
        call.lineage.hash().hash(&mut hasher);
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

/// The layout of a tag: the group's number, a bit for the sequence, and a fingerprint of the call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tags {
    group_bits: u32,
    print_bits: u32,
}

impl Tags {
    /// Returns the layout of tags up to `limit`, which is at least 32767.
    pub fn up_to(limit: u32) -> Tags {
        let bits = (u64::from(limit) + 1).ilog2() - 1;
        Tags { group_bits: bits - bits / 2, print_bits: bits / 2 }
    }

    /// Returns the number of groups that have different tags.
    pub fn groups_len(self) -> u32 {
        1 << self.group_bits
    }

    fn of(self, number: u32, sequence: Sequence, hash: u64) -> u32 {
        let print = (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - self.print_bits)) as u32;
        (number << 1 | u32::from(sequence != Sequence::Collective)) << self.print_bits | print
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::comm::calls::Lineage;
    use crate::comm::coordinator::Client;
    use crate::comm::transport::coordinated::Membership;
    use crate::tensor::{DType, ReduceOp};

    #[test]
    fn groups_and_sequences_never_share_a_tag() {
        for limit in [32_767, 65_535, (1 << 19) - 1, (1 << 23) - 1, i32::MAX as u32, 40_000] {
            let tags = Tags::up_to(limit);
            let last = tags.groups_len() - 1;
            let message = Sequence::Message { from: 0, to: 1 };
            assert!(tags.of(last, message, u64::MAX / 3) <= limit && tags.groups_len() >= 128);
            let ranges = [0, 1, last]
                .map(|n| [Sequence::Collective, message].map(|s| tags.of(n, s, 0) >> tags.print_bits));
            let mut all: Vec<u32> = ranges.concat();
            all.dedup();
            assert_eq!(all.len(), 6, "{limit}");
        }
    }

    #[test]
    fn calls_that_differ_have_other_tags() {
        let client = Client::of_threads(2, Duration::ZERO).remove(0);
        let membership = Arc::new(Membership::new(0, 2, Duration::ZERO, false, client));
        let state = GroupMember::open(&membership, &[0, 1], "dp");
        let group = MpiGroup::new(state, 3, Tags::up_to(i32::MAX as u32));
        let call = Call {
            name: "all_reduce",
            route: Route::Gather,
            op: Some(ReduceOp::Sum),
            dtype: DType::F32,
            outgoing: &[],
            incoming: &[Shape::from([3]), Shape::from([3])],
            lineage: Lineage::NONE,
        };
        let sequence = Sequence::Collective;
        let numbered = |sequence, seq, call: &Call| CallNumber { name: call.name, sequence, seq };
        let tag = |seq, call: &Call| group.tag(call, numbered(sequence, seq, call), None);
        let first = tag(0, &call);
        assert_eq!(first, tag(0, &call));
        for other in [
            Call { name: "all_gather", ..call },
            Call { op: Some(ReduceOp::Max), ..call },
            Call { op: None, ..call },
            Call { lineage: Lineage::parameter("w"), ..call },
            Call { dtype: DType::F64, ..call },
            Call { incoming: &[Shape::from([4]), Shape::from([4])], ..call },
            Call { route: Route::Broadcast { root: 1 }, ..call },
        ] {
            assert_ne!(tag(0, &other), first, "{other:?}");
        }
        assert_ne!(tag(1, &call), first);
        // The two ends of a message make calls of different names.
        let sequence = Sequence::Message { from: 0, to: 1 };
        let end = |name, route| Call { name, route, op: None, ..call };
        let ends = [end("send", Route::Send { to: 1 }), end("recv", Route::Recv { from: 0 })];
        let [send, recv] = ends.map(|call| group.tag(&call, numbered(sequence, 0, &call), None));
        assert_eq!(send, recv);
    }
}
