//! Arguments and functions at the edge: each is refused by name, or ends every rank.

use std::panic::{panic_any, resume_unwind};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use isoshard::comm::{Call, Lineage, Reduce, Route, Spmd, spmd};
use isoshard::tensor::{DType, FoldOrder, FoldStep, ReduceOp, Shape, Tensor};
use isoshard::{Error, Failure};

#[test]
fn an_endless_deadline_is_a_deadline() {
    let endless = || Spmd::new(2).deadline(Duration::MAX);
    assert_eq!(endless().run(|rank| rank.world().barrier()), Ok(vec![(), ()]));
    let failed = endless().run(|rank| match rank.rank() {
        0 => rank.world().barrier(),
        _ => Err(Error::other("no data")),
    });
    assert_eq!(failed.unwrap_err().to_string(), "rank 1: no data");
}

#[test]
fn names_that_no_thread_can_have_and_worlds_without_end_are_refused() {
    let named = Spmd::new(2).name("a\0b").run(|_| Ok(())).unwrap_err();
    assert_eq!(named.to_string(), r#"spmd: the name of a thread has no character NUL; got "a\0b""#);
    let many = Spmd::new(1 << 40).run(|_| Ok(())).unwrap_err().to_string();
    assert_eq!(
        many,
        "spmd: a process has fewer threads; got 1099511627776 ranks; use at most 65536, or DryRun"
    );
}

#[test]
fn a_panic_in_a_function_of_the_builder_is_an_error() {
    let chosen = Spmd::new(2).on(|_| resume_unwind(Box::new("no such device"))).run(|_| Ok(()));
    let said = "spmd: the function that chooses devices panicked; got no such device";
    assert_eq!(chosen.unwrap_err().to_string(), said);

    let ended = Arc::new(());
    let token = ended.clone();
    let spmd =
        Spmd::new(2).patience(Duration::from_millis(5)).on_slow(|_| resume_unwind(Box::new("no pager")));
    let reported = spmd.run(move |rank| {
        let _token = &token;
        if rank.rank() == 1 {
            sleep(Duration::from_millis(300));
        }
        rank.world().barrier()
    });
    assert_eq!(reported.unwrap_err().to_string(), "spmd: on_slow panicked; got no pager");
    assert_eq!(Arc::strong_count(&ended), 1, "the ranks have ended");
}

/// A value whose `Drop` panics.
struct Explosive(&'static str);

impl Drop for Explosive {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            resume_unwind(Box::new(self.0));
        }
    }
}

#[test]
fn a_panic_while_captured_values_are_dropped_is_a_ranks() {
    let captured = Explosive("the file is gone");
    let error = Spmd::new(3).run(move |rank| {
        let _captured = &captured;
        rank.world().barrier()
    });
    let Err(Error::Rank { cause, .. }) = error else { panic!("{error:?}") };
    let text = "while a captured value was dropped: the file is gone";
    assert_eq!(*cause, Failure::Panic(text.into()));
}

/// Ranks may end before their caller has let go of their program.
#[test]
fn a_panic_of_captured_values_is_a_ranks_if_the_caller_drops_them_last() {
    for ranks in [1, 2] {
        for _ in 0..200 {
            let captured = Explosive("the file is gone");
            let ends = Spmd::new(ranks).run_each(move |_| {
                let _captured = &captured;
                Ok(())
            });
            let text = "while a captured value was dropped: the file is gone";
            let failed = ends.unwrap().into_iter().filter_map(Result::err).collect::<Vec<_>>();
            assert_eq!(failed, [Failure::Panic(text.into())]);
        }
    }
}

#[test]
fn a_payload_whose_drop_panics_ends_all_ranks() {
    let began = Instant::now();
    let ends = Spmd::new(2).deadline(Duration::from_secs(20)).run_each(|rank| match rank.rank() {
        0 => rank.world().barrier(),
        _ => panic_any(Explosive("a second panic")),
    });
    let ends = ends.unwrap();
    assert_eq!(ends[1], Err(Failure::Panic("without a message".into())));
    assert!(ends[0].as_ref().unwrap_err().to_string().contains("rank 1 failed"), "{ends:?}");
    assert!(began.elapsed() < Duration::from_secs(10), "no rank waits for the deadline");
}

#[test]
fn a_rank_joins_a_round_of_survivors_once() {
    let ends = Spmd::new(2).deadline(Duration::from_secs(1)).on_slow(|_| ()).run_each(|rank| {
        if rank.rank() == 0 {
            sleep(Duration::from_millis(300));
            return rank.engine().survivors().map(|ranks| vec![Ok(ranks)]);
        }
        let ask = |_| {
            let engine = rank.engine().clone();
            std::thread::spawn(move || engine.survivors().map_err(|e| e.to_string()))
        };
        Ok([0, 1].map(ask).map(|thread| thread.join().expect("no panic")).to_vec())
    });
    let mut asked = ends.unwrap().pop().unwrap().unwrap();
    asked.sort_by_key(Result::is_err);
    let said = "survivors: another thread of this rank has joined the round; got rank 1; let one thread of a rank ask";
    assert_eq!(asked, [Ok(vec![0, 1]), Err(said.to_string())]);
}

