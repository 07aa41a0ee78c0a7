//! Ranks that call the groups they share in different orders.

use std::time::Duration;

use isoshard::CommFault;
use isoshard::comm::{Group, Rank, Spmd};
use isoshard::tensor::{DType, ReduceOp, Shape, Tensor};
use isoshard::{Error, Result};

use super::program::repeated;

const DEADLINE: Duration = Duration::from_millis(300);

fn sum(group: &Group) -> Result<()> {
    group.all_reduce(&Tensor::zeros(DType::F32, [3]), ReduceOp::Sum).map(drop)
}

fn gather(group: &Group) -> Result<()> {
    let shapes = vec![Shape::from([2]); group.len()];
    group.all_gather(&Tensor::zeros(DType::F32, [2]), &shapes).map(drop)
}

/// Returns the fault of each rank.
fn faults(world: usize, f: impl Fn(&Rank) -> Result<()> + Send + Sync + 'static) -> Vec<CommFault> {
    let run = Spmd::new(world).deadline(DEADLINE).on_slow(|_| ());
    let faults = run.run(move |rank| match f(&rank).unwrap_err() {
        Error::Comm(fault) => Ok(*fault),
        other => Err(other),
    });
    faults.unwrap()
}

/// Two of the ranks call two groups in different orders, after some calls that fit.
#[test]
fn two_groups_in_different_orders() {
    repeated("order", |random| {
        let world = 2 + random.below(3);
        let before = [random.below(4), random.below(4)];
        let odd = random.below(world);
        let found = faults(world, move |rank| {
            let everyone: Vec<usize> = (0..world).collect();
            let (a, b) = (rank.group(&everyone, "a")?, rank.group(&everyone, "b")?);
            (0..before[0]).try_for_each(|_| sum(&a))?;
            (0..before[1]).try_for_each(|_| gather(&b))?;
            rank.world().barrier()?;
            if rank.rank() == odd {
                gather(&b)?;
                sum(&a)
            } else {
                sum(&a)?;
                gather(&b)
            }
        });
        for (rank, fault) in found.iter().enumerate() {
            let CommFault::Cycle { id, waits, last, .. } = fault else { panic!("rank {rank}: {fault}") };
            let mut pair =
                waits.iter().map(|wait| (wait.rank, wait.waits_for, wait.id.group.as_str(), wait.id.seq));
            let (first, second) = (pair.next().unwrap(), pair.next().unwrap());
            assert_eq!(pair.next(), None, "{fault}");
            assert_eq!((first.0, first.1), (second.1, second.0), "{fault}");
            assert!([first.0, second.0].contains(&odd), "{fault}");
            for (who, _, group, seq) in [first, second] {
                let (name, n) = if who == odd { ("b", before[1]) } else { ("a", before[0]) };
                assert!(group.starts_with(name) && seq == n as u64, "{fault}");
            }
            let own = if rank == odd { "all_gather" } else { "all_reduce" };
            assert!(id.call == own || !waits.iter().any(|wait| wait.rank == rank), "{fault}");
            assert!(
                last.iter().all(|last| last.in_world.as_ref().is_some_and(|id| id.call == "barrier")),
                "{fault}"
            );
        }
    });
}

/// Each rank first calls the group that it shares with its successor, so all wait in a cycle.
#[test]
fn a_ring_of_ranks() {
    repeated("ring", |random| {
        let world = 2 + random.below(4);
        let found = faults(world, move |rank| {
            let me = rank.rank();
            let pair = |of: usize| rank.group(&[of, (of + 1) % world], &format!("pair{of}"));
            rank.world().barrier()?;
            sum(&pair(me)?)?;
            gather(&pair((me + world - 1) % world)?)
        });
        for (rank, fault) in found.iter().enumerate() {
            let CommFault::Cycle { rank: teller, waits, .. } = fault else { panic!("rank {rank}: {fault}") };
            assert_eq!((*teller, waits.len(), waits[0].rank), (rank, world, rank), "{fault}");
            assert!(waits.iter().all(|wait| wait.waits_for == (wait.rank + 1) % world), "{fault}");
        }
    });
}

/// Both ranks receive before they send.
#[test]
fn both_receive_first() {
    let found = faults(2, |rank| {
        let (g, x) = (rank.world(), Tensor::zeros(DType::F32, [1]));
        g.barrier()?;
        g.recv(1 - g.index(), DType::F32, &Shape::from([1]))?;
        g.send(&x, 1 - g.index())
    });
    assert!(matches!(&found[0], CommFault::Cycle { waits, .. } if waits.len() == 2), "{}", found[0]);
}
