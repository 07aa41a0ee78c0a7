//! Processes that the system gives too little memory: a training step, or the load of a checkpoint, ends with a named error on
//! each rank, and the process goes on.
//!
//! The tests start this program again as a child, by a shell that limits its address space or its data.

#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use isoshard::checkpoint::{self, Checkpoint, StateTree};
use isoshard::comm::{Spmd, spmd};
use isoshard::data::{Packing, TokenWidth, Tokens, TokensConfig};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::tensor::{DType, cpu};
use isoshard::{Error, Failure};

#[path = "common/baby.rs"]
mod baby;

/// Tells a child the number of its ranks.
const CHILD: &str = "ISOSHARD_STARVED_RANKS";

/// Tells the child that packs documents its token file.
const TOKENS: &str = "ISOSHARD_STARVED_TOKENS";

/// Tells the child that reads batches its token file.
const BATCHES: &str = "ISOSHARD_STARVED_BATCHES";

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
    let output = starved("child_of_many_worlds", ("-v", 10 * KIB), (WORLDS, "1"));
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{:?}\n{said}\n{complained}", output.status);
    assert!(said.contains("child: the largest world has "), "{said}");
}

/// The part of the child that packs documents; nothing if the program was not started as that child.
#[test]
fn child_of_documents() {
    let Ok(path) = std::env::var(TOKENS) else { return };
    let open = |packing| {
        // Each second token is 0, as in a file of 32-bit tokens.
        let width = Some(TokenWidth::U16);
        Tokens::open(&[&path], TokensConfig { packing, width, ..TokensConfig::new(10, 8, 4, 7) })
    };
    let Err(Error::OutOfMemory(fault)) = open(Packing::Documents { end_of_text: 0 }) else {
        panic!("there is no room for eight bytes per document")
    };
    assert_eq!(fault.wanted, "a list of documents");
    assert!(open(Packing::Windows).is_ok(), "the process goes on");
    println!("child: no room for documents");
}

/// The part of the child that reads batches; nothing if the program was not started as that child.
#[test]
fn child_of_batches() {
    let Ok(path) = std::env::var(BATCHES) else { return };
    let run = move |rank| {
        let mesh = DeviceMesh::new(&rank, &[])?;
        let open = |read_ahead| {
            Tokens::open(&[&path], TokensConfig { read_ahead, ..TokensConfig::new(10, 8, 4, 7) })
        };
        let (mut alone, mut ahead) = (open(0)?, open(1)?);
        alone.next_batch(&mesh, "()")?;
        // The rest has room for small lists, and none for a thread's stack of two mebibytes and a page.
        let mut held: Vec<Vec<u8>> = Vec::with_capacity(4096);
        for bytes in [64 << 20, 8 << 20, 1 << 20] {
            loop {
                let mut block = Vec::new();
                if block.try_reserve_exact(bytes).is_err() {
                    break;
                }
                held.push(block);
            }
        }
        held.pop();
        let refused = ahead.next_batch(&mesh, "()").map(drop);
        let read = alone.next_batch(&mesh, "()").map(drop);
        drop(held);
        let said = refused.expect_err("there is no room for a thread").to_string();
        assert!(said.starts_with("tokens: the system refuses a thread to read ahead; got "), "{said}");
        assert!(said.ends_with("; set read_ahead to 0") && read.is_ok(), "{said}, {read:?}");
        assert_eq!(ahead.position().sample, 0, "nothing moved");
        ahead.next_batch(&mesh, "()")?;
        println!("child: no thread");
        Ok(())
    };
    spmd(1, run).expect("the process goes on");
}

#[test]
fn a_refused_thread_is_an_error_of_the_batch() {
    let path = std::env::temp_dir().join(format!("isoshard-starved-batches-{}", std::process::id()));
    std::fs::write(&path, [1, 0, 2, 0, 3, 0].repeat(1000)).expect("the folder can be written");
    let output = starved("child_of_batches", ("-v", KIB), (BATCHES, &path.display().to_string()));
    std::fs::remove_file(path).expect("it was written");
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let told = format!("{:?}\n{said}\n{complained}", output.status);
    assert!(output.status.success() && said.contains("child: no thread"), "{told}");
}

/// Runs a child under a limit of the shell, such as `-v` for its address space, in KiB, with a variable.
fn starved(child: &str, (limit, kib): (&str, usize), (name, value): (&str, &str)) -> Output {
    Command::new("sh")
        .args([
            "-c",
            &format!("ulimit {limit} {kib} && exec \"$0\" {child} --exact --nocapture --test-threads=1"),
        ])
        .arg(std::env::current_exe().expect("this program"))
        .env(name, value)
        .output()
        .expect("a shell")
}

