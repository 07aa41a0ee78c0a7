//! Deadlines of any length.

use std::time::{Duration, Instant};

/// Returns the instant after `time`, or one in a year if the clock does not reach that far.
pub(in crate::comm) fn end_after(time: Duration) -> Instant {
    const LONG: Duration = Duration::from_secs(365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(time).unwrap_or(now + LONG)
}
