//! Collectives of the thread engine on 2 ranks, at 4 KiB and 64 MiB: microseconds for a call, the fastest of a few
//! rounds and the median round. `cargo bench --bench collectives [-- --json]`.
//!
//! Sizes are what one rank gives, for all_gather as for reduce_scatter: its whole input.

use std::time::Instant;

use isoshard::comm::{Group, spmd};
use isoshard::tensor::{DType, ReduceOp, Shape, Tensor};
use isoshard::{Error, Result};

const RANKS: usize = 2;
/// A collective on one rank's input.
type Collective = fn(&Group, &Tensor) -> Result<()>;

const CASES: [(&str, Collective); 6] = [
    ("all_gather", |g, x| g.all_gather(x, &vec![x.shape().clone(); g.len()]).map(drop)),
    ("reduce_scatter", |g, x| g.reduce_scatter(halves(g, x)?, ReduceOp::Sum).map(drop)),
    ("all_to_all", |g, x| {
        let parts = halves(g, x)?;
        let shapes: Vec<Shape> = parts.iter().map(|p| p.shape().clone()).collect();
        g.all_to_all(parts, &shapes).map(drop)
    }),
    ("all_reduce", |g, x| g.all_reduce(x, ReduceOp::Sum).map(drop)),
    ("barrier", |g, _| g.barrier()),
    // What a gather costs whose parts are then joined into one tensor.
    ("all_gather_joined", |g, x| {
        let parts = g.all_gather(x, &vec![x.shape().clone(); g.len()])?;
        let len = x.numel();
        let out = Tensor::build([len * parts.len()], |out: &mut [f32]| {
            for (out, part) in out.chunks_mut(len).zip(&parts) {
                out.copy_from_slice(part.as_slice::<f32>().expect("contiguous f32"));
            }
        });
        std::hint::black_box(out);
        Ok(())
    }),
];

fn main() -> Result<()> {
    let json = std::env::args().any(|a| a == "--json");
    if !json {
        println!("{:<24}{:>10}{:>14}{:>14}", "collective, 2 ranks", "bytes", "fastest us", "median us");
    }
    for (name, collective) in CASES {
        for (len_bytes, calls, rounds) in [(4 << 10, 2000, 15), (64 << 20, 2, 15)] {
            if name == "barrier" && len_bytes > 4 << 10 {
                continue;
            }
            let rounds = spmd(RANKS, move |rank| {
                let (g, x) = (rank.world(), Tensor::full(DType::F32, [len_bytes / 4], 1.0));
                let mut micros = Vec::new();
                for _ in 0..rounds {
                    g.barrier()?;
                    let start = Instant::now();
                    (0..calls).try_for_each(|_| collective(&g, &x))?;
                    g.barrier()?;
                    micros.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls));
                }
                micros.sort_by(f64::total_cmp);
                Ok(micros)
            })?;
            let micros = rounds.first().ok_or_else(|| Error::invalid("bench", "no ranks", "", ""))?;
            let (fastest, median) = (micros[0], micros[micros.len() / 2]);
            let case = format!("{name}/{len_bytes}B/{RANKS}");
            if json {
                println!(r#"{{"bench":"collectives","case":"{case}","value":{median:.2},"unit":"us"}}"#);
            } else {
                println!("{name:<24}{len_bytes:>10}{fastest:>14.2}{median:>14.2}");
            }
        }
    }
    Ok(())
}

fn halves(g: &Group, x: &Tensor) -> Result<Vec<Tensor>> {
    let len = x.numel() / g.len();
    (0..g.len()).map(|i| x.narrow(0, i * len, len)).collect()
}