#[test]
fn the_raw_channel_refuses_reductions_that_do_not_fit_the_call() {
    let ends = spmd(2, |rank| {
        let channel = rank.engine().open(&[0, 1], "raw")?;
        let x = [Tensor::zeros(DType::F32, [3]), Tensor::zeros(DType::F32, [3])];
        let shapes = [Shape::from([3]), Shape::from([3])];
        let gather = Call {
            name: "all_reduce",
            route: Route::Gather,
            op: Some(ReduceOp::Sum),
            dtype: DType::F32,
            outgoing: &x[..1],
            incoming: &shapes,
            lineage: Lineage::NONE,
        };
        let scatter = Call { name: "reduce_scatter", route: Route::AllToAll, outgoing: &x, ..gather };
        let sum = |members, shape: &[usize]| Reduce::halving(ReduceOp::Sum, members, shape.into());
        let push = |operand, node| FoldStep::Push { operand, node };
        let nodes = FoldOrder::new(vec![2, 1], vec![push(0, 1), push(1, 0), FoldStep::Join, push(0, 0)]);
        let nodes = Reduce { op: ReduceOp::Sum, order: Arc::new(nodes), shape: [3].into() };
        let columns = Tensor::zeros(DType::F32, [3, 2]).transpose(0, 1)?;
        let mut said = Vec::new();
        for (reduce, wrong) in [
            (sum(3, &[3]), gather),
            (sum(1, &[3]), gather),
            (sum(2, &[4]), gather),
            (nodes.clone(), gather),
            (sum(2, &[3]), Call { outgoing: &x, ..gather }),
            (sum(2, &[3]), Call { outgoing: &[], ..gather }),
            (sum(2, &[3]), Call { incoming: &shapes[..1], ..gather }),
            (sum(2, &[3]), Call { dtype: DType::F64, ..gather }),
            (
                sum(2, &[2, 3]),
                Call { outgoing: &[columns], incoming: &[[2, 3].into(), [2, 3].into()], ..gather },
            ),
        ] {
            said.push(channel.all_reduce(reduce, wrong).map(drop).unwrap_err().to_string());
        }
        for (reduce, wrong) in [
            (sum(5, &[3]), scatter),
            (nodes, scatter),
            (sum(2, &[7]), scatter),
            (sum(2, &[3]), Call { outgoing: &x[..1], ..scatter }),
        ] {
            said.push(channel.reduce_scatter(reduce, wrong).map(drop).unwrap_err().to_string());
        }
        assert!(
            said.iter().all(|e| e.starts_with("all_reduce: ") || e.starts_with("reduce_scatter: ")),
            "{said:?}"
        );
        // The channel still works.
        let sums =
            [channel.all_reduce(sum(2, &[3]), gather)?, channel.reduce_scatter(sum(2, &[3]), scatter)?];
        sums.into_iter().try_for_each(|sum| sum.wait().map(drop))?;
        Ok(said)
    })
    .unwrap();
    assert_eq!(ends[0].len(), 13);
    assert_eq!(
        ends[0][0],
        "all_reduce: the reduction's order is another group's; got an order of 3 members in a group of 2"
    );
    assert_eq!(
        ends[0][2],
        "all_reduce: a member's part has another shape than the reduction's; got [3] of member 0, not [4]"
    );
}

/// Engines write to these places as bytes.
#[test]
fn the_raw_channel_refuses_places_that_are_not_the_parts() {
    let ends = spmd(2, |rank| {
        let channel = rank.engine().open(&[0, 1], "raw")?;
        let x = [Tensor::zeros(DType::F32, [3])];
        let shapes = [Shape::from([3]), Shape::from([3])];
        let (name, route, dtype) = ("all_gather", Route::Gather, DType::F32);
        let call =
            Call { name, route, op: None, dtype, outgoing: &x, incoming: &shapes, lineage: Lineage::NONE };
        let place = || Tensor::zeros(DType::F32, [3]);
        let shared = place();
        let said = [
            (call, vec![place()]),
            (Call { outgoing: &[], ..call }, vec![place(), place()]),
            (Call { route: Route::Barrier, ..call }, vec![place(), place()]),
            // One element, which stands for three.
            (call, vec![place(), Tensor::zeros(DType::F32, [1]).expand([3])?]),
            (call, vec![Tensor::zeros(DType::F32, [3, 2]).narrow(1, 0, 1)?.squeeze(1)?, place()]),
            (call, vec![place(), Tensor::zeros(DType::F32, [2])]),
            (call, vec![Tensor::zeros(DType::I32, [3]), place()]),
            (call, vec![place(), shared.clone()]),
        ]
        .map(|(call, into)| channel.gather_into(call, into).map(drop).unwrap_err().to_string());
        let parts = channel.gather_into(call, vec![place(), place()])?.wait()?;
        assert!(parts.iter().all(|part| part.to_f64_vec() == [0.0; 3]));
        drop(shared);
        Ok(said)
    });
    for said in ends.unwrap() {
        let lists = "all_gather: a gather sends one tensor, and has a shape and a place per member; got ";
        assert!(said[..3].iter().all(|text| text.starts_with(lists)), "{said:#?}");
        let place = "all_gather: a place has another shape, dtype or device than its part, is not contiguous, or is \
                     shared; got ";
        assert!(said[3..].iter().all(|text| text.starts_with(place)), "{said:#?}");
    }
}
