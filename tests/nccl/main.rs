//! The NCCL engine over a fake library and emulated devices: exchanges by bits, sub-groups, late, wrong and failed
//! calls, and processes that meet by TCP. Streams run by themselves, so a missing wait shows.

#[path = "../common/in_place.rs"]
mod in_place;
#[path = "../common/shim.rs"]
#[allow(dead_code, reason = "the suite uses the rest")]
mod shim;

mod driver;
mod fake;
mod machines;

use std::net::TcpListener;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use isoshard::comm::nccl::Library;
use isoshard::comm::{Call, Group, Launch, Lineage, Process, Rank, Reduce, Route, Spmd, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::rng::{Draw, Init};
use isoshard::tensor::{DType, Device, ReduceOp, Shape, Tensor};
use isoshard::{CommFault, Error, Result};

use driver::devices;
use fake::Fake;
use in_place::{HEAD_BYTES, steps_in_place};

const WORLDS: [usize; 4] = [1, 2, 3, 5];
const LONG: Duration = Duration::from_secs(60);
/// A busy machine may keep a thread waiting for some tenths of it.
const SHORT: Duration = Duration::from_secs(1);

/// Runs `n` ranks over a fake library; returns `None`, with a message, if there are no devices.
fn world(n: usize, deadline: Duration) -> Option<(Spmd, Arc<Fake>)> {
    let devices = devices()?;
    let fake = Arc::new(Fake::default());
    let spmd = Spmd::new(n).nccl(Library::of(fake.clone())).on(move |rank| devices[rank]);
    Some((spmd.deadline(deadline), fake))
}

fn on_all_worlds(f: impl Fn(Rank, Group) -> Result<()> + Send + Sync + Clone + 'static) {
    for n in WORLDS {
        let Some((spmd, fake)) = world(n, LONG) else { return };
        let f = f.clone();
        spmd.run(move |rank| f(rank.clone(), rank.world())).unwrap();
        assert_eq!(fake.count("abort"), 0, "what ends in peace is not aborted");
        assert_eq!(fake.count("destroy"), fake.count("join") + fake.count("split"));
    }
}

/// The values that member `from` sends to member `to`, which are unique to the pair.
fn part(from: usize, to: usize, shape: &Shape) -> Tensor {
    let value = |i: usize| ((from * 31 + to * 7 + i * 3) as f32).sin();
    Tensor::from_vec((0..shape.numel()).map(value).collect(), shape).unwrap()
}

/// Ragged shapes, some of them empty.
fn ragged(from: usize, to: usize) -> Shape {
    Shape::from([(from * 2 + to) % 4, 3])
}

fn assert_same(got: &Tensor, want: &Tensor) {
    let got = got.to_device(Device::Cpu).unwrap().contiguous().unwrap();
    assert_eq!(got.shape(), want.shape());
    assert_eq!(got.as_bytes().unwrap(), want.as_bytes().unwrap(), "{got:?} {want:?}");
}

#[test]
fn gathers_and_exchanges_equal_and_ragged() {
    on_all_worlds(|rank, g| {
        let (me, n, here) = (g.index(), g.len(), rank.device());
        for shape in [|i: usize| ragged(i, 0), |_| Shape::from([5, 2]), |_| Shape::from([0, 2])] {
            let shapes: Vec<Shape> = (0..n).map(shape).collect();
            let got = g.all_gather(&part(me, 0, &shapes[me]).to_device(here)?, &shapes)?;
            (0..n).for_each(|i| assert_same(&got[i], &part(i, 0, &shapes[i])));
            assert!(got.iter().all(|x| x.device() == here));
        }
        let parts: Result<Vec<Tensor>> =
            (0..n).map(|to| part(me, to, &ragged(me, to)).to_device(here)).collect();
        let shapes: Vec<Shape> = (0..n).map(|from| ragged(from, me)).collect();
        let got = g.all_to_all(parts?, &shapes)?;
        (0..n).for_each(|from| assert_same(&got[from], &part(from, me, &shapes[from])));
        Ok(())
    });
}

#[test]
fn equal_gathers_are_the_librarys_own() {
    let Some((spmd, fake)) = world(2, LONG) else { return };
    let run = |rank: Rank| {
        let (g, s) = (rank.world(), Shape::from([3]));
        let x = part(g.index(), 0, &s).to_device(rank.device())?;
        let all = g.all_gather(&x, &[s.clone(), s])?;
        assert!(all[0].shares_storage(&all[1]), "side by side");
        Ok(())
    };
    spmd.run(run).unwrap();
    assert_eq!([fake.count("all_gather"), fake.count("send")], [2, 0]);
}

/// The library writes shards where they are read, and reads gradients where they were computed.
#[test]
fn units_are_gathered_and_reduced_in_place() {
    for n in [2, 4] {
        let Some((spmd, fake)) = world(n, LONG) else { return };
        let run = |rank: Rank| {
            steps_in_place(&DeviceMesh::new(&rank, &[("fsdp", rank.world().len())])?, DType::F32)
        };
        for copied in spmd.run(run).unwrap() {
            assert_eq!(copied.map(|step| step.gather), [0; 4], "{copied:?}");
            assert!(copied[0].reduce > HEAD_BYTES, "{copied:?}");
            assert!(copied[1..].iter().all(|step| step.reduce <= HEAD_BYTES), "{copied:?}");
        }
        // The root and three units, forward and backward, in four steps; the root stays gathered.
        assert_eq!(fake.count("all_gather") % n, 0);
        assert!(fake.count("all_gather") >= 4 * 6 * n, "equal shards are the library's own gather");
    }
}

#[test]
fn broadcasts_messages_barriers() {
    on_all_worlds(|rank, g| {
        let (me, n, here, shape) = (g.index(), g.len(), rank.device(), Shape::from([2, 2]));
        for root in 0..n {
            let mine = part(me, root, &shape).to_device(here)?;
            let got = g.broadcast(Some(&mine), root, DType::F32, &shape)?;
            assert_same(&got, &part(root, root, &shape));
            assert_same(&mine, &part(me, root, &shape));
        }
        // Even members send first, odd ones receive first; with an odd number of members, the last one does both at
        // once.
        let (right, left) = ((me + 1) % n, (me + n - 1) % n);
        for k in 0..3 {
            let send = || g.send(&part(me, k, &shape).to_device(here)?, right);
            if me % 2 == 0 {
                send()?;
            }
            assert_same(&g.recv(left, DType::F32, &shape)?, &part(left, k, &shape));
            if me % 2 == 1 {
                send()?;
            }
        }
        g.barrier()
    });
}

#[test]
fn what_is_given_may_go_at_once_and_what_comes_is_there() {
    on_all_worlds(|rank, g| {
        let (n, here) = (g.len(), rank.device());
        for round in 0..30usize {
            let len = 1 + round * 331 % 5000;
            let values = |i: usize| vec![(round * 10 + i) as i64; len];
            let x = Tensor::from_vec(values(g.index()), [len])?.to_device(here)?;
            let pending = g.all_gather_async(&x, &vec![Shape::from([len]); n]);
            // Its memory is reused and overwritten at once.
            drop(x);
            let over = Tensor::from_vec(vec![-1i64; len], [len])?.to_device(here)?;
            let dropped = g.all_gather_async(&over, &vec![Shape::from([len]); n]);
            drop(over);
            drop(dropped);
            drop(Tensor::from_vec(vec![-2i64; n * len], [n * len])?.to_device(here)?);
            for (i, got) in pending.wait()?.into_iter().enumerate() {
                assert_eq!(got.to_vec::<i64>()?, values(i), "round {round}");
            }
        }
        Ok(())
    });
}

#[test]
fn several_in_flight_in_any_order() {
    on_all_worlds(|rank, g| {
        let (me, n, here) = (g.index(), g.len(), rank.device());
        let shapes = vec![Shape::from([7, 3]); n];
        let start = |k: usize| {
            let x = part(me, k, &shapes[0]).to_device(here)?;
            Ok::<_, Error>(g.all_gather_async(&x, &shapes))
        };
        let pending: Result<Vec<_>> = (0..6).map(start).collect();
        for (k, p) in pending?.into_iter().enumerate().rev() {
            if (k + me) % 3 == 0 {
                drop(p);
            } else {
                let got = p.wait()?;
                (0..n).for_each(|i| assert_same(&got[i], &part(i, k, &shapes[0])));
            }
        }
        let barrier = g.barrier_async();
        while !barrier.is_ready() {
            thread::yield_now();
        }
        barrier.wait()
    });
}

#[test]
fn groups_by_their_members_and_by_splitting() {
    let Some((spmd, fake)) = world(5, LONG) else { return };
    let run = |rank: Rank| {
        let (me, here) = (rank.rank(), rank.device());
        let names = |g: &Group| -> Result<Vec<i64>> {
            let x = Tensor::scalar(me as i64).to_device(here)?;
            let all = g.all_gather(&x, &vec![Shape::from([]); g.len()])?;
            all.iter().map(|x| Ok(x.item()? as i64)).collect()
        };
        let low = (me < 3).then(|| rank.group(&[0, 1, 2], "low")).transpose()?;
        let high = (me >= 2).then(|| rank.group(&[4, 2, 3], "high")).transpose()?;
        let parts = [vec![3, 0], vec![1, 4, 2]];
        let half = rank.split(&parts, "half")?;
        for _ in 0..10 {
            if let Some(low) = &low {
                assert_eq!(names(low)?, [0, 1, 2]);
            }
            assert_eq!(names(&half)?, if me % 3 == 0 { vec![3, 0] } else { vec![1, 4, 2] });
            if let Some(high) = &high {
                assert_eq!(names(high)?, [4, 2, 3]);
            }
        }
        // The same ranks and name are the same group, with one count of calls, however it was opened.
        if me < 3 {
            assert_eq!(names(&rank.group(&[0, 1, 2], "low")?)?, [0, 1, 2]);
        }
        assert_eq!(names(&rank.split(&parts, "half")?)?.len(), half.len());
        let alone = rank.group(&[me], "alone")?;
        assert_eq!(names(&alone)?, [me as i64]);
        alone.send(&Tensor::scalar(7i64).to_device(here)?, 0)?;
        assert_eq!(alone.recv(0, DType::I64, &Shape::from([]))?.item()?, 7.0);
        let text = rank.split(&[vec![0, 1], vec![1, 2, 3, 4]], "half").unwrap_err().to_string();
        assert!(text.starts_with("split: the parts overlap; got half[[0, 1], [1, 2, 3, 4]] for 5"));
        rank.world().barrier()
    };
    spmd.run(run).unwrap();
    assert_eq!([fake.count("unique_id"), fake.count("join"), fake.count("split")], [3, 5 + 3 + 3, 5]);
}

#[test]
fn reductions_have_the_bits_of_threads() {
    let value = |rank: usize, i: usize| ((i + 1) * (rank + 3)) as f32 * 0.1;
    let sums = move |rank: Rank| {
        let (g, here) = (rank.world(), rank.device());
        let mut bits = Vec::new();
        for len in [0, 1, 7, 16_383, 40_001] {
            let x = Tensor::from_vec((0..len).map(|i| value(rank.rank(), i)).collect(), [len])?
                .to_device(here)?;
            bits.push(g.all_reduce(&x, ReduceOp::Sum)?.to_vec::<f32>()?);
            bits.push(g.all_reduce_async(&x, ReduceOp::Max).wait()?.to_vec::<f32>()?);
            let cut = |i: usize| x.narrow(0, len * i / g.len(), len * (i + 1) / g.len() - len * i / g.len());
            let parts: Result<Vec<Tensor>> = (0..g.len()).map(cut).collect();
            bits.push(g.reduce_scatter(parts?, ReduceOp::Sum)?.to_vec::<f32>()?);
        }
        Ok(bits)
    };
    for n in WORLDS {
        let Some((nccl, _)) = world(n, LONG) else { return };
        let want = spmd(n, sums).unwrap();
        assert!(nccl.run(sums).unwrap() == want, "{n} ranks over NCCL");
        let shared = devices().unwrap()[0];
        assert!(Spmd::new(n).on(move |_| shared).run(sums).unwrap() == want, "{n} ranks share a device");
    }
}

#[test]
fn a_program_has_the_bits_of_one_rank() {
    let program = |mesh: &'static str| {
        move |rank: Rank| {
            let mesh = DeviceMesh::parse(&rank, mesh)?;
            let normal = |shape: [usize; 2], layout: &str, number| {
                let layout = if mesh.mesh().ndim() == 1 { "(R)" } else { layout };
                let init = Init::Normal { mean: 0.0, std: 1.0 };
                DTensor::init(&mesh, DType::F32, shape, layout, init, Draw { seed: 7, number })
            };
            let x = normal([13, 70], "(S0, R)", 0)?;
            let w = normal([70, 9], "(R, S0)", 1)?.requires_grad()?;
            let y = x.matmul(&w)?.gelu()?;
            let gradients = y.mul(&y)?.mean_all()?.backward()?;
            let gradient = gradients.get(&w).expect("w is a leaf").full_tensor()?;
            assert_eq!(gradient.device(), rank.device());
            Ok([y.full_tensor()?.to_vec::<f32>()?, gradient.to_vec::<f32>()?])
        }
    };
    let want = &spmd(1, program("a=1")).unwrap()[0];
    for (n, mesh) in [(1, "a=1"), (2, "a=2,b=1"), (4, "a=2,b=2"), (3, "a=1,b=3")] {
        let Some((nccl, _)) = world(n, LONG) else { return };
        for got in nccl.run(program(mesh)).unwrap() {
            assert!(got == *want, "{mesh} over NCCL");
        }
        let shared = devices().unwrap()[0];
        for got in Spmd::new(n).on(move |_| shared).run(program(mesh)).unwrap() {
            assert!(got == *want, "{mesh} on one device");
        }
    }
}

