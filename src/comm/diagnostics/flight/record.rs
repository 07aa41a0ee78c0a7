//! The data of a flight record, in memory and in files.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::comm::calls::{
    BusyWork, Call, Route, Sequence, ShapeList, ShapesView, SignatureView, Subject, at_most, label,
};
use crate::error::CallId;
use crate::tensor::{DType, ReduceOp};

/// The number of calls in a rank's ring buffer.
pub(in crate::comm::diagnostics) const CALLS_KEPT: usize = 256;
/// The largest world that a reader accepts.
const WORLD_LEN: usize = 1 << 20;

/// One rank's record: its last calls at the time of writing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "a flight record")]
pub struct RankRecord {
    /// The rank, numbered in the world.
    pub rank: usize,
    /// The number of ranks.
    pub world_len: usize,
    /// Start of the program in microseconds since 1970.
    pub began_unix_us: u64,
    /// Time of writing in microseconds since the start of the program.
    pub failed_us: u64,
    /// The failure for which the record was written; empty for a rank that saw none.
    pub cause: String,
    /// True if the failure only follows from another rank's.
    pub is_echo: bool,
    /// The work that the rank had announced ([`Rank::busy`](crate::comm::Rank::busy)), if any.
    pub busy: Option<BusyWork>,
    /// The number of calls started in total; `calls` holds the last ones.
    pub calls_len: u64,
    /// The groups of `calls`.
    #[serde(deserialize_with = "at_most::<CALLS_KEPT, _, _>")]
    pub groups: Vec<GroupRecord>,
    /// The last calls, oldest first.
    #[serde(deserialize_with = "at_most::<CALLS_KEPT, _, _>")]
    pub calls: Vec<CallRecord>,
}

/// One group in a record.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(expecting = "a group")]
pub struct GroupRecord {
    /// The group's name.
    pub name: String,
    /// The members, numbered in the world.
    pub ranks: Arc<[usize]>,
    /// Incremented whenever the program continues without failed ranks. Groups of different generations differ even
    /// if name and members are equal.
    pub generation: u64,
}

/// One call in a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "a call")]
pub struct CallRecord {
    /// The number of calls that the rank made before.
    pub number: u64,
    /// The index of its group in [`RankRecord::groups`].
    pub group: usize,
    /// Its number in its sequence: among the group's collectives, or among the messages from one member to another.
    pub seq: u64,
    /// The collective with its dtype and shapes.
    pub brought: RecordedSignature,
    /// The operator that the call was made for; empty if the program made it itself.
    pub operator: Cow<'static, str>,
    /// Its state when the record was written.
    pub state: CallState,
    /// Start of the call in microseconds since the start of the program.
    pub started_us: u64,
    /// End of the call in the same unit; 0 if it has not ended.
    pub ended_us: u64,
}

/// The part of a call that members compare: collective, route, reduction, dtype, shapes, lineage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "what was brought")]
pub struct RecordedSignature {
    /// The collective, e.g. `all_reduce`.
    pub name: Cow<'static, str>,
    /// The members that send and those that receive.
    pub route: Route,
    /// The reduction, if any.
    pub op: Option<ReduceOp>,
    /// The dtype of the elements.
    pub dtype: DType,
    /// The shapes sent.
    pub sent: ShapeList,
    /// The shapes expected.
    pub expected: ShapeList,
    /// The hash of the tensors' [`Lineage`](crate::comm::Lineage), 0 without one.
    #[serde(default)]
    pub lineage: u64,
    /// The name of the tensors' lineage.
    #[serde(default)]
    pub(crate) made_by: Cow<'static, str>,
}

/// The progress of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallState {
    /// The rank had started it and did not wait for it yet.
    Started,
    /// The rank was waiting for it.
    Waiting,
    /// The rank had its result.
    Completed,
    /// It returned an error to the rank.
    Failed,
}

impl RankRecord {
    /// Returns the group of one of this record's calls.
    ///
    /// ```
    /// # use isoshard::comm::{Spmd, flight};
    /// # let dir = std::env::temp_dir().join(format!("isoshard-group-{}", std::process::id()));
    /// # let run = Spmd::new(2).flight_dir(&dir);
    /// # assert!(run.run(|rank| if rank.rank() == 0 { rank.world().barrier() } else { Ok(()) }).is_err());
    /// let report = flight::read(&dir)?;
    /// let record = &report.records[0];
    /// let last = record.calls.last().expect("rank 0 called a barrier");
    /// assert_eq!((last.brought.to_string(), &record.group(last).name[..]), ("barrier".to_string(), "world"));
    /// # std::fs::remove_dir_all(&dir)?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the call belongs to another record.
    pub fn group(&self, call: &CallRecord) -> &GroupRecord {
        &self.groups[call.group]
    }

