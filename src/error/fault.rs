//! What goes wrong between ranks: collectives that do not complete, replicas that differ.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// One call of a collective, as errors name it: operation, sequence number and group, and the operator that wanted it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallId {
    /// The operation, e.g. `all_reduce`.
    pub call: Cow<'static, str>,
    /// The number of collectives made on the group before this one.
    pub seq: u64,
    /// The group, e.g. `dp{0, 4, 8}`.
    pub group: String,
    /// The operator whose operands travel, e.g. `matmul`; empty where the program made the call itself.
    pub operator: Cow<'static, str>,
}

impl CallId {
    /// A call that no operator is known to have made.
    pub fn new(call: impl Into<Cow<'static, str>>, seq: u64, group: impl Into<String>) -> CallId {
        CallId { call: call.into(), seq, group: group.into(), operator: "".into() }
    }

    /// True where both are the same call, whoever made it.
    pub fn is_call(&self, other: &CallId) -> bool {
        (&self.call, self.seq, &self.group) == (&other.call, other.seq, &other.group)
    }
}

/// `all_reduce #7 on group tp{0, 1} (for matmul)`.
impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{} on group {}", self.call, self.seq, self.group)?;
        if self.operator.is_empty() { Ok(()) } else { write!(f, " (for {})", self.operator) }
    }
}

/// What a rank had completed when a call failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastCall {
    /// The rank, numbered in the world.
    pub rank: usize,
    /// The last call that it completed on the group.
    pub on_group: Option<CallId>,
    /// The last call that it completed at all.
    pub in_world: Option<CallId>,
}

/// A rank that waits for another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    /// The rank that waits.
    pub rank: usize,
    /// The call in which it waits.
    pub id: CallId,
    /// A rank that has not come to it.
    pub waits_for: usize,
}

/// Why a collective did not complete.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum CommFault {
    /// Two ranks brought calls that do not belong together.
    #[error(
        "{id}: rank {rank} brought {brought}, rank {other} brought {other_brought}; every rank must make the \
         same calls in the same order{}", Completed(.last)
    )]
    Mismatch {
        /// The call of the rank that reports.
        id: CallId,
        /// A rank that differs.
        rank: usize,
        /// What it brought, e.g. `all_reduce(sum) f32[1024]`.
        brought: String,
        /// The rank it differs from.
        other: usize,
        /// What that one brought.
        other_brought: String,
        /// What the members had completed; empty where nobody knows.
        last: Vec<LastCall>,
    },
    /// Some ranks did not come before the deadline, or had ended already.
    #[error(
        "{id}: rank(s) {missing:?} {}; rank {rank} waited with {brought}{}{}",
        absence(.ended, .deadline_s), Elsewhere(.elsewhere), Completed(.last)
    )]
    Missing {
        /// The call that waited.
        id: CallId,
        /// The rank that reports.
        rank: usize,
        /// What it brought.
        brought: String,
        /// The ranks that did not come.
        missing: Vec<usize>,
        /// True where their programs had ended, so that nobody waited for the deadline.
        ended: bool,
        /// The deadline in seconds.
        deadline_s: f64,
        /// Those of the missing that waited in other calls then, and for whom.
        elsewhere: Vec<Wait>,
        /// What the members had completed; empty where nobody knows.
        last: Vec<LastCall>,
    },
    /// Ranks wait for each other in different groups, which they came to in different orders.
    #[error(
        "{id}: ranks wait for each other in a circle: {}; ranks must come to the groups they share in one order{}",
        Circle(.waits), Completed(.last)
    )]
    Cycle {
        /// The call of the rank that reports.
        id: CallId,
        /// The rank that reports.
        rank: usize,
        /// Each waits for the next one's rank, the last for the first's.
        waits: Vec<Wait>,
        /// What these ranks had completed; empty where nobody knows.
        last: Vec<LastCall>,
    },
    /// Another rank failed, so that this call can never complete.
    #[error("{id}: given up, because rank {rank} failed: {cause}")]
    PeerFailed {
        /// The call that was given up.
        id: CallId,
        /// The rank that failed first.
        rank: usize,
        /// Its cause.
        cause: String,
    },
    /// What carries the data failed, or did not finish though all members had come.
    #[error("{id}: the transport of rank {rank} failed: {reason}")]
    Transport {
        /// The call that was under way.
        id: CallId,
        /// The rank that noticed first.
        rank: usize,
        /// What it noticed.
        reason: String,
    },
}