#[test]
fn thread_ranks_pass_device_tensors_by_sharing() {
    let Some(devices) = devices() else { return };
    let run = move |rank: Rank| {
        let (g, here) = (rank.world(), rank.device());
        let s = Shape::from([300]);
        for round in 0..20 {
            let x = part(g.index(), round, &s).to_device(here)?;
            let got = g.all_gather(&x, &vec![s.clone(); g.len()])?;
            assert!(got[g.index()].shares_storage(&x), "nothing is copied");
            drop(x);
            (0..g.len()).for_each(|i| assert_same(&got[i], &part(i, round, &s)));
            let sum = g.all_reduce(&got[0], ReduceOp::Sum)?;
            let all = g.all_gather(&sum, &vec![s.clone(); g.len()])?;
            assert!(all.iter().all(|x| x.shares_storage(&sum)), "one result for all");
        }
        Ok(())
    };
    Spmd::new(3).on(move |_| devices[0]).run(run).unwrap();
    // With several ranks it is a mismatch.
    let run = |rank: Rank| {
        let x = Tensor::zeros(DType::F32, [2]).to_device(rank.device())?;
        Ok(rank.world().all_reduce(&x, ReduceOp::Sum).unwrap_err().to_string())
    };
    for on in [[devices[0], devices[1]], [Device::Cpu, devices[0]]] {
        for text in Spmd::new(2).on(move |rank| on[rank]).run(run).unwrap() {
            let [a, b] = on;
            assert_eq!(
                text,
                format!(
                    "all_reduce #0 on group world{{0, 1}}: rank 1 brought all_reduce(sum) f32[2] on {b}, rank 0 brought \
                     all_reduce(sum) f32[2] on {a}; every rank must make the same calls in the same order; last completed: \
                     rank(s) [0, 1] nothing"
                )
            );
        }
    }
    let run = move |rank: Rank| {
        let parts =
            vec![Tensor::zeros(DType::F32, [2]), Tensor::zeros(DType::F32, [2]).to_device(devices[0])?];
        Ok(rank.world().reduce_scatter(parts, ReduceOp::Sum).unwrap_err().to_string())
    };
    let text = &spmd(2, run).unwrap()[0];
    let want = format!("the parts are on different devices; got f32[2] on cpu, f32[2] on {};", devices[0]);
    assert!(text.contains(&want), "{text}");
}

