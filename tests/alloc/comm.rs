//! After its first steps a program allocates no memory for collectives: the thread engine reuses slots, requests and
//! small results. Only the list that a gather or an exchange returns is allocated per call.

use std::sync::{Arc, Barrier};

use isoshard::Result;
use isoshard::comm::{Group, Pending, Spmd};
use isoshard::tensor::{DType, ReduceOp, Shape, Tensor};

use crate::calls;

const BYTES: usize = 4 << 10;
const CALLS_LEN: usize = 1000;
const AHEAD: usize = 8;

/// Returns this thread's allocations in [`CALLS_LEN`] runs of `step`, after some runs that were in flight together.
/// Ranks may be a call or a few messages apart, and each call uses a slot; `all` synchronises the ranks by other
/// means, so that the same slots are in use.
fn steady<T>(
    all: &Barrier,
    group: &Group,
    step: impl Fn(&mut Vec<Vec<Tensor>>) -> Pending<T>,
    given: usize,
) -> Result<usize> {
    let part = Tensor::full(DType::F32, [BYTES / 4], 1.0);
    let mut parts = vec![vec![part.clone(); group.len()]; given];
    for _ in 0..2 {
        let flights: Vec<Pending<T>> = (0..AHEAD).map(|_| step(&mut parts)).collect();
        flights.into_iter().try_for_each(|flight| flight.wait().map(drop))?;
        all.wait();
    }
    let before = calls();
    for _ in 0..CALLS_LEN {
        step(&mut parts).wait()?;
    }
    let used = calls() - before;
    all.wait();
    drop(part);
    Ok(used)
}

#[test]
fn steady_collectives_take_no_memory() {
    for n in [2, 3, 5] {
        let all = Arc::new(Barrier::new(n));
        let counts = Spmd::new(n).run(move |rank| {
            let (g, x) = (rank.world(), Tensor::full(DType::F32, [BYTES / 4], 1.0));
            let (shapes, shape) = (vec![x.shape().clone(); rank.world_len()], Shape::from([BYTES / 4]));
            let given = CALLS_LEN + 2 * AHEAD;
            Ok([
                ("barrier", 0, steady(&all, &g, |_| g.barrier_async(), 0)?),
                ("all_reduce", 0, steady(&all, &g, |_| g.all_reduce_async(&x, ReduceOp::Sum), 0)?),
                (
                    "broadcast",
                    0,
                    steady(&all, &g, |_| g.broadcast_async(Some(&x), 0, DType::F32, &shape), 0)?,
                ),
                // The caller made the parts beforehand.
                ("reduce_scatter", 0, {
                    let step = |parts: &mut Vec<Vec<Tensor>>| {
                        g.reduce_scatter_async(parts.pop().expect("enough"), ReduceOp::Sum)
                    };
                    steady(&all, &g, step, given)?
                }),
                ("all_gather", CALLS_LEN, steady(&all, &g, |_| g.all_gather_async(&x, &shapes), 0)?),
                ("all_to_all", CALLS_LEN, {
                    let step = |parts: &mut Vec<Vec<Tensor>>| {
                        g.all_to_all_async(parts.pop().expect("enough"), &shapes)
                    };
                    steady(&all, &g, step, given)?
                }),
                ("send and receive", 0, {
                    let me = g.index();
                    let step = |_: &mut Vec<Vec<Tensor>>| {
                        g.send(&x, (me + 1) % g.len()).expect("nobody waits to send");
                        g.recv_async((me + g.len() - 1) % g.len(), DType::F32, &shape)
                    };
                    steady(&all, &g, step, 0)?
                }),
            ])
        });
        for (rank, counts) in counts.unwrap().iter().enumerate() {
            for (name, bound, used) in counts {
                assert!(
                    used <= bound,
                    "{name} on rank {rank} of {n}: {used} allocations in {CALLS_LEN} calls"
                );
            }
        }
    }
}
