//! Faults on request: a rank of a tested program dies, stalls or makes another call than the other ranks.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::check::Equivalence;
use super::scenario::Scenario;
use crate::base::lock;
use crate::comm::{BusyWork, Call, Channel, Engine, Rank, Reduce, Request, Route, Spmd};
use crate::error::{CommFault, Error, Failure, Result};
use crate::tensor::{DType, Shape, Tensor};
use crate::testing::expected_panics::quiet_panics_here;
use crate::testing::values::mix;

/// The deadline of runs with a fault, unless the caller sets one.
const DEADLINE: Duration = Duration::from_secs(3);

/// The time by which a machine may be late.
const SLACK: Duration = Duration::from_secs(1);

/// A fault of one rank, at one of its collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankFault {
    /// The rank panics instead of making the call.
    Dies,
    /// The rank makes the call only after 7/4 of the deadline, and no less than 0.25 seconds after it.
    Stalls,
    /// The rank makes another call.
    Differs,
}

/// The end of one run with a fault.
#[derive(Clone, Debug)]
pub struct FaultRun {
    /// The mesh.
    pub mesh: String,
    /// The fault.
    pub fault: RankFault,
    /// The number of the rank's collective at which the fault happened, from 0.
    pub at: usize,
    /// The number of collectives that the rank makes in a run without a fault.
    pub calls: usize,
    /// The error of each rank.
    pub ends: Vec<String>,
    /// The time after the fault at which the last rank ended.
    pub lasted: Duration,
}

impl Equivalence {
    /// Runs the program with a rank that dies, one that stalls and one that makes another call, and asserts that every
    /// rank then ends with an error, in time, and that every other rank's error names the rank.
    ///
    /// The fault happens at the rank's collective number `at`, or at a random one. Every mesh that has the rank takes
    /// part; on each, a run without a fault comes first, to count the collectives. The deadline is 3 seconds unless
    /// [`Equivalence::deadline`] is set, and never less in the run without a fault; a run in which a rank stalls takes almost
    /// twice the deadline. On a busy machine, ranks that have no fault may exceed a deadline of less than 0.1 seconds.
    ///
    /// ```
    /// use isoshard::{tensor::DType, testing::Equivalence};
    /// use std::time::Duration;
    /// let runs = Equivalence::new(|mesh| {
    ///     let x = mesh.input("x", DType::F32, [8])?;
    ///     x.redistribute(isoshard::placement::Layout::replicated(mesh.mesh().ndim()))?.sum_all()?;
    ///     mesh.barrier()
    /// })
    /// .meshes(["dp=3"])
    /// .deadline(Duration::from_secs(1))
    /// .with_fault(1, None);
    /// assert_eq!(runs.len(), 3);
    /// assert!(runs[0].ends[0].contains("rank 1"), "{}", runs[0]);
    /// ```
    ///
    /// # Panics
    /// Panics if a rank ends without an error, too late, or with an error that does not name the rank; if no mesh has
    /// the rank; and if the rank makes no collective, or fewer than `at + 1`.
    #[track_caller]
    pub fn with_fault(&self, rank: usize, at: Option<usize>) -> Vec<FaultRun> {
        let mut runs = Vec::new();
        for mesh in &self.meshes {
            let scenario = Scenario::new(mesh, self.seed).unwrap_or_else(|e| panic!("{e}"));
            if rank >= scenario.rank_len() {
                continue;
            }
            let healthy = self.run_with(&scenario, rank, None);
            let failed = healthy.ends.iter().flatten().next();
            assert!(failed.is_none(), "{mesh}: the program fails without a fault: {failed:?}");
            let calls = healthy.calls;
            let wanted = at.map_or(String::new(), |at| format!(", and the fault is at number {at}"));
            assert!(calls > at.unwrap_or(0), "{mesh}: rank {rank} makes {calls} collectives{wanted}");
            for fault in [RankFault::Dies, RankFault::Stalls, RankFault::Differs] {
                let name = format!("{mesh} {fault:?}");
                let draw = name.bytes().fold(self.seed, |hash, byte| mix(hash ^ u64::from(byte)));
                let at = at.unwrap_or((draw % calls as u64) as usize);
                let Ended { ends, after, .. } = self.run_with(&scenario, rank, Some((fault, at)));
                let place = format!("{mesh}: rank {rank} {fault} at its call {at} of {calls}");
                // The other ranks end before a rank that stalls wakes up, unless the machine is slower than a short deadline.
                let limit = match fault {
                    RankFault::Stalls => stall(self.fault_deadline()).max(self.fault_deadline() + SLACK),
                    RankFault::Dies | RankFault::Differs => self.fault_deadline() + 2 * SLACK,
                };
                for (other, end) in ends.iter().enumerate() {
                    let Some(end) = end else { panic!("{place}: rank {other} ends without an error") };
                    let is_stuck = matches!(end, Failure::Stuck(_));
                    assert!(!is_stuck, "{place}: rank {other} does not end: {end}");
                    let late = after[other];
                    assert!(
                        other == rank || late < limit,
                        "{place}: rank {other} ends after {late:?}: {end}"
                    );
                    assert!(
                        other == rank || names(end, rank),
                        "{place}: rank {other} does not name it: {end}"
                    );
                }
                let lasted = after.into_iter().max().unwrap_or_default();
                let ends = ends.into_iter().flatten().map(|end| end.to_string()).collect();
                runs.push(FaultRun { mesh: mesh.clone(), fault, at, calls, ends, lasted });
            }
        }
        assert!(!runs.is_empty(), "no mesh of {:?} has a rank {rank}", self.meshes);
        runs
    }