/// Returns the errors of all ranks; no rank may succeed.
fn errors(n: usize, f: impl Fn(&Rank) -> Result<()> + Send + Sync + 'static) -> Option<Vec<Error>> {
    let (spmd, _) = world(n, SHORT)?;
    Some(spmd.run(move |rank| Ok(f(&rank).unwrap_err())).unwrap())
}

fn zeros(rank: &Rank, n: usize) -> Result<Tensor> {
    Tensor::zeros(DType::F32, [n]).to_device(rank.device())
}

#[test]
fn ranks_that_disagree_are_named_on_all() {
    let differs = |f: fn(&Rank) -> Result<()>, brought: [&str; 2]| {
        for error in errors(2, f).into_iter().flatten() {
            let Error::Comm(fault) = &error else { panic!("{error}") };
            let CommFault::Mismatch { rank, brought: b, other, other_brought: a, .. } = &**fault else {
                panic!("{error}")
            };
            assert_eq!((*other, a.as_str(), *rank, b.as_str()), (0, brought[0], 1, brought[1]));
        }
    };
    differs(
        |r| {
            match r.rank() {
                0 => r.world().broadcast(Some(&zeros(r, 4)?), 0, DType::F32, &Shape::from([4])).map(drop),
                _ => r.world().barrier(),
            }
            .and_then(|()| r.world().barrier())
        },
        ["broadcast(root 0) f32[4]", "barrier"],
    );
    differs(
        |r| {
            let n = 3 + r.rank();
            let x = zeros(r, n)?;
            let shapes = [Shape::from([n]), Shape::from([n])];
            r.world().all_gather(&x, &shapes).map(drop).and_then(|()| r.world().barrier())
        },
        ["all_gather f32[3]", "all_gather f32[4]"],
    );
    differs(
        |r| {
            // The number of bytes is equal, so the library would not notice.
            let dtype = [DType::F32, DType::I32][r.rank()];
            let x = Tensor::zeros(dtype, [3]).to_device(r.device())?;
            let shapes = [Shape::from([3]), Shape::from([3])];
            r.world().all_gather(&x, &shapes).map(drop).and_then(|()| r.world().barrier())
        },
        ["all_gather f32[3]", "all_gather i32[3]"],
    );
}