impl CommFault {
    /// The call that did not complete.
    pub fn id(&self) -> &CallId {
        match self {
            CommFault::Mismatch { id, .. }
            | CommFault::Missing { id, .. }
            | CommFault::Cycle { id, .. }
            | CommFault::PeerFailed { id, .. }
            | CommFault::Transport { id, .. } => id,
        }
    }

    pub(crate) fn id_mut(&mut self) -> &mut CallId {
        match self {
            CommFault::Mismatch { id, .. }
            | CommFault::Missing { id, .. }
            | CommFault::Cycle { id, .. }
            | CommFault::PeerFailed { id, .. }
            | CommFault::Transport { id, .. } => id,
        }
    }

    /// What the members had completed, where somebody knows.
    pub fn last_completed(&self) -> &[LastCall] {
        match self {
            CommFault::Mismatch { last, .. }
            | CommFault::Missing { last, .. }
            | CommFault::Cycle { last, .. } => last,
            CommFault::PeerFailed { .. } | CommFault::Transport { .. } => &[],
        }
    }

    /// The same circle, told by `rank`, where it is one of those that wait in it.
    pub(crate) fn told_by(mut self, teller: usize) -> CommFault {
        if let CommFault::Cycle { id, rank, waits, .. } = &mut self
            && let Some(at) = waits.iter().position(|wait| wait.rank == teller)
        {
            waits.rotate_left(at);
            *rank = teller;
            *id = waits[0].id.clone();
        }
        self
    }
}

fn absence(ended: &bool, deadline_s: &f64) -> String {
    if *ended { "had ended".into() } else { format!("did not come within {deadline_s:.1} s") }
}

/// `rank 0 waits in all_reduce #3 on group a{0, 1} for rank 1, which waits in ... for rank 0`.
struct Circle<'a>(&'a [Wait]);

impl fmt::Display for Circle<'_> {
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

/// `; rank 1 waited in barrier #3 on group g{1, 2} for rank 2`.
struct Elsewhere<'a>(&'a [Wait]);

impl fmt::Display for Elsewhere<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Wait { rank, id, waits_for } in self.0.iter().take(SHOWN) {
            write!(f, "; rank {rank} waited in {id} for rank {waits_for}")?;
        }
        Ok(())
    }
}

/// `; last completed: rank(s) [0, 2] all_reduce #3, then barrier #1 on group world{0, 1, 2}; rank(s) [1] nothing`.
struct Completed<'a>(&'a [LastCall]);

/// So many different answers are shown; a world has more ranks than a line has room.
const SHOWN: usize = 4;

impl fmt::Display for Completed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut alike: Vec<(String, Vec<usize>)> = Vec::new();
        for last in self.0 {
            let text = last.to_string();
            match alike.iter_mut().find(|(said, _)| *said == text) {
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

/// `all_reduce #3, then barrier #1 on group world{0, 1}`, the first on the group in question.
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

/// Replicas that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// The tensor's name, e.g. a parameter's path.
    pub name: String,
    /// The tensor, e.g. `f32[64, 128]@(dp:R, tp:S0)`.
    pub tensor: String,
    /// The ranks whose elements are not those that most replicas hold.
    pub ranks: Vec<usize>,
    /// A rank that holds what most hold; the first one's elements where no value has more replicas than another.
    pub reference: usize,
    /// The first global index at which one of `ranks` differs.
    pub index: Vec<usize>,
    /// The first that does there.
    pub rank: usize,
    /// The bits it holds there.
    pub bits: u64,
    /// The bits that the reference holds there.
    pub reference_bits: u64,
    /// Bytes of an element.
    pub element_bytes: usize,
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

/// An element that is infinite or no number.
#[derive(Clone, Debug, PartialEq)]
pub struct NotFinite {
    /// The tensor's name, e.g. a parameter's path.
    pub name: String,
    /// The tensor, e.g. `f32[64, 128]@(dp:R, tp:S0)`.
    pub tensor: String,
    /// The step at which it was found.
    pub step: u64,
    /// The ranks that hold such an element of this tensor.
    pub ranks: Vec<usize>,
    /// The least global index of such an element that the first of `ranks` holds.
    pub index: Vec<usize>,
    /// The element there, in bits of an f64.
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
