//! Errors at the deadline follow the waits of ranks to the one that is really missing.

use std::panic::resume_unwind;
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread::{self, sleep};
use std::time::Duration;

use isoshard::comm::{Group, Rank, Spmd, Tally};
use isoshard::tensor::{DType, ReduceOp, Tensor};
use isoshard::testing::{Equivalence, RankFault, Trial};
use isoshard::{CommFault, Error, Failure, Result};

fn sum(group: &Group) -> Result<()> {
    group.all_reduce(&Tensor::zeros(DType::F32, [3]), ReduceOp::Sum).map(drop)
}

/// Returns the groups `{0, 1}`, `{1, 2}`, ... that the rank is in.
fn pairs(rank: &Rank) -> Result<[Option<Group>; 2]> {
    let (me, last) = (rank.rank(), rank.world_len() - 1);
    let pair = |of: usize| rank.group(&[of, of + 1], &format!("pair{of}"));
    let before = (me > 0).then(|| pair(me - 1)).transpose()?;
    Ok([(me < last).then(|| pair(me)).transpose()?, before])
}

fn missing(end: &Result<(), Failure>) -> (&CommFault, &[usize]) {
    let Err(Failure::Error(Error::Comm(fault))) = end else { panic!("{end:?}") };
    let CommFault::Missing { missing, .. } = &**fault else { panic!("{fault}") };
    (fault, missing)
}

/// Rank 0 waits for rank 1, that one later for rank 2, and so on; the last rank stalls. The deadline of rank 0 ends first.
#[test]
fn the_first_rank_to_give_up_names_the_last_of_a_chain() {
    const DEADLINE: Duration = Duration::from_millis(400);
    for world in [3, 4] {
        let met = Arc::new(Barrier::new(world));
        let ends = Spmd::new(world).deadline(DEADLINE).on_slow(|_| ()).run_each(move |rank| {
            let [next, _] = pairs(&rank)?;
            rank.world().barrier()?;
            met.wait();
            sleep(DEADLINE / 8 * rank.rank() as u32);
            match next {
                Some(next) => sum(&next),
                None => {
                    sleep(DEADLINE * 3 / 2);
                    rank.world().barrier()
                }
            }
        });
        let ends = ends.unwrap();
        let (fault, missing) = missing(&ends[0]);
        assert_eq!(missing, [world - 1], "{fault}");
        let CommFault::Missing { elsewhere, .. } = fault else { panic!("{fault}") };
        let waits: Vec<(usize, usize)> = elsewhere.iter().map(|wait| (wait.rank, wait.waits_for)).collect();
        let last = (world - 2, world - 1);
        assert_eq!(waits, if world == 3 { vec![last] } else { vec![last, (1, 2)] }, "{fault}");
        for end in &ends[1..] {
            let Err(Failure::Error(error)) = end else { panic!("{end:?}") };
            assert!(error.to_string().contains(&format!("rank(s) [{}]", world - 1)), "{error}");
        }
    }
}

/// A rank that has got its error, but has not ended yet, is not the cause.
#[test]
fn a_rank_that_has_given_up_leads_to_the_cause() {
    const DEADLINE: Duration = Duration::from_millis(400);
    let ends = Spmd::new(3).deadline(DEADLINE).on_slow(|_| ()).run_each(move |rank| {
        let [next, before] = pairs(&rank)?;
        rank.world().barrier()?;
        match rank.rank() {
            0 => {
                // Waits for rank 1 until after that one's error.
                sleep(DEADLINE / 2);
                sum(&next.expect("a next rank"))
            }
            1 => {
                let error = sum(&next.expect("a next rank"));
                sleep(DEADLINE);
                error.and_then(|()| sum(&before.expect("a rank before")))
            }
            _ => {
                sleep(DEADLINE * 3);
                rank.world().barrier()
            }
        }
    });
    let ends = ends.unwrap();
    assert_eq!(missing(&ends[1]).1, [2]);
    let (fault, missing) = missing(&ends[0]);
    assert_eq!(missing, [2], "{fault}");
    assert!(
        fault.to_string().contains("; rank 1 waited in all_reduce #0 on group pair1{1, 2} for rank 2"),
        "{fault}"
    );
}

/// A slow rank is reported by all as the slow one, also by those that wait for it through others.
#[test]
fn reports_of_slow_ranks_name_the_last_of_a_chain() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hears = heard.clone();
    let spmd = Spmd::new(3).deadline(Duration::from_secs(20)).patience(Duration::from_millis(100));
    let ends = spmd.on_slow(move |slow| hears.lock().unwrap().push(slow.clone())).run(|rank| {
        let [next, before] = pairs(&rank)?;
        rank.world().barrier()?;
        if rank.rank() == 2 {
            sleep(Duration::from_millis(600));
        }
        next.as_ref().map_or(Ok(()), sum)?;
        before.as_ref().map_or(Ok(()), sum)
    });
    ends.unwrap();
    let heard = std::mem::take(&mut *heard.lock().unwrap());
    let first = heard.iter().find(|slow| slow.rank == 0).expect("rank 0 waits for long");
    assert_eq!(first.waits_for, [2], "{first}");
}