#[test]
fn a_failed_world_stays_failed_and_is_not_read() {
    let Some((spmd, fake)) = world(2, SHORT) else { return };
    let run = |rank: Rank| {
        let shapes = [Shape::from([2 + rank.rank()]), Shape::from([2 + rank.rank()])];
        let x = zeros(&rank, 2 + rank.rank())?;
        let sent = rank.world().all_gather(&x, &shapes);
        let first = match sent {
            // The call was in flight before the coordinator knew, so its values cannot be read.
            Ok(got) => got[1 - rank.rank()].to_vec::<f32>().unwrap_err(),
            Err(e) => e,
        };
        let start = Instant::now();
        let second = rank.world().barrier().unwrap_err();
        assert!(start.elapsed() < Duration::from_millis(100));
        let is_mismatch =
            |e: &Error| matches!(e, Error::Comm(f) if matches!(**f, CommFault::Mismatch { .. }));
        assert!(is_mismatch(&first) && is_mismatch(&second), "{first} {second}");
        Ok(())
    };
    spmd.run(run).unwrap();
    assert_eq!(fake.count("abort"), 2);
    // A thread that continues without that world can read again.
    assert_eq!(Tensor::zeros(DType::F32, [1]).to_device(devices().unwrap()[0]).unwrap().item().unwrap(), 0.0);
}

