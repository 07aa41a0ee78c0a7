//! One rank of a job: it makes the same calls as the others unless it is the culprit, and prints its outcome.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use isoshard::comm::{Call, Group, Launch, Lineage, Process, Rank, Reduce, Route};
use isoshard::dtensor::DeviceMesh;
use isoshard::tensor::{DType, Device, ReduceOp, Shape, Tensor};
use isoshard::{Error, Result};

use crate::common::in_place::{HEAD_BYTES, steps_in_place};

const CALLS: usize = 6;

/// The deadline of the job: [`Job::patient`](crate::mpirun::Job::patient), or one second.
fn deadline() -> Duration {
    let seconds = var("ISOSHARD_CHILD_DEADLINE_S").map_or(1, |s| s.parse().expect("whole seconds"));
    Duration::from_secs(seconds)
}

/// Runs as a rank if a job asks for it, and ends the process.
pub fn run_if_asked() {
    let Some(program) = var("ISOSHARD_CHILD") else { return };
    let launch = Launch::from_env().unwrap().expect("a launcher");
    let rank = launch.rank();
    let mut process = Process::new(launch.clone()).mpi().deadline(deadline());
    if program == "cuda" {
        process = process.on(Device::Cuda(0));
    }
    if var("ISOSHARD_CHILD_COMPARED").is_some_and(|v| v == "0") {
        process = process.compared(false);
    }
    let life = AssertUnwindSafe(|| process.run(|rank| run(&rank, &program)));
    let mut said = match catch_unwind(life) {
        Ok(Ok(())) => "well".into(),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("panicked: {}", panic.downcast_ref::<&str>().unwrap_or(&"?")),
    };
    if program == "twice" {
        said = Process::new(launch).mpi().run(|_| Ok(())).unwrap_err().to_string();
    }
    let mut out = std::io::stdout();
    out.write_all(format!("@{rank} {said}\n").as_bytes()).and_then(|()| out.flush()).unwrap();
    // The other ranks have printed their outcome before the launcher ends them, because this rank ends without
    // finalizing MPI.
    if said != "well" {
        sleep(Duration::from_millis(500));
    }
    std::process::exit(0);
}

/// Trains in place: nothing is copied outside of the calls after a first step.
fn in_place(rank: &Rank) -> Result<()> {
    let copied = steps_in_place(&DeviceMesh::new(rank, &[("fsdp", rank.world().len())])?, DType::F32)?;
    assert_eq!(copied.map(|step| step.gather), [0; 4], "{copied:?}");
    assert!(copied[0].reduce > HEAD_BYTES, "{copied:?}");
    assert!(copied[1..].iter().all(|step| step.reduce <= HEAD_BYTES), "{copied:?}");
    Ok(())
}

/// Reductions and lists that do not fit a call are refused before a rank enters it.
fn misfits(rank: &Rank) -> Result<()> {
    let n = rank.world().len();
    let channel = rank.engine().open(&(0..n).collect::<Vec<_>>(), "raw")?;
    let (x, shapes) = (vec![Tensor::zeros(DType::F32, [3]); n], vec![Shape::from([3]); n]);
    let (route, dtype, op) = (Route::Gather, DType::F32, Some(ReduceOp::Sum));
    let gather = Call {
        name: "all_reduce",
        route,
        op,
        dtype,
        outgoing: &x[..1],
        incoming: &shapes,
        lineage: Lineage::NONE,
    };
    let scatter = Call { name: "reduce_scatter", route: Route::AllToAll, outgoing: &x, ..gather };
    let sum = |members, len: usize| Reduce::halving(ReduceOp::Sum, members, [len].into());
    let none = Call { outgoing: &[], ..gather };
    let refused = [
        channel.all_reduce(sum(n + 1, 3), gather),
        channel.all_reduce(sum(n, 4), gather),
        channel.all_reduce(sum(n, 3), none),
        channel.reduce_scatter(sum(n + 1, 3), scatter),
        channel.start(none),
        channel.start(Call { incoming: &[], ..gather }),
        channel.start(Call { outgoing: &[], ..scatter }),
        channel.start(Call { route: Route::Send { to: n }, incoming: &shapes[..1], ..gather }),
    ];
    for end in refused {
        let said = end.map(drop).expect_err("it does not fit").to_string();
        assert!(said.starts_with("all_reduce: ") || said.starts_with("reduce_scatter: "), "{said}");
    }
    let sums = [channel.all_reduce(sum(n, 3), gather)?, channel.reduce_scatter(sum(n, 3), scatter)?];
    sums.into_iter().try_for_each(|sum| sum.wait().map(drop))
}

