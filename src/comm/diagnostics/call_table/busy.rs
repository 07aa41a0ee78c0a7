//! The work that ranks announce to the coordinator, and the time for which calls wait for it.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::super::announced_work::time_left;
use super::{CallKey, CallTable, ProtocolViolation};
use crate::comm::calls::{BusyWork, Sequence};
use crate::error::BusyRank;

impl CallTable {
    /// Replaces the work that a rank has announced.
    ///
    /// # Errors
    /// Refuses a long name.
    pub fn announce(
        &mut self,
        from: usize,
        work: Option<BusyWork>,
        now: Instant,
    ) -> Result<(), ProtocolViolation> {
        self.work[from].set(work, now)
    }

    /// Returns the time for which a rank waits on that has waited for `waited` in a call. If its call is known, this
    /// depends on the work of the ranks that it waits for, otherwise on that of all ranks.
    ///
    /// # Errors
    /// Refuses a call on a group that the rank has not opened.
    pub fn time_left(
        &self,
        from: usize,
        key: CallKey,
        compared: bool,
        waited: Duration,
        now: Instant,
    ) -> Result<Duration, ProtocolViolation> {
        let members = self.members(from, key)?;
        let awaited = match self.open.get(&key) {
            _ if !compared => (0..self.work.len()).filter(|&rank| rank != from).collect(),
            Some(arrivals) => self.awaited(members.absent(key.1, arrivals)),
            None => vec![],
        };
        Ok(self.time_for(&awaited, waited, now))
    }

    /// Returns the time for which a rank waits on that has waited for `waited` until all members open a group.
    ///
    /// # Errors
    /// Refuses a group that the rank has not opened.
    pub fn time_left_to_open(
        &self,
        from: usize,
        group: u64,
        waited: Duration,
        now: Instant,
    ) -> Result<Duration, ProtocolViolation> {
        let members = self.members(from, (group, Sequence::Collective, 0))?;
        let absent = members.ranks.iter().copied().filter(|rank| !members.opened.contains(rank));
        Ok(self.time_for(&self.awaited(absent.collect()), waited, now))
    }

    /// Returns the time for which the end of the remaining ranks is waited for, after a wait of `waited`.
    pub fn time_left_to_end(&self, waited: Duration, now: Instant) -> Duration {
        let all: Vec<usize> = (0..self.work.len()).collect();
        self.time_for(&all, waited, now)
    }

    fn time_for(&self, ranks: &[usize], waited: Duration, now: Instant) -> Duration {
        let running = ranks.iter().filter(|&&rank| !self.ended[rank]);
        time_left(running.map(|&rank| self.work[rank].busy_time(now)), self.deadline, waited, now)
    }

    /// Returns the given ranks and all that they wait for, directly or through other ranks.
    fn awaited(&self, ranks: Vec<usize>) -> Vec<usize> {
        let mut seen: HashSet<usize> = ranks.iter().copied().collect();
        let mut all = ranks;
        let mut at = 0;
        while let Some(&rank) = all.get(at) {
            at += 1;
            for next in self.waits(rank).flat_map(|(_, absent)| absent) {
                if seen.insert(next) {
                    all.push(next);
                }
            }
        }
        all
    }

    /// Returns the work of the given ranks and of all that they wait for.
    pub(super) fn busy(&self, ranks: &[usize], now: Instant) -> Vec<BusyRank> {
        let awaited = self.awaited(ranks.to_vec());
        awaited.into_iter().filter_map(|rank| self.work[rank].report(rank, now)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{arrive, collective, dp, gather, open};
    use super::*;
    use crate::comm::calls::{Route, group_number};

    /// The deadline of the table.
    const DEADLINE: Duration = Duration::from_millis(500);

    fn work(limit: Duration) -> Option<BusyWork> {
        Some(BusyWork { what: "saving".into(), spent: Duration::ZERO, limit })
    }

    /// Announces one second of work of rank 0 and returns the clock.
    fn busy(table: &mut CallTable) -> Instant {
        let now = Instant::now();
        table.announce(0, work(DEADLINE * 2), now).unwrap();
        now
    }

    #[test]
    fn only_calls_that_depend_on_a_busy_rank_wait_on() {
        let mut table = open(4);
        let now = busy(&mut table);
        let key = collective(&table, 0);
        let left = |table: &CallTable, rank, key, compared| {
            table.time_left(rank, key, compared, DEADLINE, now + DEADLINE).unwrap()
        };
        for rank in [1, 2] {
            arrive(&mut table, rank, 0, gather(4));
        }
        assert_eq!(left(&table, 1, key, true), DEADLINE);
        // Rank 2 waits for rank 3, which does not wait for rank 0; then it does.
        let pair = group_number("pair", &[2, 3]);
        for rank in [2, 3] {
            table.open(rank, "pair", &[2, 3]).unwrap();
        }
        let call = (pair, Sequence::Collective, 0);
        table.arrive(2, call, gather(2)).unwrap();
        assert_eq!(left(&table, 2, call, true), Duration::ZERO);
        assert_eq!(left(&table, 2, call, false), DEADLINE);
        let recv = crate::comm::calls::CallSignature { route: Route::Recv { from: 0 }, ..gather(4) };
        table.arrive(3, (dp(&table), Sequence::Message { from: 0, to: 3 }, 0), recv).unwrap();
        assert_eq!(left(&table, 2, call, true), DEADLINE);
        let fault = table.late(2, call, &"all_gather".into(), true, now + DEADLINE).unwrap().to_string();
        assert!(fault.contains("; rank 0 is busy with \"saving\" for 0.5 s; last completed"), "{fault}");
        // A rank that has ended is not busy, and a call that all have reached depends on no rank.
        table.ended(0);
        assert_eq!(left(&table, 2, call, true), Duration::ZERO);
        arrive(&mut table, 3, 0, gather(4));
        arrive(&mut table, 0, 0, gather(4));
        assert_eq!(left(&table, 1, key, true), Duration::ZERO);
        assert!(table.time_left(1, (7, Sequence::Collective, 0), true, DEADLINE, now).is_err());
    }

    #[test]
    fn a_group_that_a_busy_rank_has_not_opened_is_waited_for() {
        let mut table = CallTable::new(3, DEADLINE);
        let now = busy(&mut table);
        let ranks = [0, 1];
        table.open(1, "g", &ranks).unwrap();
        let group = group_number("g", &ranks);
        let left = |table: &CallTable, later| {
            table.time_left_to_open(1, group, DEADLINE + later, now + DEADLINE + later).unwrap()
        };
        assert_eq!(left(&table, Duration::ZERO), DEADLINE);
        assert_eq!(left(&table, DEADLINE * 2), Duration::ZERO);
        table.announce(0, None, now + DEADLINE).unwrap();
        assert_eq!(left(&table, DEADLINE / 2), DEADLINE / 2);
        assert_eq!(table.time_left_to_end(DEADLINE, now + DEADLINE), DEADLINE);
        table.open(0, "g", &ranks).unwrap();
        assert_eq!(left(&table, DEADLINE / 2), Duration::ZERO);
        assert!(table.time_left_to_open(2, group, DEADLINE, now).is_err());
        let long = BusyWork { what: "x".repeat(1000), spent: DEADLINE, limit: DEADLINE };
        assert!(table.announce(1, Some(long), now).is_err());
    }
}
