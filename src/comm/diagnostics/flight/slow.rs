//! The warning about a rank that keeps others waiting.

use std::fmt;
use std::time::Duration;

use crate::error::{BusyRank, CallId};

/// A rank that has waited for longer than [`Spmd::patience`](crate::comm::Spmd::patience), a quarter of the deadline
/// by default, and still waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlowRank {
    /// The rank that waits.
    pub rank: usize,
    /// The call in which it waits.
    pub id: CallId,
    /// The members that have not reached it and wait for no rank, and in the place of each other one the ranks that it
    /// waits for in the end.
    pub waits_for: Vec<usize>,
    /// The work that these ranks have announced.
    pub busy: Vec<BusyRank>,
    /// The time that it has waited so far.
    pub waited: Duration,
    /// The time after which it gives up, counted from the end of announced work that it waits for.
    pub deadline: Duration,
}

impl fmt::Display for SlowRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SlowRank { rank, id, waits_for, busy, waited, deadline } = self;
        let (waited, deadline) = (waited.as_secs_f64(), deadline.as_secs_f64());
        write!(
            f,
            "{id}: slow rank(s) {waits_for:?}; rank {rank} has waited {waited:.1} s and gives up after {deadline:.1} s"
        )?;
        busy.iter().try_for_each(|busy| write!(f, "; {busy}"))
    }
}
