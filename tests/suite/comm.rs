//! Collectives on worlds of 1, 2, 3 and 5 ranks against their definition, and the errors if ranks disagree, are late,
//! fail or panic.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use isoshard::comm::{Group, Rank, Spmd, spmd};
use isoshard::tensor::{DType, ReduceOp, Shape, Tensor};
use isoshard::{CommFault, Error, Failure, Result};

use crate::common::ranks;

const WORLDS: [usize; 4] = [1, 2, 3, 5];

/// The tensor that member `from` has for member `to`; no other pair has the same values.
fn part(from: usize, to: usize, shape: &Shape) -> Tensor {
    let value = |i: usize| ((from * 31 + to * 7 + i * 3) as f32).sin();
    Tensor::from_vec((0..shape.numel()).map(value).collect(), shape).unwrap()
}

/// Ragged shapes, some of them empty.
fn ragged(from: usize, to: usize) -> Shape {
    Shape::from([(from * 2 + to) % 4, 3])
}

/// The fold by the tree over the members, by definition.
fn tree(op: ReduceOp, parts: &[Tensor]) -> Tensor {
    if let [only] = parts {
        return only.clone();
    }
    let (left, right) = parts.split_at(parts.len().div_ceil(2));
    let mut acc = tree(op, left);
    op.fold(&mut acc, &tree(op, right)).unwrap();
    acc
}

fn assert_same(got: &Tensor, want: &Tensor) {
    assert_eq!(got.shape(), want.shape());
    assert_eq!(
        got.contiguous().unwrap().as_bytes().unwrap(),
        want.contiguous().unwrap().as_bytes().unwrap(),
        "{got:?} {want:?}"
    );
}

fn on_all_worlds(f: impl Fn(Rank, Group) -> Result<()> + Send + Sync + Clone + 'static) {
    for n in WORLDS {
        let f = f.clone();
        ranks::spmd(n, move |rank| f(rank.clone(), rank.world())).unwrap();
    }
}

#[test]
fn all_gather_and_all_to_all() {
    on_all_worlds(|_, g| {
        let (me, n) = (g.index(), g.len());
        let shapes: Vec<Shape> = (0..n).map(|i| ragged(i, 0)).collect();
        let got = g.all_gather(&part(me, 0, &shapes[me]), &shapes)?;
        assert_eq!(got.len(), n);
        (0..n).for_each(|i| assert_same(&got[i], &part(i, 0, &shapes[i])));

        let parts = (0..n).map(|to| part(me, to, &ragged(me, to))).collect();
        let shapes: Vec<Shape> = (0..n).map(|from| ragged(from, me)).collect();
        let got = g.all_to_all(parts, &shapes)?;
        (0..n).for_each(|from| assert_same(&got[from], &part(from, me, &shapes[from])));
        Ok(())
    });
}

#[test]
fn reduce_scatter_follows_the_tree() {
    on_all_worlds(|_, g| {
        let (me, n) = (g.index(), g.len());
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
            let shape = |to: usize| Shape::from([to * 5, 2]);
            let parts = (0..n).map(|to| part(me, to, &shape(to))).collect();
            let all: Vec<Tensor> = (0..n).map(|from| part(from, me, &shape(me))).collect();
            assert_same(&g.reduce_scatter(parts, op)?, &tree(op, &all));
        }
        Ok(())
    });
}

#[test]
fn all_reduce_small_and_large_follow_the_tree() {
    on_all_worlds(|_, g| {
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            for shape in [[0, 4], [1, 1], [7, 3], [128, 128], [600, 517]] {
                let shape = Shape::from(shape);
                let all: Vec<Tensor> = (0..g.len()).map(|from| part(from, 1, &shape)).collect();
                assert_same(&g.all_reduce(&all[g.index()], op)?, &tree(op, &all));
                let strided: Vec<Tensor> = all.iter().map(|x| x.transpose(0, 1).unwrap()).collect();
                let got = g.all_reduce(&strided[g.index()], op)?;
                assert_same(&got, &tree(op, &strided));
            }
        }
        Ok(())
    });
}

#[test]
fn all_reduce_in_every_dtype() {
    on_all_worlds(|_, g| {
        for dtype in DType::ALL {
            let values: f64 = (1..=g.len()).map(|r| r as f64).sum();
            let mine = Tensor::full(dtype, [40_000], (g.index() + 1) as f64);
            let want = if dtype == DType::Bool { 1.0 } else { values };
            assert!(g.all_reduce(&mine, ReduceOp::Sum)?.to_f64_vec().iter().all(|&x| x == want), "{dtype}");
        }
        Ok(())
    });
}