    /// Returns one of its calls as errors name it.
    pub(super) fn id(&self, call: &CallRecord) -> CallId {
        let group = self.group(call);
        CallId::new(call.brought.name.clone(), call.seq, label(&group.name, &group.ranks))
    }

    /// Refuses a record that no rank writes: with ranks outside the world, members outside a group, or calls out of
    /// order.
    pub(super) fn check(&self) -> Result<(), String> {
        let RankRecord { rank, world_len, ref groups, ref calls, calls_len, .. } = *self;
        if world_len > WORLD_LEN || rank >= world_len {
            return Err(format!("there is no rank {rank} of {world_len}"));
        }
        for (at, GroupRecord { ranks, .. }) in groups.iter().enumerate() {
            let mut sorted = ranks.to_vec();
            sorted.sort_unstable();
            if sorted.last().is_none_or(|&last| last >= world_len) || sorted.windows(2).any(|w| w[0] == w[1])
            {
                return Err(format!("group {at} does not consist of ranks of a world of {world_len}"));
            }
            if sorted.binary_search(&rank).is_err() {
                return Err(format!("rank {rank} is not in group {at}"));
            }
        }
        for (call, number) in calls.iter().rev().zip((0..calls_len).rev()) {
            let at = call.group;
            let group = groups.get(at).ok_or_else(|| format!("no group {at}"))?;
            let member = match call.brought.route {
                Route::Broadcast { root } => root,
                Route::Send { to } => to,
                Route::Recv { from } => from,
                Route::Gather | Route::AllToAll | Route::Barrier => 0,
            };
            if member >= group.ranks.len() {
                return Err(format!("group {at} has no member {member}"));
            }
            if call.number != number {
                return Err(format!("call {} stands in the place of call {number}", call.number));
            }
        }
        match calls.len() as u64 > calls_len {
            true => Err(format!("{} calls are kept of {calls_len}", calls.len())),
            false => Ok(()),
        }
    }
}

impl CallRecord {
    /// A placeholder to be overwritten by a call.
    pub(in crate::comm::diagnostics) fn empty() -> CallRecord {
        let brought = RecordedSignature {
            name: "".into(),
            route: Route::Barrier,
            op: None,
            dtype: DType::U8,
            sent: ShapeList::EMPTY,
            expected: ShapeList::EMPTY,
            lineage: 0,
            made_by: "".into(),
        };
        CallRecord {
            number: 0,
            group: 0,
            seq: 0,
            brought,
            operator: "".into(),
            state: CallState::Started,
            started_us: 0,
            ended_us: 0,
        }
    }

    /// Returns the sequence that the call belongs to if member `index` made it.
    pub(in crate::comm::diagnostics) fn sequence(&self, index: usize) -> Sequence {
        Sequence::of(self.brought.route, index)
    }
}

impl RecordedSignature {
    /// Overwrites this with another call.
    pub(in crate::comm::diagnostics) fn set(&mut self, call: &Call<'_>) {
        (self.name, self.route) = (call.name.into(), call.route);
        (self.op, self.dtype) = (call.op, call.dtype);
        self.sent.set(call.outgoing.iter().map(|x| x.shape()));
        self.expected.set(call.incoming.iter());
        (self.lineage, self.made_by) = (call.lineage.hash(), call.lineage.name().into());
    }

    /// Returns true if this call, made by member `me`, can fit `other`, made by member `at`, by the rule of
    /// [`Call::agrees`]. If a record kept only a hash of some shapes, these count as equal if they may be.
    pub(crate) fn agrees(&self, me: usize, other: &RecordedSignature, at: usize) -> bool {
        self.view().agrees(me, &other.view(), at)
    }

    /// Returns true if the calls can fit together, whatever their tensors are.
    pub(super) fn agrees_in_form(&self, me: usize, other: &RecordedSignature, at: usize) -> bool {
        self.view().agrees_in_form(me, &other.view(), at)
    }

