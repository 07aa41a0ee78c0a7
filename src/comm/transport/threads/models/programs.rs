//! Random programs of collectives on three and four ranks, over groups that overlap, under random schedules. They
//! always end with the right results; if a rank fails or ends early, every rank that waits for it gets an error.

use std::sync::Arc;
use std::time::Duration;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner, thread};

use crate::comm::transport::threads::{ThreadEngine, ThreadWorld};
use crate::comm::{Group, Pending, Rank};
use crate::error::{CommFault, Error, Result};
use crate::tensor::{ReduceOp, Shape, Tensor};

const SCHEDULES: usize = 200;

/// A call that the members of a group make together.
#[derive(Clone, Copy, Debug)]
enum StepKind {
    Gather,
    /// A gather of two chunks per member, which are copied together.
    GatherInto,
    AllToAll,
    /// An all-reduce of this many elements: one, or enough for several chunks.
    AllReduce(usize),
    /// Member i gets `i * uneven + 1` elements.
    ReduceScatter {
        uneven: usize,
    },
    Broadcast,
    Ring,
    Barrier,
}

#[derive(Clone, Debug)]
struct ModelStep {
    group: usize,
    kind: StepKind,
    /// True if the result is waited for at the end, in reverse order; if also `dropped`, it is never waited for.
    later: bool,
    dropped: bool,
}

/// The way in which a rank leaves the program early.
#[derive(Clone, Copy, Debug, PartialEq)]
enum EarlyExit {
    Fails,
    Ends,
}

#[derive(Clone, Debug)]
struct ModelProgram {
    world: usize,
    groups: Vec<Vec<usize>>,
    steps: Vec<ModelStep>,
    /// The rank that leaves, the step before which it does, and the way.
    exit: Option<(usize, usize, EarlyExit)>,
}

/// A generator of small numbers (Marsaglia's xorshift).
struct SmallRng(u64);

impl SmallRng {
    fn below(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % sides
    }
}

impl ModelProgram {
    fn random(seed: u64, exits: bool) -> ModelProgram {
        let mut rng = SmallRng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let world = 3 + rng.below(2);
        let mut groups = vec![(0..world).collect::<Vec<_>>()];
        for _ in 0..2 {
            let without = rng.below(world);
            groups.push((0..world).filter(|&r| r != without).collect());
        }
        let steps =
            (0..4 + rng.below(4)).map(|_| ModelStep::random(&mut rng, groups.len())).collect::<Vec<_>>();
        let how = if rng.below(2) == 0 { EarlyExit::Fails } else { EarlyExit::Ends };
        let exit = exits.then(|| (rng.below(world), rng.below(steps.len()), how));
        ModelProgram { world, groups, steps, exit }
    }

    /// One rank's part.
    fn run(&self, rank: &Rank) -> Result<()> {
        let open = |(i, ranks): (usize, &Vec<usize>)| -> Result<Option<Group>> {
            ranks.contains(&rank.rank()).then(|| rank.group(ranks, &format!("g{i}"))).transpose()
        };
        let groups = self.groups.iter().enumerate().map(open).collect::<Result<Vec<_>>>()?;
        let mut later = Vec::new();
        for (k, step) in self.steps.iter().enumerate() {
            match self.exit {
                Some((who, at, EarlyExit::Fails)) if (who, at) == (rank.rank(), k) => {
                    return Err(Error::invalid("model", "struck", "", ""));
                }
                Some((who, at, EarlyExit::Ends)) if (who, at) == (rank.rank(), k) => return Ok(()),
                _ => {}
            }
            let Some(group) = &groups[step.group] else { continue };
            let in_flight = StepInFlight::start(step.kind, group, k)?;
            match (step.later, step.dropped) {
                (true, true) => drop(in_flight),
                (true, false) => later.push(in_flight),
                _ => in_flight.wait()?,
            }
        }
        later.into_iter().rev().try_for_each(StepInFlight::wait)
    }

    /// Returns the world and every rank's result, after running the threads in some order.
    fn outcomes(&self) -> (Arc<ThreadWorld>, Vec<Result<()>>) {
        let world = Arc::new(ThreadWorld::new(self.world, Duration::from_secs(3600)));
        let spawn = |r: usize| {
            let (program, world) = (self.clone(), world.clone());
            thread::spawn(move || {
                let rank = Rank::new(Arc::new(ThreadEngine::new(world.clone(), r)))?;
                let result = program.run(&rank);
                match &result {
                    Ok(()) => world.end(r),
                    Err(e) => world.fail(r, e.to_string()),
                }
                result
            })
        };
        let all: Vec<_> = (0..self.world).map(spawn).collect();
        let results = all.into_iter().map(|one| one.join().unwrap()).collect();
        (world, results)
    }
}

impl ModelStep {
    fn random(rng: &mut SmallRng, groups: usize) -> ModelStep {
        let kind = match rng.below(8) {
            0 => [StepKind::Gather, StepKind::GatherInto][rng.below(2)],
            1 => StepKind::AllToAll,
            2 => StepKind::AllReduce(1),
            3 => StepKind::AllReduce(7),
            4 => StepKind::ReduceScatter { uneven: 0 },
            5 => StepKind::ReduceScatter { uneven: 5 },
            6 => [StepKind::Broadcast, StepKind::Ring][rng.below(2)],
            _ => StepKind::Barrier,
        };
        // A message that no member receives would be taken for a later one.
        let dropped = rng.below(3) == 0 && !matches!(kind, StepKind::Ring);
        ModelStep { group: rng.below(groups), kind, later: rng.below(3) == 0, dropped }
    }
}