#[test]
fn a_fault_that_nobody_was_given_is_an_error_at_the_end() {
    let Some((spmd, _)) = world(2, SHORT) else { return };
    let run = |rank: Rank| {
        let x = Tensor::zeros([DType::F32, DType::I32][rank.rank()], [3]).to_device(rank.device())?;
        drop(rank.world().all_gather_async(&x, &[Shape::from([3]), Shape::from([3])]));
        sleep(SHORT);
        Ok(())
    };
    let error = spmd.run(run).unwrap_err().to_string();
    assert!(error.contains("rank 1 brought all_gather i32[3], rank 0 brought all_gather f32[3]"), "{error}");
}

#[test]
fn a_rank_that_stays_away_is_named() {
    let Some((spmd, _)) = world(3, SHORT) else { return };
    let run = |rank: Rank| {
        let g = rank.world();
        g.barrier()?;
        if rank.rank() == 1 {
            sleep(SHORT * 2);
        }
        let x = zeros(&rank, 4)?;
        let started = g.all_gather(&x, &vec![Shape::from([4]); 3]).and_then(|all| all[1].to_vec::<f32>());
        Ok(started.unwrap_err().to_string())
    };
    let texts = spmd.run(run).unwrap();
    let waited = |rank: usize| {
        format!(
            "all_gather #1 on group world{{0, 1, 2}}: rank(s) [1] did not come within 1.0 s; rank {rank} waited with \
             all_gather f32[4]; last completed: rank(s) [0, 1, 2] barrier #0"
        )
    };
    for text in texts {
        assert!(text == waited(0) || text == waited(2), "{text}");
    }
}

#[test]
fn a_rank_that_has_ended_is_not_waited_for() {
    let Some((spmd, _)) = world(3, LONG) else { return };
    let start = Instant::now();
    let error = spmd.run(|rank| if rank.rank() == 2 { Ok(()) } else { rank.world().barrier() }).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(20), "the deadline was not waited for");
    assert!(
        error.to_string().contains("barrier #0 on group world{0, 1, 2}: rank(s) [2] had ended; rank"),
        "{error}"
    );
}

