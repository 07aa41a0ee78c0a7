//! Deadlines, of any length.

use std::time::{Duration, Instant};

/// The moment after so much time; a year from now where the clock does not reach so far.
pub(in crate::comm) fn end_after(time: Duration) -> Instant {
    const LONG: Duration = Duration::from_secs(365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(time).unwrap_or(now + LONG)
}
