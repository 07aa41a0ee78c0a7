//! Faults between ranks: collectives that do not complete, replicas that differ.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The name of one collective call in errors: operation, sequence number, group, and the operator that made it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallId {
    /// The operation, e.g. `all_reduce`.
    pub call: Cow<'static, str>,
    /// The number of collectives that the group made before this one.
    pub seq: u64,
    /// The group, e.g. `dp{0, 4, 8}`.
    pub group: String,
    /// The operator that moves its operands, e.g. `matmul`; empty if the program made the call itself.
    pub operator: Cow<'static, str>,
}

impl CallId {
    /// Returns the name of a call that the program made itself, without an operator.
    pub fn new(call: impl Into<Cow<'static, str>>, seq: u64, group: impl Into<String>) -> CallId {
        CallId { call: call.into(), seq, group: group.into(), operator: "".into() }
    }

    /// Returns `true` if both name the same call, even if they name different operators.
    pub(crate) fn is_call(&self, other: &CallId) -> bool {
        (&self.call, self.seq, &self.group) == (&other.call, other.seq, &other.group)
    }
}

/// Writes `all_reduce #7 on group tp{0, 1} (for matmul)`.
impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{} on group {}", self.call, self.seq, self.group)?;
        if self.operator.is_empty() { Ok(()) } else { write!(f, " (for {})", self.operator) }
    }
}

/// The last calls that a rank had completed when a call failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastCall {
    /// The rank, numbered in the world.
    pub rank: usize,
    /// The last call that it completed on the failed call's group.
    pub on_group: Option<CallId>,
    /// The last call that it completed on any group.
    pub in_world: Option<CallId>,
}

/// A rank that waits for another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    /// The rank that waits.
    pub rank: usize,
    /// The call in which it waits.
    pub id: CallId,
    /// A rank that has not made this call yet.
    pub waits_for: usize,
}

/// A rank that had announced work when a call was given up (see [`Rank::busy`](crate::comm::Rank::busy)).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BusyRank {
    /// The rank, numbered in the world.
    pub rank: usize,
    /// The names of the announced work, e.g. `saving`.
    pub what: String,
    /// The time since the rank announced it.
    pub spent: Duration,
    /// The time after which the announcement no longer counts.
    pub limit: Duration,
}