#[test]
fn broadcast_send_recv_barrier() {
    on_all_worlds(|_, g| {
        let (me, n, shape) = (g.index(), g.len(), Shape::from([2, 2]));
        for root in 0..n {
            let mine = part(me, root, &shape);
            assert_same(&g.broadcast(Some(&mine), root, DType::F32, &shape)?, &part(root, root, &shape));
        }
        for k in 0..3 {
            g.send(&part(me, k, &shape), (me + 1) % n)?;
        }
        for k in 0..3 {
            let from = (me + n - 1) % n;
            assert_same(&g.recv(from, DType::F32, &shape)?, &part(from, k, &shape));
        }
        g.barrier()
    });
}

#[test]
fn a_barrier_holds_everyone() {
    static COME: AtomicUsize = AtomicUsize::new(0);
    spmd(3, |rank| {
        sleep(Duration::from_millis(20 * rank.rank() as u64));
        COME.fetch_add(1, Ordering::SeqCst);
        rank.world().barrier()?;
        assert_eq!(COME.load(Ordering::SeqCst), 3);
        Ok(())
    })
    .unwrap();
}

#[test]
fn what_is_given_may_be_written_at_once() {
    on_all_worlds(|_, g| {
        let shapes = vec![Shape::from([50]); g.len()];
        for round in 0..20 {
            let mut x = Tensor::full(DType::I64, [50], (round * 10 + g.index()) as f64);
            let pending = g.all_gather_async(&x, &shapes);
            x.make_mut::<i64>()?.fill(-1);
            for (i, mut got) in pending.wait()?.into_iter().enumerate() {
                assert_eq!(got.to_vec::<i64>()?, vec![(round * 10 + i) as i64; 50]);
                got.make_mut::<i64>()?.fill(-2);
            }
            assert_eq!(x.to_vec::<i64>()?, vec![-1; 50]);
        }
        Ok(())
    });
}

#[test]
fn gathering_copies_nothing() {
    spmd(2, |rank| {
        let g = rank.world();
        let x = part(g.index(), 0, &Shape::from([4, 6])).transpose(0, 1)?;
        let got = g.all_gather(&x, &[Shape::from([6, 4]), Shape::from([6, 4])])?;
        assert!(got[g.index()].shares_storage(&x));
        assert_eq!(got[1 - g.index()].strides(), [1, 6], "a peer's strided view comes as it is");
        let sum = g.all_reduce(&Tensor::zeros(DType::F32, [1 << 16]), ReduceOp::Sum)?;
        let other = g.all_gather(&sum, &[sum.shape().clone(), sum.shape().clone()])?;
        assert!(other[0].shares_storage(&other[1]), "a large all-reduce has one result for all");
        Ok(())
    })
    .unwrap();
}

#[test]
fn several_in_flight_in_any_order_and_dropped() {
    on_all_worlds(|_, g| {
        let n = g.len();
        let large = 40_000;
        for round in 0..10 {
            let x = |k: usize, len| Tensor::full(DType::F64, [len], (round + k) as f64);
            let pending: Vec<_> = (0..6)
                .map(|k| g.all_reduce_async(&x(k, if k % 2 == 0 { 3 } else { large }), ReduceOp::Sum))
                .collect();
            // One rank drops a call that others wait for; a large all-reduce still needs its contribution.
            for (k, p) in pending.into_iter().enumerate().rev() {
                if (k + g.index()) % 3 == 0 {
                    drop(p);
                } else if (k + g.index()) % 7 == 6 {
                    std::mem::forget(p);
                } else {
                    assert_eq!(p.wait()?.to_f64_vec()[2], (n * (round + k)) as f64);
                }
            }
            drop(g.recv_async((g.index() + 1) % n, DType::U8, &Shape::from([1])));
            g.send(&Tensor::zeros(DType::U8, [1]), (g.index() + n - 1) % n)?;
        }
        g.barrier()
    });
}

#[test]
fn a_pending_gets_ready_by_itself() {
    ranks::spmd(2, |rank| {
        let g = rank.world();
        let pending = g.barrier_async();
        if rank.rank() == 0 {
            g.recv(1, DType::U8, &Shape::from([]))?;
            assert!(pending.is_ready());
        } else {
            g.send(&Tensor::scalar(1u8), 0)?;
        }
        pending.wait()
    })
    .unwrap();
}