/// A started step, and the result that it must have.
enum StepInFlight {
    One(Pending<Tensor>, Vec<f32>),
    Many(Pending<Vec<Tensor>>, Vec<Vec<f32>>),
    Done(Pending<()>),
}

impl StepInFlight {
    fn start(kind: StepKind, g: &Group, k: usize) -> Result<StepInFlight> {
        let (me, n) = (g.index(), g.len());
        let value = |from: usize, to: usize| (100 * k + 10 * from + to) as f32;
        let sum = |to: usize| (0..n).map(|from| value(from, to)).sum::<f32>();
        let of = |len: usize, value: f32| Tensor::from_vec(vec![value; len], [len]);
        let one = Shape::from([1]);
        Ok(match kind {
            StepKind::Gather => {
                let want = (0..n).map(|at| vec![value(at, 0)]).collect();
                StepInFlight::Many(g.all_gather_async(&of(1, value(me, 0))?, &vec![one; n]), want)
            }
            StepKind::GatherInto => {
                let places: Vec<_> = (0..n).map(|at| (3 * at, Shape::from([3]))).collect();
                let places = of(3 * n, -1.0)?.cut(&places)?;
                let want = (0..n).map(|at| vec![value(at, 0); 3]).collect();
                StepInFlight::Many(g.all_gather_into(&of(3, value(me, 0))?, places), want)
            }
            StepKind::AllToAll => {
                let parts = (0..n).map(|to| of(1, value(me, to))).collect::<Result<_>>()?;
                let want = (0..n).map(|at| vec![value(at, me)]).collect();
                StepInFlight::Many(g.all_to_all_async(parts, &vec![one; n]), want)
            }
            StepKind::AllReduce(len) => StepInFlight::One(
                g.all_reduce_async(&of(len, value(me, 0))?, ReduceOp::Sum),
                vec![sum(0); len],
            ),
            StepKind::ReduceScatter { uneven } => {
                let len = |to: usize| to * uneven + 1;
                let parts = (0..n).map(|to| of(len(to), value(me, to))).collect::<Result<_>>()?;
                StepInFlight::One(g.reduce_scatter_async(parts, ReduceOp::Sum), vec![sum(me); len(me)])
            }
            StepKind::Broadcast => {
                let x = of(1, value(0, 0))?;
                StepInFlight::One(g.broadcast_async(Some(&x), 0, x.dtype(), &one), vec![value(0, 0)])
            }
            StepKind::Ring => {
                let (next, before) = ((me + 1) % n, (me + n - 1) % n);
                let x = of(1, value(me, next))?;
                drop(g.send_async(&x, next));
                StepInFlight::One(g.recv_async(before, x.dtype(), &one), vec![value(before, me)])
            }
            StepKind::Barrier => StepInFlight::Done(g.barrier_async()),
        })
    }

    fn wait(self) -> Result<()> {
        match self {
            StepInFlight::One(pending, want) => assert_eq!(pending.wait()?.to_vec::<f32>()?, want),
            StepInFlight::Many(pending, want) => {
                let got = pending.wait()?.iter().map(|x| x.to_vec::<f32>()).collect::<Result<Vec<_>>>()?;
                assert_eq!(got, want);
            }
            StepInFlight::Done(pending) => pending.wait()?,
        }
        Ok(())
    }
}

/// Runs `check` under many schedules, half of them with few preemptions at critical places.
fn try_many(check: impl Fn() + Send + Sync + Clone + 'static) {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    Runner::new(RandomScheduler::new(SCHEDULES), config.clone()).run(check.clone());
    Runner::new(PctScheduler::new(3, SCHEDULES), config).run(check);
}

#[test]
fn every_program_ends_with_the_right_results() {
    for seed in 0..60 {
        let program = ModelProgram::random(seed, false);
        try_many(move || {
            let (_, results) = program.outcomes();
            assert!(results.iter().all(Result::is_ok), "{program:?}: {results:?}");
        });
    }
}

#[test]
fn every_program_ends_when_a_rank_leaves_it() {
    for seed in 0..60 {
        let program = ModelProgram::random(seed, true);
        try_many(move || {
            let (world, results) = program.outcomes();
            let (who, _, how) = program.exit.expect("somebody leaves");
            assert_eq!(results[who].is_err(), how == EarlyExit::Fails, "{program:?}: {results:?}");
            let first = world.status().first_failure().map(|(rank, _)| *rank);
            for (rank, result) in results.iter().enumerate().filter(|(rank, _)| *rank != who) {
                // Each error names its cause: the rank that left, or the first rank that failed because of it.
                let Err(Error::Comm(fault)) = result else {
                    assert!(result.is_ok(), "{program:?}: {result:?}");
                    continue;
                };
                match &**fault {
                    CommFault::PeerFailed { rank: named, .. } => assert_eq!(Some(*named), first),
                    CommFault::Missing { missing, ended, .. } => {
                        assert!(*ended && missing.contains(&who) && how == EarlyExit::Ends, "{fault:?}");
                    }
                    _ => panic!("rank {rank} of {program:?}: {fault:?}"),
                }
            }
        });
    }
}
