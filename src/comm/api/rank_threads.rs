//! The threads on which ranks run: their start, the wait for their ends, and ranks that are left behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::caught::{drop_caught, take_message};
use super::local_world::LocalWorld;
use super::rank::Rank;
use super::rank_failures::{Failures, panic_of_drop, record_failure, run_rank};
use super::rank_outcomes::{Program, RankEnd, RankOutcomes};
use super::spmd::Spmd;
use super::thread_room::STACK_BYTES;
use crate::base::lock;
use crate::comm::machine::Machine;
use crate::comm::network::Network;
use crate::comm::transport::threads::Running;
use crate::error::{Error, Failure, Result};
use crate::tensor::{cpu, storage};

/// The thread of one rank, before it runs.
struct RankThread {
    rank: usize,
    program: Program,
    threads_per_rank: usize,
    memory_limit: usize,
    network: Network,
    machine: Machine,
    world: Arc<LocalWorld>,
    failures: Arc<Failures>,
    ends: Sender<(usize, RankEnd)>,
    /// True once all threads have started, false if the system refused one.
    go: Arc<OnceLock<bool>>,
}

/// The threads of all ranks.
struct RankThreads {
    handles: Vec<Option<JoinHandle<()>>>,
    ends: Receiver<(usize, RankEnd)>,
    failures: Arc<Failures>,
    world: Arc<LocalWorld>,
}

impl Spmd {
    /// Runs a program on all ranks, and waits for their ends.
    pub(super) fn start(self, program: Program) -> Result<RankOutcomes> {
        self.check()?;
        let threads_per_rank = self.threads_per_rank.map_or_else(|| cpu::threads_each(self.world), Ok)?;
        let world = || {
            LocalWorld::new(self.world, self.deadline, &*self.device, self.library.as_ref(), &self.flights)
        };
        let world = catch_unwind(AssertUnwindSafe(world)).unwrap_or_else(|payload| {
            let rule = "the function that chooses devices panicked";
            Err(Error::invalid("spmd", rule, take_message(payload), ""))
        });
        let threads = match self.spawn(&program, threads_per_rank, Arc::new(world?)) {
            Ok(threads) => threads,
            Err(refused) => {
                drop_caught(program);
                return Err(refused);
            }
        };
        #[cfg(test)]
        thread::sleep(super::rank_failures::tests::LETS_GO_AFTER.get());
        // The last one to drop the program drops what it captured: a rank, or this thread if all ranks have ended. A panic
        // there is the last rank's.
        let dropped = drop_caught(program);
        if let Some(text) = &dropped {
            record_failure(panic_of_drop(text), self.world - 1, &threads.world, &threads.failures);
        }
        let mut outcomes = self.gather(threads);
        if let (Some(_), Some(last)) = (dropped, outcomes.ends.last_mut()) {
            *last = RankEnd::Failed;
        }
        let reporting = outcomes.report_panic.as_ref().filter(|_| outcomes.failures.is_empty());
        let reporting = reporting.map(|text| Error::invalid("spmd", "on_slow panicked", text, ""));
        reporting.map_or(Ok(outcomes), Err)
    }

    /// Starts the threads of all ranks, and lets them run. All start before the first rank runs: if the system refuses
    /// one, no rank has done anything.
    fn spawn(
        &self,
        program: &Program,
        threads_per_rank: usize,
        world: Arc<LocalWorld>,
    ) -> Result<RankThreads> {
        let (failures, (sender, ends)) = (Arc::<Failures>::default(), channel());
        let go = Arc::new(OnceLock::new());
        let (mut handles, mut refused) = (Vec::new(), None);
        for rank in 0..self.world {
            let thread = RankThread {
                rank,
                program: program.clone(),
                threads_per_rank,
                memory_limit: self.memory_limit,
                network: self.network.clone(),
                machine: self.machine.clone(),
                world: world.clone(),
                failures: failures.clone(),
                ends: sender.clone(),
                go: go.clone(),
            };
            let builder =
                thread::Builder::new().name(format!("{} {rank}", self.name)).stack_size(STACK_BYTES);
            match builder.spawn(|| thread.run()) {
                Ok(handle) => handles.push(Some(handle)),
                Err(reason) => {
                    refused = Some(Error::unsupported(
                        "spmd",
                        "the system refuses a thread for a rank",
                        format!("rank {rank} of {}: {reason}", self.world),
                        "use fewer ranks",
                    ));
                    break;
                }
            }
        }
        let _ = go.set(refused.is_none());
        let Some(refused) = refused else { return Ok(RankThreads { handles, ends, failures, world }) };
        // They end at once. A panic there is one of a captured value that is dropped.
        handles.into_iter().flatten().for_each(|handle| drop(handle.join()));
        Err(refused)
    }

