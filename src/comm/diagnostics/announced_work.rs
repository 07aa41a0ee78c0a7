//! The work that a rank has announced, as the ranks that wait for it see it, and the time that they wait for it.

use std::time::{Duration, Instant};

use crate::comm::calls::{BusyWork, NAME_BYTES};
use crate::error::BusyRank;

/// One rank's announced work.
#[derive(Debug, Default)]
pub(in crate::comm) struct AnnouncedWork {
    /// The work and the time at which it was announced.
    current: Option<(BusyWork, Instant)>,
    /// The end of the work before.
    ended: Option<Instant>,
    /// The longest limit that the rank has announced.
    longest: Duration,
}

impl AnnouncedWork {
    /// Replaces the rank's announced work; `None` ends it.
    ///
    /// # Errors
    /// Refuses a long name, which no rank announces.
    pub fn set(&mut self, work: Option<BusyWork>, now: Instant) -> Result<(), String> {
        if let Some(BusyWork { what, limit, .. }) = &work {
            if what.len() > NAME_BYTES {
                return Err(format!(
                    "the name of its work has {} bytes, but at most {NAME_BYTES} are allowed",
                    what.len()
                ));
            }
            self.longest = self.longest.max(*limit);
        }
        self.end(now);
        self.current = work.map(|work| (work, now));
        Ok(())
    }

    /// Ends the announced work, if there is any.
    pub fn end(&mut self, now: Instant) {
        self.ended = self.busy_until(now);
        self.current = None;
    }

    /// Returns the last moment up to `now` at which the rank was busy within its limit.
    fn busy_until(&self, now: Instant) -> Option<Instant> {
        let Some((BusyWork { spent, limit, .. }, at)) = &self.current else { return self.ended };
        let left = limit.saturating_sub(*spent);
        if left.is_zero() {
            return self.ended;
        }
        let end = at.checked_add(left).map_or(now, |end| end.min(now));
        Some(self.ended.map_or(end, |ended| ended.max(end)))
    }

    /// Returns what decides how long other ranks wait for this one.
    pub fn busy_time(&self, now: Instant) -> BusyTime {
        BusyTime { until: self.busy_until(now), longest: self.longest }
    }

    /// Counts a wait of the rank for busy ranks as work of its own, because it had no time for other work meanwhile.
    pub fn count_wait(&mut self, BusyTime { until, longest }: BusyTime) {
        self.ended = self.ended.max(until);
        self.longest = self.longest.max(longest);
    }

    /// Returns the rank's work as errors report it.
    pub fn report(&self, rank: usize, now: Instant) -> Option<BusyRank> {
        let (BusyWork { what, spent, limit }, at) = self.current.as_ref()?;
        let spent = spent.saturating_add(now.saturating_duration_since(*at));
        Some(BusyRank { rank, what: what.clone(), spent, limit: *limit })
    }
}

/// The part of a rank's announced work that decides how long other ranks wait for it.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::comm) struct BusyTime {
    /// The last moment at which the rank was busy within its limit.
    until: Option<Instant>,
    /// The longest limit that the rank has announced.
    longest: Duration,
}

impl BusyTime {
    /// Returns the time of two ranks together.
    pub fn and(self, other: BusyTime) -> BusyTime {
        BusyTime { until: self.until.max(other.until), longest: self.longest.max(other.longest) }
    }
}

