//! Random programs of collectives, and a rank's outcome of one.

use std::time::{Duration, Instant};

use isoshard::comm::{Group, Rank};
use isoshard::tensor::{DType, ReduceOp, Shape, Tensor};
use isoshard::{CommFault, Error, Result};

/// The number of repetitions per fault.
pub const TIMES: u64 = 50;

/// A generator of test cases.
pub struct Random(u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// Returns `n` of the ranks below `world` in random order.
    pub fn ranks(&mut self, n: usize, world: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..world).collect();
        (0..n).map(|_| all.swap_remove(self.below(all.len()))).collect()
    }
}

/// Runs a test fifty times, each with its own seed.
#[track_caller]
pub fn repeated(name: &str, mut f: impl FnMut(&mut Random)) {
    for k in 0..TIMES {
        let seed = name.bytes().fold(k + 1, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        println!("{name}: repetition {k}, seed {seed}");
        f(&mut Random(seed));
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    AllReduce(ReduceOp),
    AllGather,
    AllToAll,
    ReduceScatter(ReduceOp),
    Broadcast,
}

const KINDS: [Kind; 6] = [
    Kind::AllReduce(ReduceOp::Sum),
    Kind::AllReduce(ReduceOp::Max),
    Kind::AllGather,
    Kind::AllToAll,
    Kind::ReduceScatter(ReduceOp::Sum),
    Kind::Broadcast,
];

/// A collective on one of the program's groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    pub group: usize,
    pub kind: Kind,
    pub len: usize,
    pub dtype: DType,
}

/// The calls of every rank, in this order, on the groups that it belongs to.
#[derive(Clone, Debug)]
pub struct Program {
    pub world: usize,
    /// The first group is the world.
    pub groups: Vec<Vec<usize>>,
    pub steps: Vec<Step>,
}

/// A rank's behaviour at a step.
pub enum Turn {
    AsPlanned,
    Skip,
    Instead(Step),
}

/// The end of a rank's program.
#[derive(Clone, Debug)]
pub struct End {
    pub rank: usize,
    /// The step whose call failed, and the fault.
    pub fault: Option<(usize, CommFault)>,
}

impl Program {
    pub fn random(random: &mut Random) -> Program {
        let world = 2 + random.below(4);
        let mut groups = vec![(0..world).collect()];
        for _ in 0..2 {
            let n = 2 + random.below(world - 1);
            groups.push(random.ranks(n, world));
        }
        let step = |k: usize| {
            let (group, kind) = (random.below(groups.len()), *random.pick(&KINDS));
            // All calls of a program differ, so that a skipped one is noticed.
            Step { group, kind, len: k + 1, dtype: *random.pick(&[DType::F32, DType::F64]) }
        };
        let steps = (0..8).map(step).collect();
        Program { world, groups, steps }
    }

    /// Makes this rank's calls as `turn` says, up to the first failure. Successful calls have the right values, now
    /// and later.
    pub fn run(
        &self,
        rank: &Rank,
        deadline: Duration,
        mut turn: impl FnMut(usize) -> Result<Turn>,
    ) -> Result<End> {
        let me = rank.rank();
        let mut groups: Vec<Option<Group>> = Vec::new();
        for (k, ranks) in self.groups.iter().enumerate() {
            groups.push(ranks.contains(&me).then(|| rank.group(ranks, &format!("g{k}"))).transpose()?);
        }
        let mut held = Vec::new();
        for (at, planned) in self.steps.iter().enumerate() {
            let Some(group) = &groups[planned.group] else { continue };
            let step = match turn(at)? {
                Turn::AsPlanned => *planned,
                Turn::Skip => continue,
                Turn::Instead(step) => step,
            };
            match call(group, &step) {
                Ok(results) => held.push((step, group.clone(), results)),
                Err(Error::Comm(fault)) => {
                    stays_failed(group, &fault, deadline);
                    held.iter().for_each(|(step, group, results)| check(group, step, results));
                    return Ok(End { rank: me, fault: Some((at, *fault)) });
                }
                Err(other) => return Err(other),
            }
        }
        held.iter().for_each(|(step, group, results)| check(group, step, results));
        Ok(End { rank: me, fault: None })
    }
}

/// A failed group returns its first fault at once for every call.
fn stays_failed(group: &Group, first: &CommFault, deadline: Duration) {
    for _ in 0..2 {
        let start = Instant::now();
        let Err(Error::Comm(again)) = group.barrier() else { panic!("{group} works again after {first}") };
        assert!(start.elapsed() < deadline / 2, "{:?} after {first}", start.elapsed());
        assert_eq!(std::mem::discriminant(&*again), std::mem::discriminant(first), "{again} after {first}");
    }
}

fn value(rank: usize, len: usize) -> f64 {
    (rank * 100 + len) as f64
}

fn call(group: &Group, step: &Step) -> Result<Vec<Tensor>> {
    let Step { kind, len, dtype, .. } = *step;
    let (n, shape) = (group.len(), Shape::from([len]));
    let mine = Tensor::full(dtype, &shape, value(group.rank(), len));
    let shapes = vec![shape.clone(); n];
    let results = match kind {
        Kind::AllReduce(op) => vec![group.all_reduce(&mine, op)?],
        Kind::AllGather => group.all_gather(&mine, &shapes)?,
        Kind::AllToAll => group.all_to_all(vec![mine; n], &shapes)?,
        Kind::ReduceScatter(op) => vec![group.reduce_scatter(vec![mine; n], op)?],
        Kind::Broadcast => vec![group.broadcast(Some(&mine), 0, dtype, &shape)?],
    };
    check(group, step, &results);
    Ok(results)
}

fn check(group: &Group, step: &Step, results: &[Tensor]) {
    let each = group.ranks().iter().map(|&rank| value(rank, step.len));
    let want: Vec<f64> = match step.kind {
        Kind::AllReduce(ReduceOp::Sum) | Kind::ReduceScatter(ReduceOp::Sum) => vec![each.sum()],
        Kind::AllReduce(_) | Kind::ReduceScatter(_) => vec![each.fold(f64::MIN, f64::max)],
        Kind::AllGather | Kind::AllToAll => each.collect(),
        Kind::Broadcast => vec![value(group.ranks()[0], step.len)],
    };
    let got: Vec<Vec<f64>> = results.iter().map(Tensor::to_f64_vec).collect();
    assert_eq!(got, want.into_iter().map(|v| vec![v; step.len]).collect::<Vec<_>>(), "{step:?} on {group}");
}