#[test]
fn overlapping_groups() {
    ranks::spmd(5, |rank| {
        let me = rank.rank();
        let low = (me < 3).then(|| rank.group(&[0, 1, 2], "low")).transpose()?;
        let high = (me >= 2).then(|| rank.group(&[4, 2, 3], "high")).transpose()?;
        let twin = (me < 3).then(|| rank.group(&[0, 1, 2], "twin")).transpose()?;
        let sum = |g: &Group| g.all_reduce(&Tensor::scalar(me as i64), ReduceOp::Sum)?.item();
        for _ in 0..50 {
            if let (Some(low), Some(twin)) = (&low, &twin) {
                let first = low.all_reduce_async(&Tensor::scalar(1i64), ReduceOp::Sum);
                assert_eq!(sum(twin)?, 3.0);
                assert_eq!(first.wait()?.item()?, 3.0);
            }
            if let Some(high) = &high {
                assert_eq!(sum(high)?, 9.0);
                assert_eq!(high.ranks()[high.index()], me);
                assert_eq!(high.to_string(), "high{4, 2, 3}");
                let root =
                    high.broadcast(Some(&Tensor::scalar(me as i64)), 0, DType::I64, &Shape::from([]))?;
                assert_eq!(root.item()?, 4.0);
            }
        }
        // The same ranks and name are the same group, with one numbering.
        if me < 3 {
            assert_eq!(sum(&rank.group(&[0, 1, 2], "low")?)?, 3.0);
        }
        rank.world().barrier()
    })
    .unwrap();
}

#[test]
fn refusals_say_why() {
    spmd(2, |rank| {
        let g = rank.world();
        let me = g.index();
        let text = |e: Result<()>| e.unwrap_err().to_string();
        let s = |n: usize| Shape::from([n]);
        let x = Tensor::zeros(DType::F32, [3]);
        assert_eq!(
            text(g.all_gather(&x, &[s(3)]).map(drop)),
            format!(
                "all_gather: the shapes are not one per member; got 1 shapes for 2 members; the group is \
                 world{{0, 1}}, this is member {me}"
            )
        );
        assert!(text(g.all_gather(&x, &[s(2), s(2)]).map(drop)).contains("f32[3], announced [2]"));
        assert!(text(g.reduce_scatter(vec![x.clone()], ReduceOp::Sum).map(drop)).contains("1 parts for 2"));
        let mixed = vec![x.clone(), Tensor::zeros(DType::F64, [3])];
        assert!(text(g.all_to_all(mixed, &[s(3), s(3)]).map(drop)).contains("f32[3], f64[3]"));
        assert!(text(g.send(&x, 2)).contains("member 2 of 2"));
        assert!(
            text(g.broadcast(None, me, DType::F32, &s(3)).map(drop)).contains("no tensor, announced f32[3]")
        );
        let group = |ranks: &[usize]| text(rank.group(ranks, "dp").map(drop));
        assert_eq!(
            group(&[me, 7]),
            format!("group: no such rank; got dp[{me}, 7] on rank {me}; ranks are 0 to 1")
        );
        assert!(group(&[me, me]).contains("a rank is named twice"));
        assert!(group(&[1 - me]).contains("that it belongs to"));
        let long = text(rank.group(&[0, 1], &"n".repeat(257)).map(drop));
        assert_eq!(long, "group: a group's name has at most 256 bytes; got 257 bytes");
        g.barrier()
    })
    .unwrap();
    assert_eq!(
        spmd(0, |_| Ok(())).unwrap_err().to_string(),
        "spmd: a world has at least one rank; got 0 ranks"
    );
    assert_eq!(
        Spmd::new(1).threads_per_rank(0).run(|_| Ok(())).unwrap_err().to_string(),
        "spmd: a rank computes on one thread or more; got 0 threads per rank; give 1"
    );
}

/// Returns the errors of all ranks; none may succeed.
fn errors(n: usize, f: impl Fn(&Rank) -> Result<()> + Send + Sync + 'static) -> Vec<Error> {
    let run = Spmd::new(n).deadline(Duration::from_millis(300));
    run.run(move |rank| Ok(f(&rank).unwrap_err())).unwrap()
}

