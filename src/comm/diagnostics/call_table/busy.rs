//! The work that ranks announce to the coordinator, and the time for which calls wait for it.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::super::announced_work::{BusyTime, time_left};
use super::super::table_group::OpenCall;
use super::{CallKey, CallTable, ProtocolViolation, SEARCHED};
use crate::comm::calls::{BusyWork, Sequence};
use crate::error::BusyRank;

/// The ranks on which a wait depends.
#[derive(Debug)]
struct WaitChain {
    /// The ranks that have not come to a call of the chain.
    ranks: Vec<usize>,
    /// The busy time of those that have come to the calls of the chain, up to their arrivals. A chain that has just
    /// become shorter leaves the remaining ranks this time.
    busy: BusyTime,
}

impl WaitChain {
    fn of(ranks: Vec<usize>) -> WaitChain {
        WaitChain { ranks, busy: BusyTime::default() }
    }
}

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
        let chain = match self.open.get(&key) {
            _ if !compared => WaitChain::of((0..self.work.len()).filter(|&rank| rank != from).collect()),
            Some(OpenCall { arrivals, busy }) => {
                let chain = self.awaited(members.absent(key.1, arrivals));
                WaitChain { busy: chain.busy.and(*busy), ..chain }
            }
            // All have come, the last one perhaps just now. Its busy time counts as work of this rank.
            None => WaitChain { ranks: vec![], busy: self.work[from].busy_time(now) },
        };
        Ok(self.time_for(&chain, waited, now))
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
        // A member that was busy until it opened the group has yet to connect.
        let chain = self.awaited(absent.collect());
        Ok(self.time_for(&WaitChain { busy: chain.busy.and(members.busy), ..chain }, waited, now))
    }

    /// Returns the time for which the end of the remaining ranks is waited for, after a wait of `waited`.
    pub fn time_left_to_end(&self, waited: Duration, now: Instant) -> Duration {
        self.time_for(&WaitChain::of((0..self.work.len()).collect()), waited, now)
    }

    fn time_for(&self, chain: &WaitChain, waited: Duration, now: Instant) -> Duration {
        // Work of ranks that have ended counts too: a rank that waited for them was seen in no call, if calls are not
        // compared.
        let works = chain.ranks.iter().map(|&rank| self.work[rank].busy_time(now)).chain([chain.busy]);
        time_left(works, self.deadline, waited, now)
    }

    /// Returns the given ranks and all that they wait for, directly or through other ranks.
    fn awaited(&self, ranks: Vec<usize>) -> WaitChain {
        let mut seen: HashSet<usize> = ranks.iter().copied().collect();
        let mut chain = WaitChain::of(ranks);
        let mut at = 0;
        while let Some(&rank) = chain.ranks.get(at) {
            at += 1;
            for key in self.open_of[rank].iter().take(SEARCHED) {
                let (Some(call), Some(members)) = (self.open.get(key), self.groups.get(&key.0)) else {
                    continue;
                };
                chain.busy = chain.busy.and(call.busy);
                let absent = members.absent(key.1, &call.arrivals).into_iter();
                chain.ranks.extend(absent.filter(|&next| seen.insert(next)));
            }
        }
        chain
    }

    /// Returns the work of the given ranks and of all that they wait for.
    pub(super) fn busy(&self, ranks: &[usize], now: Instant) -> Vec<BusyRank> {
        let awaited = self.awaited(ranks.to_vec()).ranks;
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
            table.open(rank, "pair", &[2, 3], now).unwrap();
        }
        let call = (pair, Sequence::Collective, 0);
        table.arrive(2, call, gather(2), now).unwrap();
        assert_eq!(left(&table, 2, call, true), Duration::ZERO);
        assert_eq!(left(&table, 2, call, false), DEADLINE);
        let recv = crate::comm::calls::CallSignature { route: Route::Recv { from: 0 }, ..gather(4) };
        table.arrive(3, (dp(&table), Sequence::Message { from: 0, to: 3 }, 0), recv, now).unwrap();
        assert_eq!(left(&table, 2, call, true), DEADLINE);
        let fault = table.late(2, call, &"all_gather".into(), true, now + DEADLINE).unwrap().to_string();
        assert!(fault.contains("; rank 0 is busy with \"saving\" for 0.5 s; last completed"), "{fault}");
        // The end of its program ends its work too.
        table.ended(0, now + DEADLINE / 4);
        assert_eq!(left(&table, 2, call, true), DEADLINE / 4);
        // A call that all have reached, the busy rank last, has the rest of the deadline to finish.
        table.arrive(3, key, gather(4), now).unwrap();
        table.arrive(0, key, gather(4), now + DEADLINE / 4).unwrap();
        assert_eq!(left(&table, 1, key, true), DEADLINE / 4);
        assert_eq!(table.time_left(1, key, true, DEADLINE * 2, now + DEADLINE * 2), Ok(Duration::ZERO));
        assert!(table.time_left(1, (7, Sequence::Collective, 0), true, DEADLINE, now).is_err());
    }

    /// A rank that has just come out of a wait for a busy rank had no time of its own. So the calls that wait for it
    /// count their deadline from the end of the work, as they did while the rank waited.
    #[test]
    fn a_chain_that_resolves_at_the_deadline_leaves_time() {
        let mut table = CallTable::new(5, DEADLINE);
        let now = busy(&mut table);
        let pairs = [[0, 1], [1, 2], [2, 3]];
        let calls = pairs.map(|ranks| {
            ranks.iter().for_each(|&rank| table.open(rank, "pair", &ranks, now).unwrap());
            (group_number("pair", &ranks), Sequence::Collective, 0)
        });
        let left = |table: &CallTable, rank, at: Duration| {
            table.time_left(rank, calls[rank - 1], true, at, now + at).unwrap()
        };
        // Rank 3 waits for 2, which waits for 1, which waits for 0, which is busy.
        for rank in [1, 2, 3] {
            table.arrive(rank, calls[rank - 1], gather(2), now).unwrap();
        }
        let (end, soon) = (DEADLINE * 3 / 2, DEADLINE / 100);
        assert_eq!([1, 2, 3].map(|rank| left(&table, rank, end)), [DEADLINE; 3]);
        table.announce(0, None, now + end).unwrap();
        table.arrive(0, calls[0], gather(2), now + end).unwrap();
        assert_eq!([2, 3].map(|rank| left(&table, rank, end + soon)), [DEADLINE - soon; 2]);
        // So does rank 1, which comes later without being late.
        table.arrive(1, calls[1], gather(2), now + end + DEADLINE / 2).unwrap();
        assert_eq!(left(&table, 3, end + DEADLINE * 3 / 4), DEADLINE / 4);
        assert_eq!(left(&table, 3, end + DEADLINE), Duration::ZERO);
    }

    /// Rank 1 waits for rank 0, which is busy, in a call that is not compared. Rank 2 waits on for rank 1 when rank 0 has
    /// ended.
    #[test]
    fn a_busy_rank_that_ends_leaves_time_where_nothing_is_compared() {
        let mut table = CallTable::new(3, DEADLINE);
        let now = busy(&mut table);
        for rank in [1, 2] {
            table.open(rank, "pair", &[1, 2], now).unwrap();
        }
        let call = (group_number("pair", &[1, 2]), Sequence::Collective, 0);
        let left = |table: &CallTable, waited| table.time_left(2, call, false, waited, now + waited).unwrap();
        assert_eq!(left(&table, DEADLINE), DEADLINE);
        let end = DEADLINE * 3 / 2;
        table.announce(0, None, now + end).unwrap();
        assert_eq!(table.ended(0, now + end), None);
        assert_eq!(
            [1, 2, 4].map(|part| left(&table, end + DEADLINE * part / 4)),
            [3, 2, 0].map(|part| DEADLINE * part / 4)
        );
    }

    /// The first of two ranks to come was busy. The call waits for the other one, as long as before.
    #[test]
    fn a_busy_rank_that_comes_first_leaves_time() {
        let mut table = open(4);
        let now = busy(&mut table);
        let (key, end) = (collective(&table, 0), DEADLINE * 3 / 2);
        let pair = (group_number("pair", &[1, 3]), Sequence::Collective, 0);
        for rank in [1, 3] {
            table.open(rank, "pair", &[1, 3], now).unwrap();
        }
        table.arrive(3, pair, gather(2), now).unwrap();
        table.arrive(1, key, gather(4), now).unwrap();
        table.announce(0, None, now + end).unwrap();
        table.arrive(0, key, gather(4), now + end).unwrap();
        let at = end + DEADLINE / 2;
        let left = |rank, key| table.time_left(rank, key, true, at, now + at).unwrap();
        assert_eq!([left(1, key), left(3, pair)], [DEADLINE / 2; 2]);
        // Work that rank 0 begins while the others wait for rank 2 is not waited for.
        table.announce(0, work(DEADLINE * 2), now + at).unwrap();
        let at = end + DEADLINE;
        assert_eq!(table.time_left(1, key, true, at, now + at), Ok(Duration::ZERO));
    }

    #[test]
    fn a_group_that_a_busy_rank_has_not_opened_is_waited_for() {
        let mut table = CallTable::new(3, DEADLINE);
        let now = busy(&mut table);
        let ranks = [0, 1];
        table.open(1, "g", &ranks, now).unwrap();
        let group = group_number("g", &ranks);
        let left = |table: &CallTable, later| {
            table.time_left_to_open(1, group, DEADLINE + later, now + DEADLINE + later).unwrap()
        };
        assert_eq!(left(&table, Duration::ZERO), DEADLINE);
        assert_eq!(left(&table, DEADLINE * 2), Duration::ZERO);
        table.announce(0, None, now + DEADLINE).unwrap();
        assert_eq!(left(&table, DEADLINE / 2), DEADLINE / 2);
        assert_eq!(table.time_left_to_end(DEADLINE, now + DEADLINE), DEADLINE);
        // Once it has opened the group it has the rest of the deadline to connect.
        table.open(0, "g", &ranks, now + DEADLINE + DEADLINE / 4).unwrap();
        assert_eq!(left(&table, DEADLINE / 2), DEADLINE / 2);
        assert_eq!(left(&table, DEADLINE), Duration::ZERO);
        assert!(table.time_left_to_open(2, group, DEADLINE, now).is_err());
        let long = BusyWork { what: "x".repeat(1000), spent: DEADLINE, limit: DEADLINE };
        assert!(table.announce(1, Some(long), now).is_err());
    }
}