/// The reason a collective did not complete.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum CommFault {
    /// Two ranks made different calls at the same place of a group's sequence.
    #[error(
        "{id}: rank {rank} brought {brought}, rank {other} brought {other_brought}; every rank must make the \
         same calls in the same order{}", CompletedText(.last, .id)
    )]
    Mismatch {
        /// The call of the reporting rank.
        id: CallId,
        /// The first of the two ranks.
        rank: usize,
        /// The call that this rank made, e.g. `all_reduce(sum) f32[1024]`.
        brought: String,
        /// The second of the two ranks.
        other: usize,
        /// The call that the second rank made.
        other_brought: String,
        /// The last calls that each member had completed; empty if unknown.
        last: Vec<LastCall>,
    },
    /// Some ranks did not make the call before the deadline, or had ended already. A member that itself waited for other
    /// ranks is not to blame: these are named in its place.
    #[error(
        "{id}: rank(s) {missing:?} {}; rank {rank} waited with {brought}{}{}{}",
        absence(.ended, .deadline_s), WaitsText(.elsewhere), BusyText(.busy), CompletedText(.last, .id)
    )]
    Missing {
        /// The call that waited.
        id: CallId,
        /// The reporting rank.
        rank: usize,
        /// The call that this rank made.
        brought: String,
        /// The members that did not make the call and waited for no rank, and in the place of each other one the ranks that
        /// it waited for in the end, which may not be members.
        missing: Vec<usize>,
        /// `true` if their programs had ended, so the call failed before the deadline.
        ended: bool,
        /// The deadline in seconds.
        deadline_s: f64,
        /// The waits that lead to the missing ranks: the members that waited in other calls at that time, and the ranks
        /// that these waited for.
        elsewhere: Vec<Wait>,
        /// The work that ranks which the call waited for, directly or through other ranks, had announced.
        busy: Vec<BusyRank>,
        /// The last calls that each member had completed; empty if unknown.
        last: Vec<LastCall>,
    },
    /// Ranks deadlocked: they use several groups in different orders and wait for each other.
    #[error(
        "{id}: ranks wait for each other in a cycle: {}; ranks must call the groups that they share in the same order{}",
        CycleText(.waits), CompletedText(.last, .id)
    )]
    Cycle {
        /// The call of the reporting rank.
        id: CallId,
        /// The reporting rank.
        rank: usize,
        /// The waits, in order: each rank waits for the rank of the next entry, the last for the first.
        waits: Vec<Wait>,
        /// The last calls that these ranks had completed; empty if unknown.
        last: Vec<LastCall>,
    },
    /// A message was sent that its receiver never asked for, although the programs of all ranks have ended.
    #[error(
        "{id}: rank {rank} brought {brought}, and rank {receiver} ended without receiving it; every message needs a receive"
    )]
    Unreceived {
        /// The call of the sender.
        id: CallId,
        /// The sender.
        rank: usize,
        /// The call that it made, e.g. `send f32[8]`.
        brought: String,
        /// The rank that the message was for.
        receiver: usize,
    },
    /// Another rank failed, so this call can never complete.
    #[error("{id}: given up, because rank {rank} failed: {cause}")]
    PeerFailed {
        /// The call that was given up.
        id: CallId,
        /// The rank that failed first.
        rank: usize,
        /// Its cause.
        cause: String,
    },
    /// The transport failed, or did not finish although all members had made the call.
    #[error("{id}: the transport of rank {rank} failed: {reason}")]
    Transport {
        /// The call in flight.
        id: CallId,
        /// The rank that noticed the failure first.
        rank: usize,
        /// The failure that it noticed.
        reason: String,
    },
}

impl CommFault {
    /// Returns the call that did not complete.
    ///
    /// ```
    /// use isoshard::{CallId, CommFault};
    /// let id = CallId::new("barrier", 0, "world{0, 1}");
    /// let fault = CommFault::Transport { id: id.clone(), rank: 1, reason: "connection reset".into() };
    /// assert_eq!(fault.id(), &id);
    /// ```
    pub fn id(&self) -> &CallId {
        match self {
            CommFault::Mismatch { id, .. }
            | CommFault::Missing { id, .. }
            | CommFault::Cycle { id, .. }
            | CommFault::Unreceived { id, .. }
            | CommFault::PeerFailed { id, .. }
            | CommFault::Transport { id, .. } => id,
        }
    }

    pub(crate) fn id_mut(&mut self) -> &mut CallId {
        match self {
            CommFault::Mismatch { id, .. }
            | CommFault::Missing { id, .. }
            | CommFault::Cycle { id, .. }
            | CommFault::Unreceived { id, .. }
            | CommFault::PeerFailed { id, .. }
            | CommFault::Transport { id, .. } => id,
        }
    }

    /// Returns the last calls that the members had completed; empty if unknown.
    ///
    /// ```
    /// use isoshard::{Error, Failure, comm::spmd};
    /// // Rank 1 ends after one barrier; rank 0 waits for it in a second one.
    /// let error = spmd(2, |rank| {
    ///     rank.world().barrier()?;
    ///     if rank.rank() == 0 { rank.world().barrier() } else { Ok(()) }
    /// });
    /// let Err(Error::Rank { rank: 0, cause }) = error else { panic!() };
    /// let Failure::Error(Error::Comm(fault)) = *cause else { panic!() };
    /// let last = &fault.last_completed()[1];
    /// assert_eq!((last.rank, last.on_group.as_ref().unwrap().seq), (1, 0));
    /// ```
    pub fn last_completed(&self) -> &[LastCall] {
        match self {
            CommFault::Mismatch { last, .. }
            | CommFault::Missing { last, .. }
            | CommFault::Cycle { last, .. } => last,
            CommFault::Unreceived { .. } | CommFault::PeerFailed { .. } | CommFault::Transport { .. } => &[],
        }
    }

