//! Times collectives over MPI or threads, at 4 KiB and 64 MiB: microseconds per call, in the fastest and in the median
//! round. One program does both: `cargo bench --features mpi --bench mpi` runs threads, its binary under `mpirun -n 2`
//! processes.
//!
//! A size is the input per rank.

use std::time::Instant;

use isoshard::Result;
use isoshard::comm::{Group, Launch, Process, Rank, spmd};
use isoshard::tensor::{DType, ReduceOp, Tensor};

/// A collective, given the group and this rank's input.
type Collective = fn(&Group, &Tensor) -> Result<()>;

const CASES: [(&str, Collective); 5] = [
    ("all_gather", |g, x| g.all_gather(x, &vec![x.shape().clone(); g.len()]).map(drop)),
    ("reduce_scatter", |g, x| g.reduce_scatter(parts(g, x)?, ReduceOp::Sum).map(drop)),
    ("all_to_all", |g, x| {
        let parts = parts(g, x)?;
        let shapes = vec![parts[g.index()].shape().clone(); g.len()];
        g.all_to_all(parts, &shapes).map(drop)
    }),
    ("all_reduce", |g, x| g.all_reduce(x, ReduceOp::Sum).map(drop)),
    ("barrier", |g, _| g.barrier()),
];

fn main() -> Result<()> {
    let uncompared = std::env::args().any(|a| a == "--uncompared");
    match Launch::from_env()? {
        Some(launch) => Process::new(launch).mpi().compared(!uncompared).run(measure),
        None => spmd(2, measure).map(drop),
    }
}

fn measure(rank: Rank) -> Result<()> {
    let g = rank.world();
    if g.index() == 0 {
        println!(
            "{:<16}{:>10}{:>14}{:>14}   {} ranks",
            "collective",
            "bytes",
            "fastest us",
            "median us",
            g.len()
        );
    }
    for (name, collective) in CASES {
        for (len_bytes, calls, rounds) in [(4, 2000, 9), (4 << 10, 2000, 9), (64 << 20, 2, 9)] {
            if name == "barrier" && len_bytes > 4 {
                continue;
            }
            let x = Tensor::full(DType::F32, [(len_bytes / 4usize).max(1)], 1.0);
            let mut micros = Vec::new();
            for _ in 0..rounds {
                g.barrier()?;
                let start = Instant::now();
                (0..calls).try_for_each(|_| collective(&g, &x))?;
                g.barrier()?;
                micros.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls));
            }
            micros.sort_by(f64::total_cmp);
            if g.index() == 0 {
                println!("{name:<16}{len_bytes:>10}{:>14.2}{:>14.2}", micros[0], micros[rounds / 2]);
            }
        }
    }
    Ok(())
}

fn parts(g: &Group, x: &Tensor) -> Result<Vec<Tensor>> {
    let (n, len) = (g.len(), x.numel());
    let start = |i: usize| i * len / n;
    (0..n).map(|i| x.narrow(0, start(i), start(i + 1) - start(i))).collect()
}