    fn fault_deadline(&self) -> Duration {
        self.deadline.unwrap_or(DEADLINE)
    }

    fn run_with(&self, scenario: &Scenario, rank: usize, fault: Option<(RankFault, usize)>) -> Ended {
        let (check, scenario) = (self.clone(), scenario.clone());
        let calls = Arc::new(AtomicUsize::new(0));
        let deadline = self.fault_deadline();
        let deadline = if fault.is_none() { deadline.max(DEADLINE) } else { deadline };
        let (counter, device) = (calls.clone(), self.device);
        let struck = Arc::new(Mutex::new(Instant::now()));
        let ended = Arc::new(Mutex::new(vec![None; scenario.rank_len()]));
        let (fault_time, end_times) = (struck.clone(), ended.clone());
        let spmd = Spmd::new(scenario.rank_len()).deadline(deadline).on(move |_| device).on_slow(|_| {});
        let spmd = spmd.settling(SLACK);
        let ends = spmd.run_each(move |of: Rank| {
            quiet_panics_here();
            let _clock = EndClock { rank: of.rank(), ends: end_times.clone() };
            let world = of.world();
            let of = match of.rank() == rank {
                true => {
                    let injected = Arc::new(InjectedFault {
                        fault,
                        calls: counter.clone(),
                        deadline,
                        struck: fault_time.clone(),
                    });
                    let engine = Arc::new(FaultyEngine { engine: of.engine().clone(), injected });
                    of.over(engine)?
                }
                false => of,
            };
            check.run_rank(&of, &scenario, Arc::default())?;
            // A rank that has made its last call meets the fault here.
            world.barrier()
        });
        let ends = ends.unwrap_or_else(|e| panic!("{e}")).into_iter().map(Result::err).collect();
        let struck = *lock(&struck);
        let ended = std::mem::take(&mut *lock(&ended));
        let after = |end: Option<Instant>| end.unwrap_or_else(Instant::now).saturating_duration_since(struck);
        Ended { ends, calls: calls.load(Ordering::SeqCst), after: ended.into_iter().map(after).collect() }
    }
}

/// Returns how long a rank stalls: longer than the other ranks wait for it, and shorter than the program waits for a rank
/// after all others have ended, also if the machine pauses for a moment.
fn stall(deadline: Duration) -> Duration {
    (deadline * 7 / 4).max(deadline + SLACK / 4)
}

/// The ranks' failures, the collectives of the watched rank, and the time after the fault at which each rank ended.
struct Ended {
    ends: Vec<Option<Failure>>,
    calls: usize,
    after: Vec<Duration>,
}

/// Notes the time at which a rank ends, by a panic too.
struct EndClock {
    rank: usize,
    ends: Arc<Mutex<Vec<Option<Instant>>>>,
}

impl Drop for EndClock {
    fn drop(&mut self) {
        lock(&self.ends)[self.rank] = Some(Instant::now());
    }
}

/// Returns true if a failure names the rank that caused it.
fn names(failure: &Failure, rank: usize) -> bool {
    let Failure::Error(error) = failure else { return false };
    match error.downcast_ref::<CommFault>() {
        Some(CommFault::Missing { missing, .. }) => missing.contains(&rank),
        Some(CommFault::Mismatch { rank: one, other, .. }) => [*one, *other].contains(&rank),
        _ => text_names(&error.to_string(), rank),
    }
}

/// Returns true if an error's text names the rank: as `rank 1`, or in a list such as `rank(s) [0, 1]`.
fn text_names(text: &str, rank: usize) -> bool {
    let alone = format!("rank {rank}");
    let mut singles = text.split(&alone).skip(1);
    let mut lists = text.split("rank(s) [").skip(1).filter_map(|rest| rest.split(']').next());
    singles.any(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
        || lists.any(|list| list.split(", ").any(|one| one.parse() == Ok(rank)))
}

impl fmt::Display for RankFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RankFault::Dies => "dies",
            RankFault::Stalls => "stalls",
            RankFault::Differs => "makes another call",
        })
    }
}

