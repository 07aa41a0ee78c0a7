//! The MPI engine under `mpirun`: the reports of ranks if one of them deviates, messages in pieces, and refused
//! processes. The suite's modules `comm`, `fsdp_order`, `redistribute` and `train` are built here once more: `.ci/run` runs them on
//! processes (`common::ranks`), which shows that results are the same.
//!
//! Each test starts `mpirun` on this same program, whose test `child` is then one rank.

mod child;
#[path = "../suite/comm.rs"]
mod comm;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "the suite uses the rest")]
mod common;
#[path = "../suite/fsdp_order.rs"]
mod fsdp_order;
mod mpirun;
#[path = "../suite/redistribute.rs"]
mod redistribute;
#[path = "../suite/train.rs"]
mod train;

use std::thread;
use std::time::Duration;

use mpirun::{Job, one_line_each};

/// Ranks whose first calls differ, and both calls as the error shows them.
const DIFFERENT: [(&str, &str); 4] = [
    ("operator", "barrier"),
    ("shape", "all_reduce(sum) f32[5]"),
    ("dtype", "all_reduce(sum) f64[4]"),
    ("reduction", "all_reduce(max) f32[4]"),
];

#[test]
fn child() {
    child::run_if_asked();
}

#[test]
fn what_nobody_disturbs_ends_well() {
    let Some(run) = Job::new(3, "well").patient(20).run() else { return };
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(one_line_each(&run, 3), ["well"; 3]);
}

/// MPI writes shards where they are read, and reads gradients where they were computed.
#[test]
fn units_are_gathered_and_reduced_in_place() {
    for ranks in [2, 4] {
        let Some(run) = Job::new(ranks, "in_place").patient(20).run() else { return };
        assert_eq!(one_line_each(&run, ranks), vec!["well"; ranks]);
    }
}

#[test]
fn calls_that_do_not_fit_the_group_are_refused() {
    let Some(run) = Job::new(2, "misfits").patient(20).run() else { return };
    assert_eq!(one_line_each(&run, 2), ["well"; 2]);
}

#[test]
fn calls_that_differ_are_named_on_all() {
    for (kind, brought) in DIFFERENT {
        for culprit in [0, 2] {
            let Some(run) = Job::new(3, kind).culprit(culprit, 0).run() else { return };
            let lines = one_line_each(&run, 3);
            let (low, high) = if culprit == 0 { (0, "1|2") } else { (0, "2") };
            let [theirs, ours] = ["all_reduce(sum) f32[4]", brought];
            let (first, second) = if culprit == 0 { (ours, theirs) } else { (theirs, ours) };
            let fits = |line: &String| {
                high.split('|').any(|high| {
                    line.ends_with(&format!(
                        "on group world{{0, 1, 2}}: rank {high} brought {second}, rank {low} brought {first}; every rank \
                         must make the same calls in the same order; last completed: rank(s) [0, 1, 2] nothing"
                    ))
                }) || line.contains(&format!("rank 2 brought {ours}, rank 1 brought {theirs}"))
            };
            assert!(lines.iter().all(fits), "{kind} by {culprit}: {lines:?}");
            assert_eq!((&lines[0], &lines[1]), (&lines[1], &lines[2]));
        }
    }
}

/// Any rank may deviate in any of several calls: all ranks end soon and report the same.
#[test]
fn faults_at_random() {
    let kinds = ["operator", "shape", "dtype", "reduction", "skip", "error", "panic"];
    let mut random = 7u64;
    let jobs = (0..50).map(|k| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = (random >> 33) as usize;
        (kinds[k % kinds.len()], bits % 3, (bits >> 8) % 6)
    });
    let jobs: Vec<(&str, usize, usize)> = jobs.collect();
    // Two jobs at a time, because they mostly wait.
    let (first, second) = jobs.split_at(25);
    thread::scope(|scope| {
        for half in [first, second] {
            scope.spawn(|| ends_soon_and_alike(half));
        }
    });
}