#[test]
fn ranks_that_disagree_are_named_on_all() {
    let call = "call".to_string();
    let differs = |f: fn(&Rank) -> Result<()>, brought: [&str; 2]| {
        for error in errors(2, f) {
            let Error::Comm(fault) = &error else { panic!("{error}") };
            let CommFault::Mismatch { rank, brought: b, other, other_brought: a, .. } = &**fault else {
                panic!("{error}")
            };
            assert_eq!((*other, a.as_str(), *rank, b.as_str()), (0, brought[0], 1, brought[1]), "{call}");
        }
    };
    let sum = ReduceOp::Sum;
    differs(
        |r| match r.rank() {
            0 => r.world().all_reduce(&Tensor::zeros(DType::F32, [1024]), ReduceOp::Sum).map(drop),
            _ => r.world().barrier(),
        },
        ["all_reduce(sum) f32[1024]", "barrier"],
    );
    differs(
        |r| r.world().all_reduce(&Tensor::zeros(DType::F32, [3 + r.rank()]), ReduceOp::Sum).map(drop),
        ["all_reduce(sum) f32[3]", "all_reduce(sum) f32[4]"],
    );
    differs(
        |r| r.world().all_reduce(&Tensor::zeros(DType::ALL[r.rank()], [3]), ReduceOp::Sum).map(drop),
        ["all_reduce(sum) f32[3]", "all_reduce(sum) f64[3]"],
    );
    differs(
        |r| {
            let op = if r.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
            r.world().all_reduce(&Tensor::zeros(DType::F32, [3]), op).map(drop)
        },
        [&format!("all_reduce({sum}) f32[3]"), "all_reduce(max) f32[3]"],
    );
    differs(
        |r| {
            let x = Tensor::zeros(DType::F32, [3]);
            r.world().broadcast(Some(&x), r.rank(), DType::F32, x.shape()).map(drop)
        },
        ["broadcast(root 0) f32[3]", "broadcast(root 1) f32[3]"],
    );
    differs(
        |r| {
            let shapes = [Shape::from([3]), Shape::from([2 + 2 * r.rank()])];
            r.world().all_gather(&Tensor::zeros(DType::F32, &shapes[r.rank()]), &shapes).map(drop)
        },
        ["all_gather f32{[3], [2]}", "all_gather f32{[3], [4]}"],
    );
    differs(
        |r| {
            let parts = vec![Tensor::zeros(DType::F32, [3]), Tensor::zeros(DType::F32, [3 + r.rank()])];
            r.world().reduce_scatter(parts, ReduceOp::Sum).map(drop)
        },
        ["reduce_scatter(sum) f32[3]", "reduce_scatter(sum) f32{[3], [4]}"],
    );
    differs(
        |r| {
            let parts = vec![Tensor::zeros(DType::F32, [3]); 2];
            let shapes = [Shape::from([3 + r.rank()]), Shape::from([3])];
            r.world().all_to_all(parts, &shapes).map(drop)
        },
        ["all_to_all f32[3]", "all_to_all f32[3] for f32{[4], [3]}"]
            .map(|s| s.replace("for f32", "for "))
            .each_ref()
            .map(String::as_str),
    );
}

#[test]
fn a_message_that_is_not_expected() {
    let texts = errors(2, |r| match r.rank() {
        0 => {
            r.world().send(&Tensor::zeros(DType::F32, [2]), 1)?;
            r.world().barrier()
        }
        _ => r.world().recv(0, DType::F32, &Shape::from([3])).map(drop),
    });
    // The sender's last completed call depends on timing.
    let want = "recv #0 on group world{0, 1}: rank 1 brought recv f32[3], rank 0 brought send f32[2]; every rank must \
                make the same calls in the same order; last completed: ";
    assert!(texts[1].to_string().starts_with(want), "{}", texts[1]);
}

#[test]
fn a_failed_group_stays_failed() {
    let run = Spmd::new(3).deadline(Duration::from_millis(300));
    run.run(|rank| {
        let g = rank.group(&[0, 1, 2], "dp")?;
        let first =
            g.all_reduce(&Tensor::zeros(DType::F32, [2 + rank.rank() / 2]), ReduceOp::Sum).unwrap_err();
        let start = Instant::now();
        let second = g.barrier().unwrap_err();
        assert!(start.elapsed() < Duration::from_millis(100));
        let Error::Comm(fault) = &second else { panic!("{second}") };
        assert!(matches!(**fault, CommFault::Mismatch { rank: 2, .. }), "{second}");
        assert_eq!(first, second);
        // Other groups still work.
        rank.world().barrier()
    })
    .unwrap();
}