    /// Returns `true` if the fault only reports that another rank failed.
    pub(super) fn is_echo(&self) -> bool {
        matches!(self, CommFault::PeerFailed { .. })
    }

    /// Returns the ranks that the fault names as its cause.
    pub(crate) fn blamed(&self) -> Vec<usize> {
        match self {
            CommFault::Mismatch { rank, other, .. } => vec![*rank, *other],
            CommFault::Missing { missing, .. } => missing.clone(),
            CommFault::Cycle { waits, .. } => waits.iter().map(|wait| wait.rank).collect(),
            CommFault::Unreceived { rank, receiver, .. } => vec![*rank, *receiver],
            CommFault::PeerFailed { rank, .. } | CommFault::Transport { rank, .. } => vec![*rank],
        }
    }

    /// Rotates a cycle so that it begins with `reporter`, if that rank waits in it; leaves other faults as they are.
    pub(crate) fn told_by(mut self, reporter: usize) -> CommFault {
        if let CommFault::Cycle { id, rank, waits, .. } = &mut self
            && let Some(at) = waits.iter().position(|wait| wait.rank == reporter)
        {
            waits.rotate_left(at);
            *rank = reporter;
            *id = waits[0].id.clone();
        }
        self
    }
}

fn absence(ended: &bool, deadline_s: &f64) -> String {
    if *ended { "had ended".into() } else { format!("did not come within {deadline_s:.1} s") }
}

/// Writes `rank 0 waits in all_reduce #3 on group a{0, 1} for rank 1, which waits in ... for rank 0`.
struct CycleText<'a>(&'a [Wait]);

impl fmt::Display for CycleText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, Wait { rank, id, waits_for }) in self.0.iter().enumerate() {
            match i {
                0 => write!(f, "rank {rank} waits in {id} for rank {waits_for}")?,
                _ => write!(f, ", which waits in {id} for rank {waits_for}")?,
            }
        }
        Ok(())
    }
}

/// Writes `; rank 1 waited in barrier #3 on group g{1, 2} for rank 2`.
struct WaitsText<'a>(&'a [Wait]);

impl fmt::Display for WaitsText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Wait { rank, id, waits_for } in self.0.iter().take(SHOWN) {
            write!(f, "; rank {rank} waited in {id} for rank {waits_for}")?;
        }
        Ok(())
    }
}

/// Writes `; rank 0 is busy with "saving" for 71 s`.
struct BusyText<'a>(&'a [BusyRank]);

impl fmt::Display for BusyText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(SHOWN).try_for_each(|busy| write!(f, "; {busy}"))
    }
}

/// Writes `rank 0 is busy with "saving" for 71 s`.
impl fmt::Display for BusyRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} is ", self.rank)?;
        write_busy(f, &self.what, self.spent, self.limit)
    }
}

/// Writes `busy with "saving" for 71 s`, and the limit if it has passed.
pub(crate) fn write_busy(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    spent: Duration,
    limit: Duration,
) -> fmt::Result {
    let seconds = |time: Duration| match time.as_secs_f64() {
        s if s < 10.0 => format!("{s:.1} s"),
        s => format!("{s:.0} s"),
    };
    write!(f, "busy with {what:?} for {}", seconds(spent))?;
    if spent > limit { write!(f, ", longer than its limit of {}", seconds(limit)) } else { Ok(()) }
}

/// Writes `; last completed: rank(s) [0, 2] all_reduce #3, then barrier #1 on group world{0, 1, 2}; rank(s) [1]
/// nothing`, or that none of several calls before was completed.
struct CompletedText<'a>(&'a [LastCall], &'a CallId);

/// The number of different answers that a message shows.
const SHOWN: usize = 4;

