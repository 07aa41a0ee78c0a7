//! Ranks that measured their processors differently: over NCCL they agree on one model, or are refused together.

use std::sync::Arc;

use isoshard::comm::{DryRun, Machine, Network, Rank};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::tensor::DType;
use isoshard::{CommFault, Error, Result};

use super::driver::devices;
use super::fake::Fake;
use super::{LONG, SHORT, processes, world};

/// Returns the model that a rank measured: each has the lowest of one rate.
fn measured(rank: usize) -> Machine {
    let or = |slow: bool, rate: f64| if slow { rate / 8.0 } else { rate };
    Machine {
        f64_flops_per_s: or(rank == 0, 1e12),
        f32_flops_per_s: or(rank == 1, 2e12),
        half_flops_per_s: or(rank == 2, 4e12),
        bytes_per_s: or(rank == 1, 3e11),
        // Numbers from 2^53 on are not exact as they are exchanged.
        call_memory_bytes: [None, Some((1 << 53) + 3), Some(1 << 60)][rank],
    }
}

/// Returns the layout of a call whose plan depends on the rates.
fn planned(rank: &Rank) -> Result<String> {
    let mesh = DeviceMesh::new(rank, &[("a", 3)])?;
    let x = DTensor::full(&mesh, DType::F32, [66, 65], "(RS(0..1; 66,0,0))", 0.5)?;
    Ok(x.softmax(1)?.layout().to_string())
}

fn network() -> Network {
    Network::uniform(0.0, 1e11).unwrap()
}

/// Returns the model on which ranks agree, and the layout of [`planned`].
fn agreed(rank: Rank) -> Result<(Machine, String)> {
    let mine = measured(rank.rank());
    let rank = rank.with_network(network()).with_machine(mine)?;
    Ok((rank.machine().clone(), planned(&rank)?))
}

fn check_agreed(found: Vec<(Machine, String)>) {
    let (machine, layout) = &found[0];
    assert!(found.iter().all(|other| *other == found[0]), "{found:?}");
    // By its own rates alone, the first rank would plan otherwise.
    let alone = DryRun::with_network(3, 0, network()).unwrap().with_machine(measured(0)).unwrap();
    assert_eq!([&layout[..], &planned(&alone.rank().unwrap()).unwrap()], ["(S0)", "(RS(0..1; 66,0,0))"]);
    let want = Machine {
        f64_flops_per_s: 1.25e11,
        f32_flops_per_s: 2.5e11,
        half_flops_per_s: 5e11,
        bytes_per_s: 3.75e10,
        call_memory_bytes: machine.call_memory_bytes,
    };
    assert_eq!(*machine, want);
    let limit = machine.call_memory_bytes.expect("two ranks have a limit");
    assert!(limit.abs_diff((1 << 53) + 3) <= 1, "{limit}");
}

#[test]
fn ranks_that_measured_differently_agree_on_the_lowest_rates() {
    let Some((spmd, fake)) = world(3, LONG) else { return };
    check_agreed(spmd.run(agreed).unwrap());
    assert_eq!(fake.count("abort"), 0);
}

#[test]
fn processes_that_measured_differently_agree_on_the_lowest_rates() {
    if devices().is_none() {
        return;
    }
    let fake = Arc::new(Fake::default());
    let found = processes(3, LONG, &fake, agreed);
    check_agreed(found.into_iter().map(|got| got.unwrap().unwrap()).collect());
    assert_eq!(fake.count("abort"), 0);
}

/// All ranks refuse the rates of one rank, name it, and go on with their world.
#[test]
fn wrong_rates_of_one_rank_are_refused_on_all() {
    let refused = |rank: Rank| {
        let rate = if rank.rank() == 1 { f64::INFINITY } else { 1e9 };
        let given = Machine { bytes_per_s: rate, ..Machine::default() };
        let e = rank.clone().with_machine(given).expect_err("a rate is wrong");
        rank.world().barrier()?;
        assert_eq!(*rank.with_machine(Machine::default())?.machine(), Machine::default());
        Ok(e.to_string())
    };
    let check = |texts: Vec<String>| {
        for (rank, text) in texts.iter().enumerate() {
            assert!(text.starts_with("machine: a rate is a finite number above 0"), "{text}");
            assert!(text.contains(if rank == 1 { "inf in Machine" } else { "others of rank 1" }), "{text}");
        }
    };
    let Some((spmd, _)) = world(3, LONG) else { return };
    check(spmd.run(refused).unwrap());
    let found = processes(3, LONG, &Arc::new(Fake::default()), refused);
    check(found.into_iter().map(|got| got.unwrap().unwrap()).collect());
}

/// A rank that keeps the default while others give their rates would plan by itself: all are told which call it made
/// instead.
#[test]
fn a_rank_that_gives_no_rates_is_named() {
    let Some((spmd, _)) = world(2, SHORT) else { return };
    let errors = spmd.run(|rank| {
        let made = match rank.rank() {
            0 => rank.clone().with_machine(measured(0)).map(drop),
            _ => rank.world().barrier(),
        };
        Ok(made.and_then(|()| rank.world().barrier()).unwrap_err())
    });
    for error in errors.unwrap() {
        let Error::Comm(fault) = &error else { panic!("{error}") };
        let CommFault::Mismatch { rank: 1, brought, other: 0, other_brought, .. } = &**fault else {
            panic!("{error}")
        };
        assert_eq!([&brought[..], &other_brought[..]], ["barrier", "all_gather f64[5]"]);
    }
}