#[test]
fn the_first_failure_is_reported_and_ends_all() {
    for panics in [false, true] {
        let Some((spmd, _)) = world(3, LONG) else { return };
        let start = Instant::now();
        let error = spmd.run(move |rank| {
            for i in 0..4 {
                if rank.rank() == 1 && i == 2 {
                    if panics {
                        std::panic::resume_unwind(Box::new("boom"));
                    }
                    return Err(Error::invalid("step", "went wrong", "", ""));
                }
                let x = zeros(&rank, 5)?;
                // A value is read meanwhile: the host waits for the stream, and the stream for rank 1.
                rank.world().all_gather(&x, &vec![Shape::from([5]); 3])?[1].to_vec::<f32>()?;
            }
            Ok(())
        });
        let want = if panics { "rank 1: panicked: boom" } else { "rank 1: step: went wrong" };
        assert_eq!(error.unwrap_err().to_string(), want);
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn what_the_library_notices_is_told_to_all() {
    let Some((spmd, fake)) = world(3, LONG) else { return };
    let breaks = fake.clone();
    let texts = spmd.run(move |rank| {
        rank.world().barrier()?;
        if rank.rank() == 2 {
            breaks.break_rank(2, "ncclRemoteError");
        }
        let started = zeros(&rank, 3).and_then(|x| match rank.rank() {
            2 => {
                sleep(Duration::from_millis(800));
                rank.world().barrier()
            }
            _ => rank.world().all_gather(&x, &vec![Shape::from([3]); 3])?[0].to_vec::<f32>().map(drop),
        });
        Ok(started.unwrap_err().to_string())
    });
    for text in texts.unwrap() {
        assert!(
            text.contains("the transport of rank 2 failed: progress failed with ncclRemoteError"),
            "{text}"
        );
    }
    assert_eq!(fake.count("abort"), 3);
}

#[test]
fn connecting_keeps_the_deadline() {
    let Some((spmd, fake)) = world(2, SHORT) else { return };
    fake.stuck.store(true, Ordering::Relaxed);
    let start = Instant::now();
    let error = spmd.run(|_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("connect #0 on group world{0, 1}: the transport of rank"), "{error}");
    assert!(error.ends_with("failed: not connected within 1.0 s"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(20));
    let Some((spmd, _)) = world(2, SHORT) else { return };
    let error =
        spmd.run(|rank| if rank.rank() == 1 { rank.group(&[0, 1], "late").map(drop) } else { Ok(()) });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains(
            "connect #0 on group late{0, 1}: the transport of rank 1 failed: rank 0 has not opened"
        ),
        "{error}"
    );
}

/// Ranks that wait for a busy rank, in a call or for a new group, wait beyond the deadline.
#[test]
fn a_busy_rank_is_waited_for() {
    let program = |compared: bool| {
        let Some((spmd, fake)) = world(3, SHORT) else { return };
        let spmd = spmd.nccl(Library::of(fake).compared(compared)).on(|rank| devices().unwrap()[rank]);
        let run = spmd.run(|rank| {
            let busy = |rank: &Rank, who: usize| {
                if rank.rank() == who {
                    let _busy = rank.busy("saving");
                    sleep(SHORT * 3 / 2);
                }
            };
            busy(&rank, 0);
            rank.world().barrier()?;
            busy(&rank, 2);
            rank.world().barrier()?;
            // Members connect in the first call of `group`.
            busy(&rank, 1);
            rank.group(&[2, 1, 0], "new")?.barrier()?;
            busy(&rank, 2);
            rank.group(&[2, 1, 0], "newer")?.barrier()
        });
        run.unwrap();
    };
    thread::scope(|scope| {
        scope.spawn(|| program(true));
        scope.spawn(|| program(false));
    });
}

/// If another rank has failed, the program waits for the end of a rank that is busy.
#[test]
fn a_busy_rank_is_not_abandoned_when_another_fails() {
    let Some((spmd, _)) = world(2, SHORT) else { return };
    let (connected, heard) = mpsc::channel();
    let heard = Mutex::new(heard);
    let ends = spmd.run_each(move |rank| {
        rank.world().barrier()?;
        if rank.rank() == 1 {
            // A rank that is connecting, or still in the barrier, would find the failure there.
            heard.lock().unwrap().recv_timeout(SHORT).expect("rank 0 has left the barrier");
            return Err(Error::invalid("step", "went wrong", "", ""));
        }
        connected.send(()).expect("rank 1 waits");
        let busy = rank.busy("saving");
        sleep(SHORT * 2);
        drop(busy);
        Ok(rank.world().barrier().unwrap_err().to_string())
    });
    let ends = ends.unwrap();
    assert!(ends[0].as_ref().unwrap().ends_with("rank 1 failed: step: went wrong"), "{ends:?}");
}

#[test]
fn work_beyond_its_limit_is_named() {
    let Some((spmd, _)) = world(2, SHORT) else { return };
    let texts = spmd.run(|rank| {
        rank.world().barrier()?;
        if rank.rank() == 1 {
            let _busy = rank.busy_for("saving", SHORT / 2);
            sleep(SHORT * 3);
        }
        Ok(rank.world().barrier().unwrap_err().to_string())
    });
    for text in texts.unwrap() {
        assert!(text.contains("rank(s) [1] did not come within 1.0 s"), "{text}");
        assert!(text.contains("; rank 1 is busy with \"saving\" for "), "{text}");
    }
}

#[test]
fn without_comparison_the_deadline_still_holds() {
    let Some((spmd, fake)) = world(2, SHORT) else { return };
    let spmd = spmd.nccl(Library::of(fake).compared(false)).on(|rank| devices().unwrap()[rank]);
    let texts = spmd.run(|rank| {
        rank.world().barrier()?;
        if rank.rank() == 1 {
            sleep(SHORT * 2);
        }
        Ok(rank.world().barrier().unwrap_err().to_string())
    });
    for text in texts.unwrap() {
        assert_eq!(
            text,
            "barrier #1 on group world{0, 1}: the transport of rank 0 failed: not finished within 1.0 s; calls are not \
             compared, so the missing ranks are not known"
        );
    }
}

#[test]
fn places_that_are_not_the_parts_are_refused() {
    on_all_worlds(|rank, group| {
        let members: Vec<usize> = (0..group.len()).collect();
        let channel = rank.engine().open(&members, "raw")?;
        let zeros = |shape: &[usize]| Tensor::zeros(DType::F32, shape).to_device(rank.device());
        let (x, shapes) = ([zeros(&[3])?], vec![Shape::from([3]); members.len()]);
        let (name, route, dtype) = ("all_gather", Route::Gather, DType::F32);
        let call =
            Call { name, route, op: None, dtype, outgoing: &x, incoming: &shapes, lineage: Lineage::NONE };
        let places = |last: Tensor| -> Result<Vec<Tensor>> {
            let others = members[1..].iter().map(|_| zeros(&[3]));
            others.chain([Ok(last)]).collect()
        };
        let repeated = zeros(&[1])?.expand([3])?;
        let shared = zeros(&[3])?;
        for last in [repeated, shared.clone(), zeros(&[2])?, Tensor::zeros(DType::F32, [3])] {
            assert!(channel.gather_into(call, places(last)?).is_err());
        }
        assert!(channel.gather_into(call, places(zeros(&[3])?)?.split_off(1)).is_err());
        let parts = channel.gather_into(call, places(zeros(&[3])?)?)?.wait()?;
        assert!(parts.len() == members.len() && shared.numel() == 3);
        parts.iter().for_each(|part| assert_same(part, &Tensor::zeros(DType::F32, [3])));
        Ok(())
    });
}

/// Reductions and lists that do not fit a call are refused before a rank enters it.
#[test]
fn calls_that_do_not_fit_the_group_are_refused() {
    on_all_worlds(|rank, group| {
        let members: Vec<usize> = (0..group.len()).collect();
        let channel = rank.engine().open(&members, "raw")?;
        let (n, zeros) = (members.len(), || Tensor::zeros(DType::F32, [3]).to_device(rank.device()));
        let (x, shapes) =
            (members.iter().map(|_| zeros()).collect::<Result<Vec<_>>>()?, vec![Shape::from([3]); n]);
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
            channel.reduce_scatter(sum(n, 3), Call { outgoing: &[], ..scatter }),
            channel.start(none),
            channel.start(Call { incoming: &[], ..gather }),
            channel.start(Call { outgoing: &[], ..scatter }),
            channel.start(Call { route: Route::Broadcast { root: n }, ..gather }),
            channel.start(Call { route: Route::Send { to: n }, incoming: &shapes[..1], ..gather }),
            channel.start(Call { route: Route::Recv { from: 0 }, incoming: &[], ..none }),
        ];
        for (i, end) in refused.into_iter().enumerate() {
            let said = end.map(drop).expect_err(&format!("call {i}")).to_string();
            assert!(said.starts_with("all_reduce: ") || said.starts_with("reduce_scatter: "), "{said}");
        }
        let sums = [channel.all_reduce(sum(n, 3), gather)?, channel.reduce_scatter(sum(n, 3), scatter)?];
        sums.into_iter().try_for_each(|sum| sum.wait().map(drop))
    });
}

#[test]
fn what_nccl_does_not_take_is_refused() {
    let Some(devices) = devices() else { return };
    let library = || Library::of(Arc::new(Fake::default()));
    let spmd = || Spmd::new(2).nccl(library());
    let text = |s: Spmd, f: fn(Rank) -> Result<()>| s.run(f).unwrap_err().to_string();
    assert_eq!(
        text(spmd().on(move |_| devices[3]), |_| Ok(())),
        format!(
            "nccl: NCCL takes one rank per GPU; got ranks 0 and 1 on {}; share a GPU among ranks that are threads without \
             NCCL, or start as many ranks as there are GPUs",
            devices[3]
        )
    );
    let cpu = text(spmd().on(|_| Device::Cpu), |_| Ok(()));
    assert!(cpu.contains("nccl: NCCL moves tensors on GPUs only; got rank"), "{cpu}");
    let absent = text(spmd().on(|rank| Device::Cuda(700 + rank)), |_| Ok(()));
    assert!(absent.contains("there is no such device"), "{absent}");
    let elsewhere = text(spmd().on(move |rank| devices[rank]), |rank| {
        rank.world().all_gather(&Tensor::zeros(DType::F32, [2]), &vec![Shape::from([2]); 2]).map(drop)
    });
    assert!(
        elsewhere.contains("all_gather: NCCL moves tensors of the rank's own GPU; got f32[2] on cpu at rank"),
        "{elsewhere}"
    );
    match Library::load() {
        Ok(library) => assert!(library.name().starts_with("NCCL 2."), "{library:?}"),
        Err(e) => assert!(e.to_string().starts_with("nccl: "), "{e}"),
    }
}

/// Runs processes as threads of this one: each has its own launch, and meets the others by TCP.
fn processes<T: Send + 'static>(
    n: usize,
    deadline: Duration,
    fake: &Arc<Fake>,
    f: impl Fn(Rank) -> Result<T> + Send + Sync + Clone + 'static,
) -> Vec<thread::Result<Result<T>>> {
    let devices = devices().expect("looked at by the caller");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let vars = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", n), ("MASTER_PORT", port.into())];
        let get = |name: &str| match name {
            "MASTER_ADDR" => Some("127.0.0.1".to_string()),
            name => vars.iter().find(|v| v.0 == name).map(|v| v.1.to_string()),
        };
        let launch = Launch::from_vars(get).unwrap().unwrap();
        let process =
            Process::new(launch).deadline(deadline).on(devices[rank]).nccl(Library::of(fake.clone()));
        let f = f.clone();
        thread::spawn(move || process.run(f))
    };
    let all: Vec<_> = (0..n).map(start).collect();
    all.into_iter().map(thread::JoinHandle::join).collect()
}

