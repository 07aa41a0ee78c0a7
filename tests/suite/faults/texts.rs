//! The exact reports of every rank. This test writes them into docs/faults.md and keeps the page true.

use std::fmt::Write;
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use isoshard::comm::{Group, Rank, Spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, check_finite, check_replicas};
use isoshard::tensor::{DType, ReduceOp, Shape, Tensor};
use isoshard::{Error, MemoryFault, Result};

/// The deadline of scenes that wait for it, and of the others, which a busy machine does not disturb.
const DEADLINE: Duration = Duration::from_secs(1);
const LONG_DEADLINE: Duration = Duration::from_secs(20);
const BEGIN: &str = "<!-- tests/suite/faults/texts.rs writes the rest of this page. -->\n";

fn reduce(group: &Group, dtype: DType, len: usize, op: ReduceOp) -> Result<()> {
    group.all_reduce(&Tensor::zeros(dtype, [len]), op).map(drop)
}

fn sum(group: &Group, len: usize) -> Result<()> {
    reduce(group, DType::F32, len, ReduceOp::Sum)
}

/// A heading, a description of the fault, and the end of each of two ranks.
fn scene(out: &mut String, title: &str, what: &str, f: impl Fn(&Rank) -> Result<()> + Send + Sync + 'static) {
    scene_within(LONG_DEADLINE, out, title, what, f);
}

/// A scene of ranks that have a deadline.
fn scene_within(
    deadline: Duration,
    out: &mut String,
    title: &str,
    what: &str,
    f: impl Fn(&Rank) -> Result<()> + Send + Sync + 'static,
) {
    let ends = Spmd::new(2).deadline(deadline).on_slow(|_| ()).run_each(move |rank| f(&rank)).unwrap();
    writeln!(out, "\n### {title}\n\n{what}\n\n```text").unwrap();
    for (rank, end) in ends.iter().enumerate() {
        let text = end.as_ref().err().map_or("continues".to_string(), ToString::to_string);
        writeln!(out, "rank {rank}: {text}").unwrap();
    }
    out.push_str("```\n");
}

/// After a call that fits, each rank makes its own; a failure is returned once both ranks have it.
fn differ(rank: &Rank, own: impl Fn(&Group) -> Result<()>) -> Result<()> {
    let g = rank.group(&[0, 1], "dp")?;
    sum(&g, 4)?;
    let said = own(&g);
    // Otherwise one rank might only get the failure of the other's program.
    rank.world().barrier()?;
    said
}

fn written() -> String {
    let mut out = String::from(BEGIN);
    calls(&mut out);
    waits(&mut out);
    failures(&mut out);
    values(&mut out);
    out
}

fn calls(out: &mut String) {
    scene(out, "A rank skips a collective", "Rank 1 skips one call and makes its next one.", |rank| {
        differ(rank, |g| if rank.rank() == 0 { sum(g, 8) } else { sum(g, 16) })
    });
    scene(out, "Another collective", "Rank 1 calls another collective.", |rank| {
        differ(rank, |g| if rank.rank() == 0 { sum(g, 8) } else { g.barrier() })
    });
    scene(out, "Another shape, for an operator of tensors", "One rank's weight has another shape.", |rank| {
        let mesh = DeviceMesh::new(rank, &[("tp", 2)])?;
        let x = DTensor::zeros(&mesh, DType::F32, [4 + 4 * rank.rank(), 4], "(S0)")?;
        let said = x.transpose(0, 1)?.matmul(&x)?.full_tensor().map(drop);
        rank.world().barrier()?;
        said
    });
    scene(out, "Another dtype", "Rank 1 passes a tensor of another dtype.", |rank| {
        let dtype = [DType::F32, DType::BF16][rank.rank()];
        differ(rank, |g| reduce(g, dtype, 8, ReduceOp::Sum))
    });
    scene(out, "Another reduction", "Rank 1 asks for another reduction.", |rank| {
        let op = [ReduceOp::Sum, ReduceOp::Max][rank.rank()];
        differ(rank, |g| reduce(g, DType::F32, 8, op))
    });
}

