//! Work that a rank announces to the ranks that wait for it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The work that a rank has announced by [`Rank::busy`](crate::comm::Rank::busy), as its engine tells the other ranks.
///
/// ```
/// use isoshard::comm::BusyWork;
/// use std::time::Duration;
/// let [spent, limit] = [71, 3600].map(Duration::from_secs);
/// let work = BusyWork { what: "saving".to_string(), spent, limit };
/// assert_eq!(work.to_string(), "busy with \"saving\" for 71 s");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "announced work")]
pub struct BusyWork {
    /// The names of all work that the rank has announced and not ended, in the order of announcing: `saving, hashing`.
    pub what: String,
    /// The time since the first of it was announced.
    pub spent: Duration,
    /// The time, counted from the same moment, after which the announcement no longer counts.
    pub limit: Duration,
}

impl std::fmt::Display for BusyWork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        crate::error::write_busy(f, &self.what, self.spent, self.limit)
    }
}
