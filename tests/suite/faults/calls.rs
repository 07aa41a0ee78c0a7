//! Ranks that make different calls than their peers.

use std::time::{Duration, Instant};

use isoshard::CommFault;
use isoshard::comm::Spmd;
use isoshard::tensor::{DType, ReduceOp};

use super::program::{End, Kind, Program, Random, Step, Turn, repeated};

const DEADLINE: Duration = Duration::from_millis(300);

/// A random program, a step of it, and a member of that step's group.
fn scene(random: &mut Random) -> (Program, usize, usize) {
    let program = Program::random(random);
    let at = random.below(program.steps.len());
    let culprit = *random.pick(&program.groups[program.steps[at].group]);
    (program, at, culprit)
}

/// Returns how all ranks end if `culprit` makes `instead` at step `at`, or skips the step if there is none.
fn ends(program: &Program, at: usize, culprit: usize, instead: Option<Step>) -> Vec<End> {
    let (start, shared) = (Instant::now(), program.clone());
    let ends = Spmd::new(program.world).deadline(DEADLINE).on_slow(|_| ()).run(move |rank| {
        shared.run(&rank, DEADLINE, |step| {
            Ok(match instead {
                _ if step != at || rank.rank() != culprit => Turn::AsPlanned,
                Some(other) => Turn::Instead(other),
                None => Turn::Skip,
            })
        })
    });
    // A rank that waits for one that has stopped only because of the first fault gets its error at once: that rank's
    // program has ended.
    assert!(start.elapsed() < DEADLINE * 4 + Duration::from_secs(5), "{:?}", start.elapsed());
    ends.unwrap()
}

/// Each member of the group names the culprit at that step. Other ranks continue as long as they need no rank that
/// has stopped.
fn assert_named(ends: &[End], program: &Program, at: usize, culprit: usize) {
    let members = &program.groups[program.steps[at].group];
    let stopped: Vec<usize> = ends.iter().filter(|end| end.fault.is_some()).map(|end| end.rank).collect();
    for End { rank, fault } in ends {
        match fault {
            Some((step, CommFault::Mismatch { rank: a, other: b, .. })) => {
                assert!(members.contains(rank) && *step == at, "{fault:?}");
                assert!([a, b].contains(&&culprit), "{fault:?}");
            }
            Some((step, CommFault::Missing { missing, ended: true, .. })) => {
                assert!(!members.contains(rank) && *step > at, "{fault:?}");
                assert!(missing.iter().all(|rank| stopped.contains(rank)), "{fault:?}");
            }
            Some(_) => panic!("{fault:?}"),
            None => assert!(!members.contains(rank), "rank {rank} noticed nothing: {ends:?}"),
        }
    }
}

fn deviates(name: &str, other: impl Fn(&mut Random, Step) -> Step) {
    repeated(name, |random| {
        let (program, at, culprit) = scene(random);
        let instead = other(random, program.steps[at]);
        let ends = ends(&program, at, culprit, Some(instead));
        assert_named(&ends, &program, at, culprit);
    });
}

#[test]
fn another_operator() {
    deviates("operator", |random, step| {
        let others = [Kind::AllReduce(ReduceOp::Sum), Kind::AllGather, Kind::AllToAll, Kind::Broadcast];
        let kind = |random: &mut Random| *random.pick(&others);
        let mut other = kind(random);
        while std::mem::discriminant(&other) == std::mem::discriminant(&step.kind) {
            other = kind(random);
        }
        Step { kind: other, ..step }
    });
}

#[test]
fn another_shape() {
    deviates("shape", |random, step| Step { len: step.len + 1 + random.below(3), ..step });
}

#[test]
fn another_dtype() {
    deviates("dtype", |random, step| {
        let others: Vec<DType> =
            [DType::F32, DType::F64, DType::BF16].into_iter().filter(|d| *d != step.dtype).collect();
        Step { dtype: *random.pick(&others), ..step }
    });
}

#[test]
fn another_reduction() {
    repeated("reduction", |random| {
        let (mut program, at, culprit) = scene(random);
        let (kind, other) = *random.pick(&[
            (Kind::AllReduce(ReduceOp::Sum), Kind::AllReduce(ReduceOp::Max)),
            (Kind::ReduceScatter(ReduceOp::Sum), Kind::ReduceScatter(ReduceOp::Max)),
        ]);
        program.steps[at].kind = kind;
        let ends = ends(&program, at, culprit, Some(Step { kind: other, ..program.steps[at] }));
        assert_named(&ends, &program, at, culprit);
    });
}

/// The culprit skips a step and makes its next calls. The outcome depends on them, but every rank that is left
/// waiting names it.
#[test]
fn a_call_that_is_skipped() {
    repeated("skip", |random| {
        let (program, at, culprit) = scene(random);
        let ends = ends(&program, at, culprit, None);
        for End { rank, fault } in &ends {
            let left_alone = program.groups[program.steps[at].group].contains(rank) && *rank != culprit;
            let names_it = match fault {
                None => false,
                Some((_, CommFault::Mismatch { rank, other, .. })) => [*rank, *other].contains(&culprit),
                Some((_, CommFault::Missing { missing, .. })) => missing.contains(&culprit),
                Some((_, CommFault::Cycle { waits, .. })) => waits.iter().any(|wait| wait.rank == culprit),
                Some(_) => panic!("{fault:?}"),
            };
            let reached = fault.as_ref().is_none_or(|(step, _)| *step >= at);
            assert!(
                reached && (names_it || !left_alone || met_later(&ends, *rank, fault)),
                "{program:?}, {at}, {ends:?}"
            );
        }
    });
}

/// Returns true if a rank failed because of one that had stopped already.
fn met_later(ends: &[End], rank: usize, fault: &Option<(usize, CommFault)>) -> bool {
    let Some((_, CommFault::Missing { missing, ended: true, .. })) = fault else { return false };
    missing.iter().all(|other| *other != rank && ends.iter().any(|end| end.rank == *other))
}
