//! Processes that the system gives too little memory: a training step ends with a named error on each rank, and the process goes
//! on.
//!
//! The tests start this program again as a child, by a shell that limits its address space or its data.

#![cfg(target_os = "linux")]

use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use isoshard::comm::Spmd;
use isoshard::tensor::cpu;
use isoshard::{Error, Failure};

#[path = "common/baby.rs"]
mod baby;

/// Tells a child the number of its ranks.
const CHILD: &str = "ISOSHARD_STARVED_RANKS";

/// The memory of a child, in units of 1024 bytes: 200 MB.
const KIB: usize = 195_312;

/// The child's part; nothing if the program was not started as a child.
#[test]
fn child() {
    let Ok(ranks) = std::env::var(CHILD) else { return };
    let ranks: usize = ranks.parse().expect("a number");
    assert_eq!(cpu::memory_bytes(), Some(KIB * 1024), "the limit is seen");
    // No limit of tensors is set: the system refuses.
    let spmd = Spmd::new(ranks).threads_per_rank(1).deadline(Duration::from_secs(60)).on_slow(|_| ());
    let ends = spmd.run_each(|rank| baby::step(&rank)).expect("the world begins");
    let mut lacking = 0;
    for end in ends {
        let Err(Failure::Error(error)) = end else { panic!("{end:?}") };
        println!("{error}");
        match &error {
            Error::OutOfMemory(fault) => {
                lacking += 1;
                assert!(fault.wanted_bytes > 0 && fault.live_bytes > 0, "{fault:?}");
                assert!(
                    fault.wanted_bytes + fault.live_bytes + fault.kept_bytes < 2 * KIB * 1024,
                    "{fault:?}"
                );
                assert_eq!(fault.limit_bytes, usize::MAX, "{fault:?}");
                let is_named = fault.wanted.contains('[') || fault.wanted.starts_with("a list of ");
                assert!(is_named && fault.device == "cpu", "{fault:?}");
            }
            error => assert!(error.is_echo(), "{error}"),
        }
    }
    assert!(lacking > 0);
    // The memory has come back.
    let sums = Spmd::new(ranks).run(|rank| Ok(rank.rank())).expect("a second world");
    println!("child: {lacking} of {} lack memory", sums.len());
}

/// Tells a child to start worlds of many sizes.
const WORLDS: &str = "ISOSHARD_STARVED_WORLDS";

/// Starts worlds in 2 GB of address space; the allocator reserves a part of it per thread. Small worlds run, and larger ones are
/// refused, before a rank runs. Does nothing unless the program was started as a child.
#[test]
fn child_of_many_worlds() {
    if std::env::var_os(WORLDS).is_none() {
        return;
    }
    let (mut largest, mut refused) = (0, 0);
    let sizes = (1..=40).chain([100, 150, 200, 250, 300, 1000, 1025, 20_000, 65_536, 65_537, usize::MAX]);
    for ranks in sizes {
        let ran = Arc::new(AtomicUsize::new(0));
        let counted = ran.clone();
        let spmd = Spmd::new(ranks).threads_per_rank(1).deadline(Duration::from_secs(60)).on_slow(|_| ());
        let sums = spmd.run(move |rank| {
            counted.fetch_add(1, Ordering::Relaxed);
            rank.world().barrier()
        });
        match sums {
            Ok(all) => {
                assert_eq!(all.len(), ranks);
                largest = ranks;
            }
            Err(error) => {
                let told = error.to_string();
                assert!(told.starts_with("spmd: ") && told.contains(&ranks.to_string()), "{told}");
                assert_eq!(ran.load(Ordering::Relaxed), 0, "{told}");
                println!("{told}");
                refused += 1;
            }
        }
    }
    println!("child: the largest world has {largest} ranks, {refused} were refused");
    assert!((2..300).contains(&largest) && refused >= 7);
}

#[test]
fn worlds_that_are_too_large_are_refused_and_end_no_process() {
    let output = Command::new("sh")
        .args([
            "-c",
            &format!(
                "ulimit -v {} && exec \"$0\" child_of_many_worlds --exact --nocapture --test-threads=1",
                10 * KIB
            ),
        ])
        .arg(std::env::current_exe().expect("this program"))
        .env(WORLDS, "1")
        .output()
        .expect("a shell");
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{:?}\n{said}\n{complained}", output.status);
    assert!(said.contains("child: the largest world has "), "{said}");
}

/// Runs a child under a limit of the shell, such as `-v` for its address space.
fn starved(limit: &str, ranks: usize) -> Output {
    Command::new("sh")
        .args([
            "-c",
            &format!("ulimit {limit} {KIB} && exec \"$0\" child --exact --nocapture --test-threads=1"),
        ])
        .arg(std::env::current_exe().expect("this program"))
        .env(CHILD, ranks.to_string())
        .output()
        .expect("a shell")
}

#[test]
fn a_baby_gpt_in_200_mb_ends_with_an_error_that_names_what_it_lacks() {
    for limit in ["-v", "-d"] {
        for ranks in [1, 2] {
            let began = Instant::now();
            let output = starved(limit, ranks);
            let (said, complained) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            let told = format!("ulimit {limit}, {ranks} ranks: {:?}\n{said}\n{complained}", output.status);
            assert!(output.status.success(), "{told}");
            assert!(said.contains("memory: cpu has no room; got "), "{told}");
            assert!(said.contains(" bytes of live tensors, "), "{told}");
            assert!(said.contains(&format!(" of {ranks} lack memory")), "{told}");
            assert!(began.elapsed() < Duration::from_secs(300), "{told}");
            println!("{told}");
        }
    }
}