impl fmt::Display for FaultRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FaultRun { mesh, fault, at, calls, ends, lasted } = self;
        writeln!(f, "{mesh}: a rank {fault} at its call {at} of {calls}; all ended after {lasted:?}")?;
        ends.iter().enumerate().try_for_each(|(rank, end)| writeln!(f, "  rank {rank}: {end}"))
    }
}

/// The fault of one rank, with the count of its collectives.
#[derive(Debug)]
struct InjectedFault {
    fault: Option<(RankFault, usize)>,
    calls: Arc<AtomicUsize>,
    deadline: Duration,
    /// The time of the fault.
    struck: Arc<Mutex<Instant>>,
}

/// An engine whose rank fails at one of its collectives.
#[derive(Debug)]
struct FaultyEngine {
    engine: Arc<dyn Engine>,
    injected: Arc<InjectedFault>,
}

#[derive(Debug)]
struct FaultyChannel {
    channel: Arc<dyn Channel>,
    injected: Arc<InjectedFault>,
}

impl FaultyEngine {
    fn faulty(&self, channel: Arc<dyn Channel>) -> Arc<dyn Channel> {
        Arc::new(FaultyChannel { channel, injected: self.injected.clone() })
    }
}

impl Engine for FaultyEngine {
    fn rank(&self) -> usize {
        self.engine.rank()
    }

    fn world_len(&self) -> usize {
        self.engine.world_len()
    }

    fn deadline(&self) -> Duration {
        self.engine.deadline()
    }

    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
        Ok(self.faulty(self.engine.open(ranks, name)?))
    }

    fn split(&self, part: &[usize], color: usize, name: &str) -> Result<Arc<dyn Channel>> {
        Ok(self.faulty(self.engine.split(part, color, name)?))
    }

    fn announce(&self, work: Option<BusyWork>) {
        self.engine.announce(work);
    }

    fn end(&self) -> Result<()> {
        self.engine.end()
    }

    fn survivors(&self) -> Result<Vec<usize>> {
        self.engine.survivors()
    }

    fn abort(&self, cause: &Error) {
        self.engine.abort(cause);
    }
}

impl FaultyChannel {
    /// Counts a call. Returns true if the rank makes another call instead.
    fn differs(&self) -> bool {
        let at = self.injected.calls.fetch_add(1, Ordering::SeqCst);
        if self.injected.fault.is_some_and(|(_, fault_at)| at == fault_at) {
            *lock(&self.injected.struck) = Instant::now();
        }
        match self.injected.fault {
            Some((RankFault::Dies, fault_at)) if at == fault_at => {
                panic!("dies at call {at}, as the test asks")
            }
            Some((RankFault::Stalls, fault_at)) if at == fault_at => {
                std::thread::sleep(stall(self.injected.deadline));
                false
            }
            Some((RankFault::Differs, fault_at)) => at == fault_at,
            _ => false,
        }
    }

    /// Makes a call that does not fit `call`.
    fn other(&self, call: &Call<'_>) -> Result<Box<dyn Request>> {
        if call.route != Route::Barrier {
            let barrier = Call {
                name: "barrier",
                route: Route::Barrier,
                op: None,
                outgoing: &[],
                incoming: &[],
                ..*call
            };
            return self.channel.start(barrier);
        }
        let (sent, shape) = ([Tensor::zeros(DType::U8, [1])], [Shape::from([1])]);
        let route = Route::Broadcast { root: 0 };
        let call = Call {
            name: "broadcast",
            route,
            op: None,
            dtype: DType::U8,
            outgoing: &sent,
            incoming: &shape,
            lineage: call.lineage,
        };
        self.channel.start(call)
    }
}

impl Channel for FaultyChannel {
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        if self.differs() { self.other(&call) } else { self.channel.start(call) }
    }

    fn gather_into(&self, call: Call<'_>, into: Vec<Tensor>) -> Result<Box<dyn Request>> {
        if self.differs() { self.other(&call) } else { self.channel.gather_into(call, into) }
    }

    fn all_reduce(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        if self.differs() { self.other(&call) } else { self.channel.all_reduce(reduce, call) }
    }

    fn reduce_scatter(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        if self.differs() { self.other(&call) } else { self.channel.reduce_scatter(reduce, call) }
    }

    fn reduces_well(&self) -> bool {
        self.channel.reduces_well()
    }
}