/// Fifteen million documents take more than 120 MB, beside a file of 60 MB.
#[test]
fn documents_without_memory_are_an_error_and_no_abort() {
    let path = std::env::temp_dir().join(format!("isoshard-starved-documents-{}", std::process::id()));
    std::fs::write(&path, [1, 0, 0, 0].repeat(15_000_000)).expect("the folder can be written");
    let output = starved("child_of_documents", ("-v", KIB), (TOKENS, &path.display().to_string()));
    std::fs::remove_file(path).expect("it was written");
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let told = format!("{:?}\n{said}\n{complained}", output.status);
    assert!(output.status.success() && said.contains("child: no room for documents"), "{told}");
}

#[test]
fn a_baby_gpt_in_200_mb_ends_with_an_error_that_names_what_it_lacks() {
    for limit in ["-v", "-d"] {
        for ranks in [1, 2] {
            let began = Instant::now();
            let output = starved("child", (limit, KIB), (CHILD, &ranks.to_string()));
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

/// Tells a child the folder of a checkpoint to load.
const LOADING: &str = "ISOSHARD_STARVED_CHECKPOINT";

/// The child's part in loading a checkpoint; nothing if the program was not started as a child.
#[test]
fn loading_child() {
    let Some(dir) = std::env::var_os(LOADING) else { return };
    let run = Spmd::new(2).threads_per_rank(1).deadline(Duration::from_secs(60)).on_slow(|_| ());
    let ends = run.run_each(move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let saved = Checkpoint::open(&dir)?;
        let wanted = [("x", "(R)".parse()?), ("x", "(S0)".parse()?)];
        let loaded = saved.tensors(&mesh, &wanted)?;
        let own = loaded[1].local().to_vec::<f32>()?;
        assert!(own.iter().all(|&x| x == 7.0) && loaded[0].local().numel() == 2 * own.len());
        Ok(())
    });
    // With too little room for two threads no rank runs.
    let ends = match ends {
        Err(error) => return println!("no world: {error}"),
        Ok(ends) => ends,
    };
    for end in ends {
        match end {
            Ok(()) => println!("loaded"),
            Err(Failure::Error(error)) => println!("refused: {error}"),
            Err(other) => panic!("{other:?}"),
        }
    }
}

/// Saves a tensor of 32 MiB and, as a value, a list of numbers.
fn save(dir: &Path, numbers: usize) {
    let dir = dir.to_path_buf();
    let run = move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let mut state = StateTree::new();
        state.insert("x", DTensor::full(&mesh, DType::F32, [8 << 20], "(S0)", 7.0)?)?;
        state.insert_value("numbers", vec![0; numbers])?;
        checkpoint::save(&mesh, &dir, &state)
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

/// Starts a child that loads the checkpoint, by a shell that first runs `before`. Returns its text.
fn load(dir: &Path, before: &str) -> String {
    let output = Command::new("sh")
        .args(["-c", &format!("{before} && exec \"$0\" loading_child --exact --nocapture --test-threads=1")])
        .arg(std::env::current_exe().expect("this program"))
        .env(LOADING, dir)
        .output()
        .expect("a shell");
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{before}: {:?}\n{said}\n{complained}", output.status);
    said.into_owned()
}

#[test]
fn a_load_without_memory_or_threads_is_an_error_or_goes_on() {
    let root = std::env::temp_dir().join(format!("isoshard-starved-{}", std::process::id()));
    let (tensors, values) = (root.join("tensors"), root.join("values"));
    save(&tensors, 1);
    save(&values, 2_000_000);
    let mut refused = 0;
    // Lists and shards of up to 64 MiB find no room at different places of the load.
    for kib in (80_000..320_000).step_by(20_000) {
        let said = load(&tensors, &format!("ulimit -v {kib}"));
        if said.contains("no world: spmd: ") {
            continue;
        }
        assert_eq!(said.matches("loaded").count() + said.matches("refused: ").count(), 2, "{said}");
        assert!(!said.contains("refused: ") || said.contains("memory: cpu has no room; got "), "{said}");
        refused += u32::from(said.contains("refused: "));
    }
    assert!(refused > 0, "no limit was too low");
    assert_eq!(load(&tensors, "true").matches("loaded").count(), 2);
    // The index alone: four million characters.
    let said = load(&values, "ulimit -v 300000");
    assert!(
        said.contains("memory: cpu has no room; got a list of 4") && said.contains(" characters"),
        "{said}"
    );
    assert_eq!(load(&values, "true").matches("loaded").count(), 2);
    // No thread that does not choose its stack's size can start; the ranks of a world do.
    let said = load(&tensors, "export RUST_MIN_STACK=70368744177664");
    assert_eq!(said.matches("loaded").count(), 2, "{said}");
    std::fs::remove_dir_all(root).expect("it was made here");
}