    /// Returns the tensors' lineage, as errors show it.
    pub(super) fn subject(&self) -> Subject<'_> {
        Subject { lineage: self.lineage, name: &self.made_by }
    }

    fn view(&self) -> SignatureView<'_> {
        let RecordedSignature { ref name, route, op, dtype, ref sent, ref expected, .. } = *self;
        let (sent, expected) = (ShapesView::Recorded(sent), ShapesView::Recorded(expected));
        let subject = self.subject();
        SignatureView { name, route, op, dtype, device: None, sent, expected, subject }
    }
}

/// Writes the call as errors show it: `all_reduce(sum) f32[1024]`.
impl fmt::Display for RecordedSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::calls::Lineage;
    use crate::tensor::{Shape, Tensor};

    fn recorded(call: &Call<'_>) -> RecordedSignature {
        let mut signature = CallRecord::empty().brought;
        signature.set(call);
        let text = serde_json::to_string(&signature).unwrap();
        assert_eq!(serde_json::from_str::<RecordedSignature>(&text).unwrap(), signature, "{text}");
        signature
    }

    /// For all pairs of calls, the records fit if and only if the calls do, and texts are equal.
    #[test]
    fn a_record_tells_of_a_call_what_the_call_does() {
        let lists: [&[&[usize]]; 4] = [&[&[2], &[3]], &[&[3], &[3]], &[&[3], &[2]], &[&[], &[3, 0]]];
        let routes = [
            ("all_gather", Route::Gather),
            ("all_to_all", Route::AllToAll),
            ("reduce_scatter", Route::AllToAll),
            ("broadcast", Route::Broadcast { root: 0 }),
            ("broadcast", Route::Broadcast { root: 1 }),
            ("send", Route::Send { to: 1 }),
            ("recv", Route::Recv { from: 0 }),
            ("barrier", Route::Barrier),
        ];
        let lists = lists.map(|list| list.iter().map(|&shape| Shape::from(shape)).collect::<Vec<Shape>>());
        let tensors = lists.clone().map(|list| {
            list.iter().map(|shape| Tensor::zeros(DType::F32, shape.clone())).collect::<Vec<Tensor>>()
        });
        let mut calls = Vec::new();
        for (name, route) in routes {
            let cases = [
                (None, DType::F32, Lineage::NONE),
                (Some(ReduceOp::Sum), DType::F32, Lineage::NONE),
                (None, DType::I64, Lineage::NONE),
                (None, DType::F32, Lineage::parameter("w")),
            ];
            for (op, dtype, lineage) in cases {
                for (outgoing, incoming) in
                    tensors.iter().flat_map(|sent| lists.iter().map(move |to| (sent, to)))
                {
                    calls.push(Call { name, route, op, dtype, outgoing, incoming, lineage });
                }
            }
        }
        let records: Vec<RecordedSignature> = calls.iter().map(recorded).collect();
        let mut agreeing = 0;
        for (call, record) in calls.iter().zip(&records) {
            assert_eq!(call.to_string(), record.to_string());
            assert_eq!(call.to_string(), call.to_signature().view().to_string());
            for (other, other_record) in calls.iter().zip(&records) {
                let agrees = call.agrees(0, other, 1);
                assert_eq!(agrees, record.agrees(0, other_record, 1), "{call}, {other}");
                assert_eq!(agrees, other.agrees(1, call, 0), "{call}, {other}");
                let (a, b) = (call.to_signature(), other.to_signature());
                assert_eq!(agrees, a.view().agrees(0, &b.view(), 1), "{call}, {other}");
                agreeing += usize::from(agrees);
            }
        }
        assert!(agreeing > calls.len() && agreeing < calls.len() * calls.len() / 10, "{agreeing}");
    }

    /// Long lists are recorded only in part: they differ by their hash, or count as equal if they may be.
    #[test]
    fn long_lists_are_compared_as_far_as_they_are_known() {
        let lists: Vec<Vec<Shape>> =
            [99, 7].map(|last| (0..100).map(|i| [if i == 99 { last } else { i }].into()).collect()).into();
        let call = |route, list: usize| Call {
            name: "x",
            route,
            op: None,
            dtype: DType::F32,
            outgoing: &[],
            incoming: &lists[list],
            lineage: Lineage::NONE,
        };
        let agree = |route| recorded(&call(route, 0)).agrees(0, &recorded(&call(route, 1)), 1);
        assert!(!agree(Route::Gather) && agree(Route::AllToAll));
        assert!(recorded(&call(Route::Gather, 0)).to_string().ends_with("[10], [11], 100 in all}"));
    }
}