#[test]
fn processes_are_ranks() {
    if devices().is_none() {
        return;
    }
    for n in [1, 2, 4] {
        let fake = Arc::new(Fake::default());
        let run = |rank: Rank| {
            let g = rank.world();
            let x = Tensor::scalar(rank.rank() as i64).to_device(rank.device())?;
            let all = g.all_gather(&x, &vec![Shape::from([]); g.len()])?;
            let all: Result<Vec<f64>> = all.iter().map(Tensor::item).collect();
            rank.group(&(0..g.len()).rev().collect::<Vec<_>>(), "back")?.barrier()?;
            all
        };
        for got in processes(n, LONG, &fake, run) {
            assert_eq!(got.unwrap().unwrap(), (0..n).map(|r| r as f64).collect::<Vec<_>>());
        }
        assert_eq!(fake.count("abort"), 0);
    }
}

#[test]
fn processes_hear_who_failed_and_how() {
    if devices().is_none() {
        return;
    }
    for culprit in 0..3 {
        for panics in [false, true] {
            let fake = Arc::new(Fake::default());
            let got = processes(3, LONG, &fake, move |rank| {
                rank.world().barrier()?;
                if rank.rank() == culprit {
                    if panics {
                        std::panic::resume_unwind(Box::new("boom".to_string()));
                    }
                    return Err(Error::invalid("step", "went wrong", "", ""));
                }
                rank.world().barrier()
            });
            for (rank, got) in got.into_iter().enumerate() {
                match (rank == culprit, panics) {
                    (true, true) => assert!(got.is_err()),
                    (true, false) => assert_eq!(got.unwrap().unwrap_err().to_string(), "step: went wrong"),
                    (false, _) => {
                        let cause = if panics { "panicked: boom" } else { "step: went wrong" };
                        let text = got.unwrap().unwrap_err().to_string();
                        // A rank that is told while the first barrier is in flight names that one.
                        let want = format!("given up, because rank {culprit} failed: {cause}");
                        assert!(text.starts_with("barrier #") && text.ends_with(&want), "{text}");
                    }
                }
            }
        }
    }
}