impl fmt::Display for CompletedText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut alike: Vec<(String, Vec<usize>)> = Vec::new();
        for last in self.0 {
            let text = match (&last.on_group, self.1.seq) {
                // Messages have numbers of their own and are not among the calls that are counted here.
                (None, before @ 1..) if !["send", "recv"].contains(&&*self.1.call) => {
                    let there = last.in_world.as_ref().map_or(String::new(), |last| format!(", but {last}"));
                    format!("none of the {before} call(s) before on the group{there}")
                }
                _ => last.to_string(),
            };
            match alike.iter_mut().find(|(known, _)| *known == text) {
                Some((_, ranks)) => ranks.push(last.rank),
                None => alike.push((text, vec![last.rank])),
            }
        }
        for (i, (text, ranks)) in alike.iter().take(SHOWN).enumerate() {
            let before = if i == 0 { "; last completed:" } else { ";" };
            write!(f, "{before} rank(s) {ranks:?} {text}")?;
        }
        match alike.len().checked_sub(SHOWN) {
            None | Some(0) => Ok(()),
            Some(more) => write!(f, "; {more} other answers"),
        }
    }
}

/// Writes `all_reduce #3, then barrier #1 on group world{0, 1}`: the last call on the group, then the last on any
/// group.
impl fmt::Display for LastCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.on_group, &self.in_world) {
            (Some(here), Some(last)) if !here.is_call(last) => {
                write!(f, "{} #{}, then {last}", here.call, here.seq)
            }
            (Some(here), _) => write!(f, "{} #{}", here.call, here.seq),
            (None, Some(last)) => write!(f, "nothing there, but {last}"),
            (None, None) => f.write_str("nothing"),
        }
    }
}

/// The first difference between the replicas of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// The tensor's name, e.g. a parameter's path.
    pub name: String,
    /// The tensor, e.g. `f32[64, 128]@(dp:R, tp:S0)`.
    pub tensor: String,
    /// The ranks that differ from the majority of the replicas.
    pub ranks: Vec<usize>,
    /// A rank that agrees with the majority; the first rank if there is no majority.
    pub reference: usize,
    /// The first global index at which one of `ranks` differs.
    pub index: Vec<usize>,
    /// The first of `ranks` that differs at `index`.
    pub rank: usize,
    /// The bits that `rank` holds at `index`.
    pub bits: u64,
    /// The bits that `reference` holds at `index`.
    pub reference_bits: u64,
    /// Bytes per element.
    pub(crate) element_bytes: usize,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Divergence { name, tensor, ranks, reference, index, rank, bits, reference_bits, element_bytes } =
            self;
        let width = 2 + 2 * element_bytes;
        write!(
            f,
            "check_replicas: replicas differ; got {name} {tensor} at rank(s) {ranks:?}, first at index {index:?}: \
             {bits:#0width$x} at rank {rank}, {reference_bits:#0width$x} at rank {reference}; restore the tensor from \
             rank {reference} or a checkpoint"
        )
    }
}

/// The first element of a tensor that is infinite or NaN.
#[derive(Clone, Debug, PartialEq)]
pub struct NotFinite {
    /// The tensor's name, e.g. a parameter's path.
    pub name: String,
    /// The tensor, e.g. `f32[64, 128]@(dp:R, tp:S0)`.
    pub tensor: String,
    /// The training step that found it.
    pub step: u64,
    /// The ranks that hold such an element.
    pub ranks: Vec<usize>,
    /// The least global index of such an element on the first of `ranks`.
    pub index: Vec<usize>,
    /// The element at `index`, as an f64.
    pub value: f64,
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotFinite { name, tensor, step, ranks, index, value } = self;
        let first = ranks.first().copied().unwrap_or_default();
        write!(
            f,
            "check_finite: every element must be finite; got {name} {tensor} at rank(s) {ranks:?} in step {step}, first \
             {value} at index {index:?} at rank {first}; go back to the step before, or lower the learning rate"
        )
    }
}