fn var(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn run(rank: &Rank, program: &str) -> Result<()> {
    let g = rank.world();
    match program {
        "exchanges" => return exchanges(&g),
        "crossed" => return crossed(rank),
        "chain" => return chain(rank),
        "in_place" => return in_place(rank),
        "misfits" => return misfits(rank),
        _ => {}
    }
    let number = |name: &str| var(name).and_then(|n| n.parse().ok()).unwrap_or(usize::MAX);
    let (culprit, at) = (number("ISOSHARD_CHILD_CULPRIT"), number("ISOSHARD_CHILD_AT"));
    for i in 0..CALLS {
        let strikes = rank.rank() == culprit && i == at;
        if !strikes {
            call(&g, i)?;
            continue;
        }
        let small = [4 + usize::from(program == "shape")];
        match program {
            "operator" => g.barrier()?,
            "shape" => sum(&g, DType::F32, &small)?,
            "dtype" => sum(&g, DType::F64, &small)?,
            "reduction" => drop(g.all_reduce(&Tensor::zeros(DType::F32, small), ReduceOp::Max)?),
            "skip" => continue,
            "error" => return Err(Error::invalid("step", "went wrong", "", "")),
            // Unlike panic!, this prints nothing.
            "panic" => resume_unwind(Box::new("boom")),
            "late" => sleep(deadline() * 2),
            "busy" => {
                let _busy = rank.busy("saving");
                sleep(deadline() * 2);
            }
            "busy_limit" => {
                let _busy = rank.busy_for("saving", deadline() / 2);
                sleep(deadline() * 3);
            }
            "busy_killed" => {
                let _busy = rank.busy("saving");
                signal("KILL", None);
            }
            "killed" => signal("KILL", None),
            "stopped" => {
                signal("STOP", var("ISOSHARD_CHILD_STOP_S"));
                // One thread receives the signal before the others stop; this one must not be in the call by then.
                sleep(Duration::from_millis(50));
                call(&g, i)?;
                continue;
            }
            other => panic!("no program {other}"),
        }
        call(&g, i)?;
    }
    Ok(())
}

/// Makes call `i` of every rank: small ones, and ones that MPI does not send before they are waited for.
fn call(g: &Group, i: usize) -> Result<()> {
    let len = if i.is_multiple_of(2) { 4 } else { 40_000 };
    let done = sum(g, DType::F32, &[len]);
    if done.is_err() {
        // After a fault every call returns the same error at once.
        let began = Instant::now();
        let again = g.barrier().unwrap_err();
        assert!(began.elapsed() < deadline() / 2, "{again}");
    }
    done
}

fn sum(g: &Group, dtype: DType, shape: &[usize]) -> Result<()> {
    let x = Tensor::full(dtype, shape, (g.index() + 1) as f64);
    let got = g.all_reduce_async(&x, ReduceOp::Sum).wait()?;
    let want = (g.len() * (g.len() + 1) / 2) as f64;
    assert!(got.to_f64_vec().iter().all(|&v| v == want), "what differs was added up");
    Ok(())
}

/// Sends a signal to this process, and after `seconds` one that continues it.
fn signal(name: &str, seconds: Option<String>) {
    let id = std::process::id();
    let goes_on = seconds.map_or(String::new(), |s| format!("(sleep {s}; kill -CONT {id}) & "));
    let script = format!("{goes_on}kill -{name} {id}");
    let mut shell = Command::new("sh").args(["-c", &script]).spawn().expect("a shell");
    let _ = shell.wait();
}

/// Rank 2 waits for rank 1, which waits for rank 0, which is busy.
fn chain(rank: &Rank) -> Result<()> {
    let me = rank.rank();
    let [a, b] = [[0, 1], [1, 2]].map(|ranks| ranks.contains(&me).then(|| rank.group(&ranks, "pair")));
    if me == 0 {
        let _busy = rank.busy("saving");
        sleep(deadline() * 2);
    }
    for group in [a, b].into_iter().flatten() {
        group?.barrier()?;
    }
    Ok(())
}

fn crossed(rank: &Rank) -> Result<()> {
    let groups = [rank.group(&[0, 1], "a")?, rank.group(&[0, 1], "b")?];
    groups[rank.rank()].barrier()?;
    groups[1 - rank.rank()].barrier()
}

/// Sends every kind of message, with sizes that are no multiple of a piece.
fn exchanges(g: &Group) -> Result<()> {
    let (me, n) = (g.index(), g.len());
    let part = |from: usize, to: usize, len: usize| {
        Tensor::from_vec((0..len).map(|i| (i * 7 + from * 31 + to) as i64).collect(), [len])
    };
    for len in [0, 1, 5, 1000, 10_007] {
        let shapes: Vec<Shape> = (0..n).map(|i| Shape::from([len + i])).collect();
        let all = g.all_gather(&part(me, 0, len + me)?, &shapes)?;
        let parts: Result<Vec<Tensor>> = (0..n).map(|to| part(me, to, len + to)).collect();
        let given = g.all_to_all(parts?, &vec![Shape::from([len + me]); n])?;
        for i in 0..n {
            assert_eq!(all[i].to_vec::<i64>()?, part(i, 0, len + i)?.to_vec::<i64>()?);
            assert_eq!(given[i].to_vec::<i64>()?, part(i, me, len + me)?.to_vec::<i64>()?);
        }
        let root = g.broadcast(Some(&part(me, 9, len)?), n - 1, DType::I64, &Shape::from([len]))?;
        assert_eq!(root.to_vec::<i64>()?, part(n - 1, 9, len)?.to_vec::<i64>()?);
        g.send(&part(me, 5, len)?, (me + 1) % n)?;
        let from = (me + n - 1) % n;
        let got = g.recv(from, DType::I64, &Shape::from([len]))?;
        assert_eq!(got.to_vec::<i64>()?, part(from, 5, len)?.to_vec::<i64>()?);
    }
    g.barrier()
}