    /// Waits for the ranks' ends.
    fn gather(&self, mut threads: RankThreads) -> RankOutcomes {
        let mut ends: Vec<RankEnd> = (0..self.world).map(|_| RankEnd::Abandoned).collect();
        let mut last = Instant::now();
        let mut report_panic = None;
        while let Some((rank, end)) = self.next(&threads, last, &mut report_panic) {
            ends[rank] = end;
            last = Instant::now();
            // The thread is about to end, and its panics were caught, so joining cannot fail.
            let _ = threads.handles[rank].take().map(JoinHandle::join);
        }
        let mut failures = std::mem::take(&mut *lock(&threads.failures));
        if failures.is_empty()
            && let Some((sender, fault)) = threads.world.unreceived()
        {
            ends[sender] = RankEnd::Failed;
            failures.push((sender, Failure::Error(fault.into())));
        }
        if !failures.is_empty() {
            threads.world.write_records();
        }
        RankOutcomes { ends, failures, waited_s: last.elapsed().as_secs_f64(), report_panic }
    }

    /// Returns the next rank to end; `None` if all have ended, or if one has failed, the others have not continued
    /// without it, and none has ended within the deadline. Reports slow ranks meanwhile, until the function that does so
    /// panics.
    fn next(
        &self,
        threads: &RankThreads,
        last: Instant,
        report_panic: &mut Option<String>,
    ) -> Option<(usize, RankEnd)> {
        let world = &*threads.world;
        let patience = self.patience.unwrap_or(self.deadline / 4);
        let glance = (patience / 4).clamp(Duration::from_millis(1), Duration::from_millis(50));
        let settling = self.settling.max(world.settling());
        let mut late_since = None;
        loop {
            match threads.ends.recv_timeout(glance) {
                Ok(end) => return Some(end),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {
                    let report = || world.slow(patience).iter().for_each(|slow| (self.on_slow)(slow));
                    if report_panic.is_none() {
                        *report_panic = catch_unwind(AssertUnwindSafe(report)).err().map(take_message);
                    }
                    if !world.time_left(last.elapsed()).is_zero() {
                        late_since = None;
                        continue;
                    }
                    let is_late = late_since.get_or_insert_with(Instant::now).elapsed() >= settling;
                    let failures = lock(&threads.failures);
                    if is_late && failures.iter().any(|(rank, _)| !world.is_left(*rank)) {
                        return None;
                    }
                }
            }
        }
    }
}

impl RankThread {
    /// Runs the rank's program, and tells its end.
    fn run(self) {
        let RankThread { rank, program, network, machine, world, failures, ends, go, .. } = self;
        if !*go.wait() {
            return;
        }
        let running = Running::enter();
        storage::set_memory_limit(self.memory_limit);
        let modelled = |r: Rank| r.with_network(network.clone()).with_common_machine(machine.clone());
        let run = || run_rank(&|r: Rank| program(modelled(r)), rank, &world, &failures);
        let result = cpu::with_threads(self.threads_per_rank, run);
        // Captured values are dropped before the caller learns of the end.
        let end = match (drop_caught(program), result) {
            (Some(text), _) => {
                record_failure(panic_of_drop(&text), rank, &world, &failures);
                RankEnd::Failed
            }
            (None, Some(result)) => RankEnd::Result(result),
            (None, None) => RankEnd::Failed,
        };
        drop((world, running));
        // The caller may have abandoned this rank.
        let _ = ends.send((rank, end));
    }
}