/// Runs jobs of a kind, a rank that deviates, and the call in which it does.
fn ends_soon_and_alike(jobs: &[(&str, usize, usize)]) {
    for &(kind, culprit, at) in jobs {
        let Some(run) = Job::new(3, kind).culprit(culprit, at).run() else { return };
        let lines = one_line_each(&run, 3);
        assert!(run.took < Duration::from_secs(15), "{kind} took {:?}", run.took);
        for (rank, line) in lines.iter().enumerate() {
            let cause = if kind == "error" { "step: went wrong" } else { "panicked: boom" };
            match kind {
                "error" | "panic" if rank == culprit => assert_eq!(line, cause),
                "error" | "panic" => assert!(
                    line.ends_with(&format!("given up, because rank {culprit} failed: {cause}")),
                    "{kind} by {culprit} at {at}: {lines:?}"
                ),
                _ => {
                    assert_eq!(*line, lines[0], "{kind} by {culprit} at {at}");
                    let named = format!("rank {culprit} brought");
                    let ended = format!("rank(s) [{culprit}] had ended");
                    assert!(
                        line.contains(&named) || line.contains(&ended),
                        "{kind} by {culprit} at {at}: {line}"
                    );
                }
            }
        }
    }
}

#[test]
fn who_stays_away_is_named_after_the_deadline() {
    for culprit in [0, 1] {
        let Some(run) = Job::new(3, "late").culprit(culprit, 2).recovering().run() else { return };
        for line in one_line_each(&run, 3) {
            let want =
                format!("#2 on group world{{0, 1, 2}}: rank(s) [{culprit}] did not come within 1.0 s; rank");
            assert!(line.contains(&want), "{line}");
        }
    }
}

#[test]
fn groups_in_another_order_are_a_circle_at_the_deadline() {
    let Some(run) = Job::new(2, "crossed").culprit(1, 0).run() else { return };
    for line in one_line_each(&run, 2) {
        let circle = "on group b{0, 1}: ranks wait for each other in a cycle: rank 1 waits in barrier #0 on group b{0, 1} for \
                      rank 0, which waits in barrier #0 on group a{0, 1} for rank 1;";
        let told_by_0 = "on group a{0, 1}: ranks wait for each other in a cycle: rank 0 waits in barrier #0 on group a{0, 1} for \
                         rank 1, which waits in barrier #0 on group b{0, 1} for rank 0;";
        assert!(line.contains(circle) || line.contains(told_by_0), "{line}");
    }
}

/// A killed process reports nothing: its connection ends, and the other ranks report that before the deadline.
#[test]
fn a_killed_process_is_named_by_the_others() {
    for culprit in [0, 2] {
        let Some(run) = Job::new(3, "killed").culprit(culprit, 3).recovering().run() else { return };
        assert!(run.took < Duration::from_secs(15), "{run:?}");
        for (rank, lines) in run.lines.iter().enumerate() {
            match &lines[..] {
                [] => assert_eq!(rank, culprit, "{run:?}"),
                [line] => assert!(
                    line.ends_with(&format!(
                        "given up, because rank {culprit} failed: its process ended without a word"
                    )),
                    "{line}"
                ),
                _ => panic!("{run:?}"),
            }
        }
    }
}

/// A rank that announces its work is waited for beyond the deadline, by ranks that wait for it through others too.
#[test]
fn a_busy_rank_is_waited_for() {
    let jobs = [("busy", 0, "1"), ("busy", 2, "1"), ("busy", 1, "0"), ("chain", 0, "1"), ("chain", 0, "0")];
    // All at a time, because they wait.
    thread::scope(|scope| {
        for (program, culprit, compared) in jobs {
            scope.spawn(move || {
                let job = Job::new(3, program).culprit(culprit, 2).with("ISOSHARD_CHILD_COMPARED", compared);
                let Some(run) = job.patient(5).run() else { return };
                assert_eq!(one_line_each(&run, 3), ["well"; 3], "{program} of rank {culprit}: {run:?}");
                assert!(run.took >= Duration::from_secs(10), "{run:?}");
            });
        }
    });
}

#[test]
fn a_rank_that_is_busy_beyond_its_limit_is_named_with_its_work() {
    for culprit in [0, 1] {
        let Some(run) = Job::new(3, "busy_limit").culprit(culprit, 2).recovering().run() else { return };
        for line in one_line_each(&run, 3) {
            let late = format!("rank(s) [{culprit}] did not come within 1.0 s; rank");
            let busy = format!("; rank {culprit} is busy with \"saving\" for 1.");
            assert!(line.contains(&late) && line.contains(&busy), "{line}");
            assert!(line.contains(" s, longer than its limit of 0.5 s; last completed"), "{line}");
        }
    }
}