fn waits(out: &mut String) {
    let what = "Rank 0 calls group `a` and then `b`, rank 1 `b` and then `a`.";
    scene_within(DEADLINE, out, "Two groups in different orders", what, |rank| {
        let (a, b) = (rank.group(&[0, 1], "a")?, rank.group(&[0, 1], "b")?);
        rank.world().barrier()?;
        let said = match rank.rank() {
            0 => sum(&a, 3).and_then(|()| b.barrier()),
            _ => b.barrier().and_then(|()| sum(&a, 3)),
        };
        sleep(DEADLINE / 5);
        said
    });
    let what = "Rank 1 stops, and continues after the deadline of 1.0 s.";
    scene_within(DEADLINE, out, "A rank that is late, or never comes", what, |rank| {
        let g = rank.group(&[0, 1], "dp")?;
        sum(&g, 4)?;
        sleep(DEADLINE * 2 * rank.rank() as u32);
        let said = sum(&g, 8);
        // Both end at about the same time: a rank that runs on for long is left behind.
        sleep(DEADLINE * (1 - rank.rank() as u32));
        said
    });
    let heard: Arc<Mutex<Vec<String>>> = Arc::default();
    let hears = heard.clone();
    let run = Spmd::new(2).deadline(Duration::from_secs(8)).patience(Duration::from_millis(100));
    let run = run.on_slow(move |slow| {
        let mut slow = slow.clone();
        // The time depends on the machine.
        slow.waited = Duration::from_secs(2);
        hears.lock().unwrap().push(slow.to_string());
    });
    run.run(|rank| {
        sleep(Duration::from_millis(400) * rank.rank() as u32);
        sum(&rank.world(), 4)
    })
    .unwrap();
    writeln!(out, "\n### A rank that is slow, and comes before the deadline\n").unwrap();
    writeln!(
        out,
        "All ranks continue. After a quarter of the deadline, standard error or `Spmd::on_slow` gets:\n\n```text"
    )
    .unwrap();
    writeln!(out, "{}\n```", heard.lock().unwrap().join("\n")).unwrap();
    scene(
        out,
        "A rank ends before its peers",
        "Rank 1 returns one call early. Rank 0 gets its error at once, not after the deadline.",
        |rank| {
            sum(&rank.world(), 4)?;
            if rank.rank() == 1 { Ok(()) } else { sum(&rank.world(), 8) }
        },
    );
}

fn failures(out: &mut String) {
    let what =
        "Rank 0 sends a tensor that rank 1 never receives. The report comes when all ranks have ended.";
    scene(out, "A message without a receive", what, |rank| {
        let world = rank.world();
        if rank.rank() == 0 { world.send(&Tensor::zeros(DType::F32, [8]), 1) } else { Ok(()) }
    });
    scene(out, "A panic", "Rank 1 panics between two calls.", |rank| {
        sum(&rank.world(), 4)?;
        if rank.rank() == 1 {
            std::panic::resume_unwind(Box::new("index out of bounds"));
        }
        sum(&rank.world(), 8)
    });
    scene(out, "Out of memory in a gather", "Rank 1 cannot allocate the result.", |rank| {
        if rank.rank() == 1 {
            let (device, wanted) = ("cuda:1".to_string(), "f32[4096, 4096]".to_string());
            let (wanted_bytes, live_bytes, kept_bytes, limit_bytes) = (64 << 20, 40 << 20, 0, 80 << 20);
            let fault = MemoryFault { device, wanted, wanted_bytes, live_bytes, kept_bytes, limit_bytes };
            return Err(Error::OutOfMemory(Box::new(fault)));
        }
        let shapes = vec![Shape::from([2]); 2];
        rank.world().all_gather(&Tensor::zeros(DType::F32, [2]), &shapes).map(drop)
    });
    let what =
        "Rank 1 made a call with another shape. A later call on the group returns the first fault at once.";
    scene(out, "A failed group", what, |rank| {
        let g = rank.group(&[0, 1], "dp")?;
        let said = sum(&g, 2 + rank.rank()).and(Ok(())).err();
        rank.world().barrier()?;
        said.map_or(Ok(()), |_| g.barrier())
    });
}

fn values(out: &mut String) {
    scene(
        out,
        "Replicas diverge by one bit",
        "`Params::check_replicas`, or for any tensors, `check_replicas`.",
        |rank| {
            let mesh = DeviceMesh::new(rank, &[("dp", 2)])?;
            let mut held = vec![1.0f32; 12];
            held[7] = f32::from_bits(1.0f32.to_bits() ^ rank.rank() as u32);
            let x = DTensor::from_local(&mesh, Tensor::from_vec(held, [3, 4])?, [3, 4], "(R)")?;
            let said = check_replicas(&[("h.0.mlp.weight", &x)]);
            rank.world().barrier()?;
            said
        },
    );
    scene(
        out,
        "A NaN in one shard's gradient",
        "`Params::check_gradients`, or for any tensors, `check_finite`.",
        |rank| {
            let mesh = DeviceMesh::new(rank, &[("fsdp", 2)])?;
            let mut held = vec![0.5f32; 8];
            held[6] = if rank.rank() == 1 { f32::NAN } else { 0.5 };
            let x = DTensor::from_local(&mesh, Tensor::from_vec(held, [2, 4])?, [4, 4], "(S0)")?;
            let said = check_finite(&[("h.0.mlp.weight", &x)], 120);
            rank.world().barrier()?;
            said
        },
    );
}

/// With `ISOSHARD_WRITE_DOCS=1` the test writes the page.
#[test]
fn the_page_says_what_ranks_report() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/faults.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (head, said) = page.split_once(BEGIN).expect("the page has the mark");
    let (said, want) = (format!("{BEGIN}{said}"), written());
    if std::env::var_os("ISOSHARD_WRITE_DOCS").is_some() {
        std::fs::write(path, format!("{head}{want}")).unwrap();
        return;
    }
    for (said, want) in said.lines().zip(want.lines()) {
        assert_eq!(said, want, "docs/faults.md");
    }
    assert_eq!(said.len(), want.len(), "docs/faults.md");
}