/// Meshes, and the axes along which a program's calls go.
const MESHES: [(&str, &[&str]); 4] = [
    ("dp=2,tp=2", &["dp", "tp"]),
    ("dp=2,tp=3", &["dp", "tp"]),
    ("dp=3,tp=2", &["tp", "dp"]),
    ("dp=2,cp=2,tp=2", &["dp", "cp", "tp"]),
];

/// Makes calls in the rows and the columns of a mesh.
fn rows_and_columns(trial: &Trial, axes: &[&str]) -> Result<()> {
    (0..2).try_for_each(|_| axes.iter().try_for_each(|axis| sum(&trial.group_along(&[*axis])?)))
}

/// `ISOSHARD_STALLS` sets the number of runs in which a rank stalls: 50, and 2,000 in `tests/complete.sh`. The deadline is
/// short, so that those of several ranks end at about the same time.
#[test]
fn a_rank_that_stalls_on_a_mesh_is_named_by_all() {
    let runs = std::env::var("ISOSHARD_STALLS").map_or(50, |text| text.parse().expect("a number of runs"));
    let next = Mutex::new(0..runs);
    let worker = || {
        loop {
            let Some(run) = next.lock().unwrap_or_else(PoisonError::into_inner).next() else { break };
            let (mesh, axes) = MESHES[run % MESHES.len()];
            // Starting threads is not part of a deadline.
            let met = Barrier::new(mesh.split(['=', ',']).filter_map(|n| n.parse::<usize>().ok()).product());
            let check = Equivalence::new(move |trial| {
                met.wait();
                rows_and_columns(trial, axes)
            });
            let check = check.meshes([mesh]).seed(run as u64).deadline(Duration::from_millis(90));
            let runs = check.with_fault(run / MESHES.len() % 4, None);
            assert!(runs.iter().any(|run| run.fault == RankFault::Stalls));
        }
    };
    // Ranks sleep most of the time.
    thread::scope(|scope| {
        let all: Vec<_> = (0..4).map(|_| scope.spawn(worker)).collect();
        all.into_iter().for_each(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic)));
    });
}

/// A rank over an engine that counts calls keeps its record, so that errors tell what was completed.
#[test]
fn a_counted_rank_has_the_record_of_its_rank() {
    let ends = Spmd::new(2).run_each(|rank| {
        let (counted, _tally) = Tally::of(&rank)?;
        let world = counted.world();
        (0..3).try_for_each(|_| sum(&world))?;
        if rank.rank() == 0 { sum(&world) } else { Ok(()) }
    });
    let ends = ends.unwrap();
    let (fault, missing) = missing(&ends[0]);
    assert_eq!(missing, [1]);
    assert!(fault.to_string().ends_with("; last completed: rank(s) [0, 1] all_reduce #2"), "{fault}");
}

/// Calls that were started and not waited for are not completed.
#[test]
fn calls_that_were_only_started_are_told_as_such() {
    let ends = Spmd::new(2).run_each(|rank| {
        let world = rank.world();
        let started: Vec<_> = (0..79).map(|_| world.barrier_async()).collect();
        let last = if rank.rank() == 0 { sum(&world) } else { world.barrier() };
        drop(started);
        last
    });
    for end in ends.unwrap() {
        let Err(Failure::Error(error)) = end else { panic!("{end:?}") };
        assert!(
            error
                .to_string()
                .contains("last completed: rank(s) [0, 1] none of the 79 call(s) before on the group"),
            "{error}"
        );
    }
}

/// A message that its receiver never asks for is told when all ranks have ended, by its sender.
#[test]
fn a_message_without_a_receive_is_told_by_its_sender() {
    let ends = Spmd::new(3).run_each(|rank| {
        let pair = rank.group(&[2, 0, 1], "g")?;
        let x = Tensor::zeros(DType::F32, [8]);
        match rank.rank() {
            // From member 1 to member 0; one of two messages is received, and a receive is dropped.
            0 => (0..2).try_for_each(|_| pair.send(&x, 0)),
            2 => pair.recv(1, DType::F32, x.shape()).map(drop),
            _ => {
                drop(pair.recv_async(0, DType::F32, x.shape()));
                Ok(())
            }
        }
    });
    let ends = ends.unwrap();
    assert!(ends[1].is_ok() && ends[2].is_ok(), "{ends:?}");
    let Err(Failure::Error(Error::Comm(fault))) = &ends[0] else { panic!("{ends:?}") };
    assert_eq!(
        fault.to_string(),
        "send #1 on group g{2, 0, 1}: rank 0 brought send f32[8], and rank 2 ended without receiving it; every message needs \
         a receive"
    );
    assert!(matches!(&**fault, CommFault::Unreceived { rank: 0, receiver: 2, .. }));
    // A rank may send itself a message, too.
    let alone = Spmd::new(1).run(|rank| rank.world().send(&Tensor::zeros(DType::F32, [2]), 0));
    assert!(alone.unwrap_err().to_string().contains("rank 0 ended without receiving it"));
}
