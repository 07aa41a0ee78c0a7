//! Ranks that continue after others have failed.

use std::thread::sleep;
use std::time::Duration;

use isoshard::comm::{Group, Rank, Spmd};
use isoshard::tensor::{DType, ReduceOp, Shape, Tensor};
use isoshard::{Error, Failure, Result};

use super::program::repeated;

/// Returns the sum and the gathered numbers of a group's ranks.
fn works(group: &Group) -> Result<()> {
    let me = group.rank() as i64;
    let sum = group.all_reduce(&Tensor::scalar(me), ReduceOp::Sum)?.item()?;
    assert_eq!(sum, group.ranks().iter().sum::<usize>() as f64);
    let shapes = vec![Shape::from([1]); group.len()];
    let all = group.all_gather(&Tensor::full(DType::I64, [1], me as f64), &shapes)?;
    let all: Vec<f64> = all.iter().flat_map(|x| x.to_f64_vec()).collect();
    assert_eq!(all, group.ranks().iter().map(|&rank| rank as f64).collect::<Vec<_>>());
    Ok(())
}

/// After a failure, makes a group of the remaining ranks and groups of parts of them, also with old names.
fn goes_on(rank: &Rank, name: &str) -> Result<Vec<usize>> {
    let rest = rank.survivors(name)?;
    works(&rest)?;
    let first = &rest.ranks()[..rest.len().div_ceil(2)];
    if first.contains(&rank.rank()) {
        (0..3).try_for_each(|_| works(&rank.group(first, "dp")?))?;
    }
    works(&rank.group(rest.ranks(), "dp")?)?;
    rest.barrier()?;
    Ok(rest.ranks().to_vec())
}

#[derive(Clone, Copy, Debug)]
enum End {
    Panics,
    Fails,
    Returns,
    IsLate,
}

#[test]
fn three_of_four_go_on() {
    const DEADLINE: Duration = Duration::from_millis(300);
    repeated("survivors", |random| {
        let culprit = random.below(4);
        let after = random.below(5);
        let end = *random.pick(&[End::Panics, End::Fails, End::Returns, End::IsLate]);
        println!("rank {culprit} {end:?} after {after} calls");
        let ends = Spmd::new(4).deadline(DEADLINE).on_slow(|_| ()).run_each(move |rank| {
            let (g, me) = (rank.group(&[0, 1, 2, 3], "dp")?, rank.rank());
            (0..after).try_for_each(|_| works(&g))?;
            if me == culprit {
                match end {
                    End::Panics => std::panic::resume_unwind(Box::new("out of luck")),
                    End::Fails => return Err(Error::invalid("step", "went wrong", "", "")),
                    End::Returns => return Ok(vec![]),
                    End::IsLate => sleep(DEADLINE * 4),
                }
                return goes_on(&rank, "rest");
            }
            let held = Tensor::full(DType::F32, [5], me as f64);
            works(&g).expect_err("a rank is missing");
            let rest = goes_on(&rank, "rest")?;
            works(&g).expect_err("the old group stays failed");
            assert_eq!(held.to_f64_vec(), [me as f64; 5]);
            Ok(rest)
        });
        let ends = ends.unwrap();
        let left: Vec<usize> = (0..4).filter(|rank| *rank != culprit).collect();
        left.iter().for_each(|&rank| assert_eq!(ends[rank].as_ref(), Ok(&left), "rank {rank}"));
        match (end, &ends[culprit]) {
            (End::Panics, Err(Failure::Panic(_)))
            | (End::Fails, Err(Failure::Error(_)))
            | (End::Returns, Ok(_)) => {}
            (End::IsLate, Err(Failure::Error(e))) => assert_eq!(
                e.to_string(),
                format!(
                    "survivors: the other ranks have continued without this rank; got rank {culprit}, which asked \
                     too late to join {left:?}; end the program of this rank"
                )
            ),
            other => panic!("{other:?}"),
        }
    });
}

/// A mismatch fails only its group: the same ranks can continue, since none has failed; and again after a second
/// failure.
#[test]
fn all_survive_a_mismatch_and_two_a_second_failure() {
    let ends = Spmd::new(3).deadline(Duration::from_secs(20)).run_each(|rank| {
        let (g, me) = (rank.group(&[0, 1, 2], "dp")?, rank.rank());
        g.all_reduce(&Tensor::zeros(DType::F32, [2 + me / 2]), ReduceOp::Sum).unwrap_err();
        works(&rank.world())?;
        assert_eq!(goes_on(&rank, "all")?, [0, 1, 2]);
        if me == 0 {
            return Err(Error::invalid("step", "went wrong", "", ""));
        }
        let dp = rank.group(&[0, 1, 2], "dp")?;
        let said = works(&dp).unwrap_err().to_string();
        assert!(said.contains("given up, because rank 0 failed: step: went wrong"), "{said}");
        goes_on(&rank, "two")
    });
    let ends = ends.unwrap();
    assert!(ends[0].is_err());
    assert_eq!([&ends[1], &ends[2]], [&Ok(vec![1, 2]); 2]);
}

/// A world whose remaining ranks continue is not ended at the deadline after the failure.
#[test]
fn survivors_have_all_the_time_they_want() {
    let deadline = Duration::from_millis(100);
    let ends = Spmd::new(3).deadline(deadline).on_slow(|_| ()).run_each(move |rank| {
        if rank.rank() == 0 {
            return Err(Error::invalid("step", "went wrong", "", ""));
        }
        rank.world().barrier().unwrap_err();
        let rest = rank.survivors("rest")?;
        sleep(deadline * 5);
        works(&rest)
    });
    assert_eq!(ends.unwrap()[1..], [Ok(()), Ok(())]);
}