#[test]
fn a_busy_process_that_is_killed_is_named_at_once() {
    for culprit in [0, 2] {
        let Some(run) = Job::new(3, "busy_killed").culprit(culprit, 3).recovering().run() else { return };
        assert!(run.took < Duration::from_secs(15), "{run:?}");
        for rank in (0..3).filter(|&rank| rank != culprit) {
            let [line] = &run.lines[rank][..] else { panic!("{run:?}") };
            let cause = format!("because rank {culprit} failed: its process ended without a word");
            assert!(line.ends_with(&cause), "{line}");
        }
    }
}

/// Without recovery the launcher ends the other ranks: some may still name the killed one, none hangs.
#[test]
fn a_killed_process_ends_the_job() {
    let Some(run) = Job::new(3, "killed").culprit(1, 3).run() else { return };
    assert!(run.took < Duration::from_secs(15) && run.code != Some(0), "{run:?}");
    let without_a_word = |line: &String| line.ends_with("rank 1 failed: its process ended without a word");
    assert!(run.lines.iter().flatten().all(without_a_word), "{run:?}");
}

#[test]
fn a_process_that_is_stopped_for_a_while_disturbs_nobody() {
    for culprit in [0, 1] {
        let job = Job::new(3, "stopped").culprit(culprit, 2).with("ISOSHARD_CHILD_STOP_S", "0.4");
        let Some(run) = job.patient(5).run() else { return };
        assert_eq!(one_line_each(&run, 3), ["well"; 3], "{run:?}");
    }
}

/// A rank that is stopped beyond the deadline is named by the others, and reports the same when it continues.
#[test]
fn a_process_that_is_stopped_for_long_is_named() {
    for culprit in [0, 1] {
        let job = Job::new(3, "stopped").culprit(culprit, 2).with("ISOSHARD_CHILD_STOP_S", "4").recovering();
        let Some(run) = job.run() else { return };
        let lines = one_line_each(&run, 3);
        let want = format!("rank(s) [{culprit}] did not come within 1.0 s");
        for (rank, line) in lines.iter().enumerate().filter(|(rank, _)| *rank != culprit) {
            assert!(line.contains("#2 on group") && line.contains(&want), "rank {rank}: {lines:?}");
        }
        assert_ne!(lines[culprit], "well");
    }
}

/// Without comparison, calls that differ do not mix: they end at the deadline.
#[test]
fn nothing_mixes_where_nothing_is_compared() {
    let Some(run) = Job::new(2, "dtype").culprit(1, 0).with("ISOSHARD_CHILD_COMPARED", "0").run() else {
        return;
    };
    for line in one_line_each(&run, 2) {
        assert!(line.contains("not finished within 1.0 s") && line.contains("are not compared"), "{line}");
    }
}

#[test]
fn large_messages_go_in_pieces() {
    for piece in ["97", "4096"] {
        let job = Job::new(3, "exchanges").with("ISOSHARD_MPI_PIECE_BYTES", piece);
        let Some(run) = job.patient(20).run() else { return };
        assert_eq!(one_line_each(&run, 3), ["well"; 3], "{run:?}");
    }
    let Some(run) = Job::new(2, "well").with("ISOSHARD_MPI_PIECE_BYTES", "0").run() else { return };
    assert!(
        one_line_each(&run, 2)[0].starts_with("mpi: the size of a piece is out of range; got"),
        "{run:?}"
    );
}

#[test]
fn who_may_not_take_part_is_refused() {
    // The launcher's variables do not belong to this MPI.
    let torchrun = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];
    let Some(run) = Job::new(0, "well").and(&torchrun).run() else { return };
    let line = &run.lines[1][0];
    assert!(line.starts_with("mpi: the launcher and MPI say different things; got rank 1 of 2"), "{line}");
    assert!(line.contains("; rank 0 of 1 by "), "{line}");
    let Some(run) = Job::new(2, "twice").run() else { return };
    for line in one_line_each(&run, 2) {
        assert!(line.starts_with("mpi: MPI starts only once in a process"), "{line}");
    }
    let Some(run) = Job::new(1, "cuda").run() else { return };
    assert!(
        one_line_each(&run, 1)[0]
            .starts_with("mpi: MPI moves tensors in the CPU's memory only; got a rank on cuda:0")
    );
}
