//! What a flight record says, in memory and in files.

use std::fmt;

use crate::comm::calls::Sequence;

/// How far a call came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its rank had come to it and went on without waiting.
    Started,
    /// Its rank was waiting for it.
    Waiting,
    /// Its rank had its result.
    Completed,
    /// Its rank was told that it failed.
    Failed,
}

impl State {
    pub(super) const ALL: [State; 4] = [State::Started, State::Waiting, State::Completed, State::Failed];

    pub(super) fn name(self) -> &'static str {
        match self {
            State::Started => "started",
            State::Waiting => "waiting",
            State::Completed => "completed",
            State::Failed => "failed",
        }
    }
}

/// One rank's record, as [`read`](super::read) finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankRecord {
    /// The rank, numbered in the world.
    pub rank: usize,
    /// The number of ranks.
    pub world_len: usize,
    /// When its program began, in microseconds since 1970.
    pub began_unix_us: u64,
    /// When the record was written, in microseconds since the program began.
    pub failed_us: u64,
    /// Why the record was written; empty for a rank that knew of no failure.
    pub cause: String,
    /// True where the cause only follows from another rank's.
    pub is_echo: bool,
    /// Calls started since the program began, of which the last ones follow.
    pub calls_len: u64,
    /// The last calls, oldest first.
    pub calls: Vec<CallRecord>,
}

/// One call in a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRecord {
    /// The number of calls that the rank made before it.
    pub number: u64,
    /// The group's name.
    pub group: String,
    /// The group's members.
    pub ranks: Vec<usize>,
    /// Groups of the same name and members are different ones where ranks were lost between them.
    pub generation: u64,
    /// Which sequence of the group's calls it belongs to.
    pub sequence: Sequence,
    /// The number of calls of its sequence before it.
    pub seq: u64,
    /// What was brought to it.
    pub brought: Brought,
    /// The operator that wanted it; empty where the program made it itself.
    pub operator: String,
    /// How far it came.
    pub state: State,
    /// When it was started, in microseconds since the program began.
    pub started_us: u64,
    /// When it was completed or failed; 0 before.
    pub ended_us: u64,
}

/// What a rank brought to a call: its fingerprint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Brought {
    /// The collective, e.g. `all_reduce`.
    pub call: &'static str,
    /// The reduction, e.g. `sum`; empty without one.
    pub op: String,
    /// The elements' type.
    pub dtype: String,
    /// The root of a broadcast.
    pub root: Option<usize>,
    /// The shapes sent.
    pub sent: ShapeList,
    /// The shapes expected.
    pub expected: ShapeList,
}

/// Shapes in a record: all, or the first few.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeList {
    /// How many there were.
    pub len: usize,
    /// True where all were one shape, which is then kept once.
    pub alike: bool,
    /// Those that were kept.
    pub kept: Vec<Vec<usize>>,
    /// A hash of all.
    pub hash: u64,
}

impl Brought {
    /// The collectives that groups make.
    pub(super) const CALLS: [&'static str; 8] =
        ["all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast", "send", "recv", "barrier"];

    /// True where this, brought by member `me`, can belong together with `other`, brought by member `at`. Of long lists of
    /// shapes that ranks exchange pairwise only a beginning is known: they get the benefit of the doubt.
    pub fn agrees(&self, me: usize, other: &Brought, at: usize) -> bool {
        let message = |call: &str| matches!(call, "send" | "recv");
        if (&self.op, &self.dtype, self.root) != (&other.op, &other.dtype, other.root) {
            return false;
        }
        if message(self.call) || message(other.call) {
            return self.call != other.call
                && message(self.call) == message(other.call)
                && self.expected == other.expected;
        }
        match self.call {
            _ if self.call != other.call => false,
            "all_to_all" | "reduce_scatter" => {
                let differ =
                    |a: Option<&[usize]>, b: Option<&[usize]>| matches!((a, b), (Some(a), Some(b)) if a != b);
                self.sent.len == other.sent.len
                    && !differ(self.sent.at(at), other.expected.at(me))
                    && !differ(other.sent.at(me), self.expected.at(at))
            }
            _ => (self.expected.len, self.expected.hash) == (other.expected.len, other.expected.hash),
        }
    }
}

impl ShapeList {
    /// The i-th shape, where it is known.
    pub fn at(&self, i: usize) -> Option<&[usize]> {
        let at = if self.alike { 0 } else { i };
        self.kept.get(at).map(Vec::as_slice)
    }
}

/// In the notation of errors: `all_reduce(sum) f32[1024]`.
impl fmt::Display for Brought {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Brought { call, op, dtype, root, sent, expected } = self;
        f.write_str(call)?;
        if !op.is_empty() {
            write!(f, "({op})")?;
        }
        if let Some(root) = root {
            write!(f, "(root {root})")?;
        }
        match *call {
            "barrier" => Ok(()),
            "all_to_all" | "reduce_scatter" => write!(f, " {dtype}{sent} for {expected}"),
            _ => write!(f, " {dtype}{expected}"),
        }
    }
}

impl fmt::Display for ShapeList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (true, Some(shape)) = (self.alike, self.kept.first()) {
            return write!(f, "{shape:?}");
        }
        let kept: Vec<String> = self.kept.iter().map(|shape| format!("{shape:?}")).collect();
        let more = if kept.len() < self.len { format!(", {} in all", self.len) } else { String::new() };
        write!(f, "{{{}{more}}}", kept.join(", "))
    }
}