#[test]
fn processes_that_disagree_or_stay_away_are_named() {
    if devices().is_none() {
        return;
    }
    let fake = Arc::new(Fake::default());
    let got = processes(3, SHORT, &fake, |rank| {
        rank.world().barrier()?;
        if rank.rank() == 2 {
            sleep(SHORT * 2);
        }
        rank.world().barrier()
    });
    for got in got {
        let text = got.unwrap().unwrap_err().to_string();
        assert!(
            text.starts_with(
                "barrier #1 on group world{0, 1, 2}: rank(s) [2] did not come within 1.0 s; rank"
            ),
            "{text}"
        );
    }
    let fake = Arc::new(Fake::default());
    let got = processes(2, SHORT, &fake, |rank| {
        let g = rank.world();
        let s = Shape::from([1 + rank.rank()]);
        g.all_gather(&zeros(&rank, s[0])?, &[s.clone(), s])?;
        g.barrier()
    });
    for got in got {
        let text = got.unwrap().unwrap_err().to_string();
        assert!(
            text.contains("rank 1 brought all_gather f32[2], rank 0 brought all_gather f32[1]"),
            "{text}"
        );
    }
}

/// With a real library and a real GPU: single ranks connect, and move bytes with every call.
#[test]
fn one_gpu_by_itself() {
    // The emulated devices have other numbers.
    let on_gpu = Tensor::zeros(DType::F32, [1]).to_device(Device::Cuda(0));
    let found = Library::load().and_then(|library| on_gpu.map(|_| library));
    let library = match found {
        Ok(library) => library,
        Err(e) => return eprintln!("SKIPPED (no GPU with NCCL): {e}"),
    };
    eprintln!("{}", library.name());
    let run = |rank: Rank| {
        let alone = rank.engine().open(&[0], "world")?;
        let x = part(0, 0, &Shape::from([1000, 3])).to_device(rank.device())?;
        let want = part(0, 0, &Shape::from([1000, 3]));
        let call = |name, route| Call {
            name,
            route,
            op: None,
            dtype: DType::F32,
            outgoing: std::slice::from_ref(&x),
            incoming: std::slice::from_ref(x.shape()),
            lineage: Lineage::NONE,
        };
        for _ in 0..10 {
            for (name, route) in [("all_gather", Route::Gather), ("broadcast", Route::Broadcast { root: 0 })]
            {
                assert_same(&alone.start(call(name, route))?.wait()?[0], &want);
            }
            alone.start(Call { outgoing: &[], incoming: &[], ..call("barrier", Route::Barrier) })?.wait()?;
        }
        let split = rank.split(&[vec![0]], "split")?;
        assert_same(&split.all_gather(&x, &[x.shape().clone()])?[0], &want);
        rank.world().barrier()
    };
    Spmd::new(1).nccl(library).run(run).unwrap();
}