#[test]
fn a_rank_that_stays_away_is_named() {
    let run = Spmd::new(3).deadline(Duration::from_millis(200));
    let texts = run.run(|rank| {
        if rank.rank() == 1 {
            sleep(Duration::from_millis(500));
        }
        Ok(rank.world().all_reduce(&Tensor::zeros(DType::F32, [4]), ReduceOp::Sum).unwrap_err().to_string())
    });
    let texts = texts.unwrap();
    let waited = |rank: usize| {
        format!(
            "all_reduce #0 on group world{{0, 1, 2}}: rank(s) [1] did not come within 0.2 s; rank {rank} waited \
             with all_reduce(sum) f32[4]; last completed: rank(s) [0, 1, 2] nothing"
        )
    };
    assert_eq!((&texts[0], &texts[2]), (&waited(0), &waited(2)));
    assert!(texts[1] == waited(0) || texts[1] == waited(2), "{}", texts[1]);
}

#[test]
fn a_rank_that_has_ended_is_not_waited_for() {
    let start = Instant::now();
    let error = spmd(3, |rank| if rank.rank() == 2 { Ok(()) } else { rank.world().barrier() }).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5), "the deadline of 60 s was not waited for");
    let Error::Rank { rank, .. } = error else { panic!("{error}") };
    assert_eq!(
        error.to_string(),
        format!(
            "rank {rank}: barrier #0 on group world{{0, 1, 2}}: rank(s) [2] had ended; rank {rank} waited with barrier; \
             last completed: rank(s) [0, 1, 2] nothing"
        )
    );
    let error = spmd(2, |r| {
        if r.rank() == 1 { Ok(()) } else { r.world().recv(1, DType::F32, &Shape::from([])).map(drop) }
    });
    assert!(error.unwrap_err().to_string().contains("rank(s) [1] had ended"));
}

#[test]
fn the_first_failure_is_reported() {
    let mut random = 12345u64;
    for k in 0..100 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (n, bits) = (2 + (random >> 33) as usize % 4, random >> 40);
        let (culprit, after, panics) = (bits as usize % n, (bits >> 8) % 6, bits & 0x8000 != 0);
        let error = spmd(n, move |rank| {
            let g = rank.world();
            for i in 0..8 {
                if rank.rank() == culprit && i == after {
                    if panics {
                        std::panic::resume_unwind(Box::new(format!("boom {k}")));
                    }
                    return Err(Error::invalid("step", "went wrong", "", ""));
                }
                let x = Tensor::zeros(DType::F32, [if i % 2 == 0 { 4 } else { 20_000 }]);
                let pending = g.all_reduce_async(&x, ReduceOp::Sum);
                g.all_reduce(&x, ReduceOp::Max)?;
                pending.wait()?;
            }
            Ok(())
        });
        let want = if panics { format!("panicked: boom {k}") } else { "step: went wrong".into() };
        assert_eq!(error.unwrap_err().to_string(), format!("rank {culprit}: {want}"));
    }
}

#[test]
fn the_others_hear_who_failed() {
    let heard = std::sync::Arc::new(std::sync::Mutex::new(String::new()));
    let hears = heard.clone();
    let error = spmd(2, move |rank| {
        if rank.rank() == 1 {
            rank.world().barrier()?;
            std::panic::resume_unwind(Box::new("out of luck"));
        }
        rank.world().barrier()?;
        let error = rank.world().barrier().unwrap_err();
        assert!(error.is_echo());
        *hears.lock().unwrap() = error.to_string();
        Err::<(), _>(error)
    });
    assert_eq!(
        *heard.lock().unwrap(),
        "barrier #1 on group world{0, 1}: given up, because rank 1 failed: panicked: out of luck"
    );
    assert_eq!(
        error.unwrap_err(),
        Error::Rank { rank: 1, cause: Box::new(Failure::Panic("out of luck".into())) }
    );
}

#[test]
fn a_stuck_rank_is_left_behind() {
    let start = Instant::now();
    let error = Spmd::new(2).deadline(Duration::from_millis(100)).run(|rank| {
        if rank.rank() == 0 {
            rank.engine().abort(&Error::invalid("test", "gives up", "", ""));
            sleep(Duration::from_secs(20));
        }
        rank.world().barrier()
    });
    assert!(start.elapsed() < Duration::from_secs(5));
    let Error::Rank { rank: 0, cause } = error.unwrap_err() else { panic!("rank 0 is stuck") };
    assert!(matches!(*cause, Failure::Stuck(_)), "{cause}");
}

#[test]
fn more_ranks_than_cores() {
    let n = 24;
    let sums = spmd(n, |rank| {
        let mut sum = 0.0;
        for _ in 0..50 {
            sum += rank.world().all_reduce(&Tensor::scalar(1i64), ReduceOp::Sum)?.item()?;
        }
        Ok(sum)
    });
    assert_eq!(sums.unwrap(), vec![50.0 * n as f64; n]);
}