/// Returns the time for which a wait goes on, if it has lasted for `waited` and depends on the ranks whose work is
/// given: until the deadline has passed since its begin, and since the last moment at which one of these ranks was
/// busy. So that repeated announcements do not extend it for ever, the wait takes at most twice the deadline and the
/// longest limit that these ranks have announced. A rank that was not busy since the begin of the wait does not count.
pub(in crate::comm) fn time_left(
    works: impl Iterator<Item = BusyTime>,
    deadline: Duration,
    waited: Duration,
    now: Instant,
) -> Duration {
    let mut left = deadline.saturating_sub(waited);
    let mut longest = Duration::ZERO;
    for BusyTime { until, longest: limit } in works {
        let Some(until) = until else { continue };
        let since = now.saturating_duration_since(until);
        if since <= waited {
            left = left.max(deadline.saturating_sub(since));
            longest = longest.max(limit);
        }
    }
    left.min(deadline.saturating_mul(2).saturating_add(longest).saturating_sub(waited))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(60);

    fn seconds(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    fn work(spent: u64, limit: u64) -> Option<BusyWork> {
        Some(BusyWork { what: "saving".into(), spent: seconds(spent), limit: seconds(limit) })
    }

    /// The time left of a wait that began with the clock, `at` seconds later.
    fn left(works: &[AnnouncedWork], began: Instant, at: u64) -> u64 {
        let now = began + seconds(at);
        time_left(works.iter().map(|work| work.busy_time(now)), DEADLINE, seconds(at), now).as_secs()
    }

    #[test]
    fn the_deadline_counts_from_the_end_of_the_work() {
        let began = Instant::now();
        let mut all = [AnnouncedWork::default(), AnnouncedWork::default()];
        assert_eq!([0, 59, 60, 99].map(|at| left(&all, began, at)), [60, 1, 0, 0]);
        all[1].set(work(0, 1000), began + seconds(10)).unwrap();
        assert_eq!([20, 60, 500].map(|at| left(&all, began, at)), [60; 3]);
        all[1].set(None, began + seconds(500)).unwrap();
        assert_eq!([500, 520, 560, 600].map(|at| left(&all, began, at)), [60, 40, 0, 0]);
        let report = |at: u64| all[1].report(1, began + seconds(at));
        assert_eq!(report(600), None);
        all[0].set(work(5, 20), began + seconds(530)).unwrap();
        let report = all[0].report(0, began + seconds(601)).unwrap();
        assert_eq!(
            report.to_string(),
            "rank 0 is busy with \"saving\" for 76 s, longer than its limit of 20 s"
        );
    }

    #[test]
    fn no_announcement_counts_beyond_its_limit() {
        let began = Instant::now();
        let mut all = [AnnouncedWork::default()];
        // The rank had been busy for 5 s when this was announced.
        all[0].set(work(5, 100), began).unwrap();
        assert_eq!([94, 95, 105, 155].map(|at| left(&all, began, at)), [60, 60, 50, 0]);
        // The end of the work does not count again what came after the limit.
        all[0].set(None, began + seconds(150)).unwrap();
        assert_eq!([150, 155].map(|at| left(&all, began, at)), [5, 0]);
        // Work that goes on after a wait of its own, beyond its limit.
        all[0].set(work(120, 100), began + seconds(156)).unwrap();
        assert_eq!(left(&all, began, 156), 0);
        // A limit beyond the clock's range.
        all[0]
            .set(Some(BusyWork { what: "".into(), spent: seconds(0), limit: Duration::MAX }), began)
            .unwrap();
        assert_eq!(left(&all, began, 1 << 30), 60);
        let long = BusyWork { what: "x".repeat(NAME_BYTES + 1), spent: seconds(0), limit: seconds(1) };
        assert!(all[0].set(Some(long), began).is_err());
    }

    #[test]
    fn a_limit_of_work_that_ended_before_the_wait_does_not_lengthen_it() {
        let start = Instant::now();
        let mut all = [AnnouncedWork::default(), AnnouncedWork::default()];
        all[0].set(work(0, 3600), start).unwrap();
        all[0].set(None, start + seconds(10)).unwrap();
        let began = start + seconds(20);
        for at in 0..200 {
            all[1].set(work(0, 30), began + seconds(at)).unwrap();
        }
        assert_eq!([90, 140, 149, 150].map(|at| left(&all, began, at)), [60, 10, 1, 0]);
    }

    #[test]
    fn work_that_is_announced_again_and_again_does_not_extend_a_wait_for_ever() {
        let began = Instant::now();
        let mut all = [AnnouncedWork::default()];
        for at in 0..200 {
            all[0].set(work(0, 30), began + seconds(at)).unwrap();
        }
        assert_eq!([40, 90, 140, 149, 150].map(|at| left(&all, began, at)), [60, 60, 10, 1, 0]);
    }
}
