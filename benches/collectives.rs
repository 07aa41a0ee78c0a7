//! Times collectives and redistributions over the thread engine on 2 ranks, at 4 KiB, 1 MiB and 64 MiB: the median and
//! the fastest call on rank 0, in microseconds. `cargo bench --bench collectives [-- --json]`; `python3
//! benches/torch/collectives.py` runs it beside PyTorch's gloo.
//!
//! A size is the input per rank of all-reduce, all-to-all and reduce-scatter, the result per rank of all-gather, and
//! the global tensor of a redistribution. A call is timed from its arguments until its result is dropped; no output is
//! allocated beforehand. `all_gather` and `all_to_all` return the peers' own tensors; the `joined` cases copy these
//! into one contiguous tensor, as other libraries do. A redistribution returns a `DTensor` whose local tensor is
//! contiguous and this rank's own (after `P -> R` the ranks share it, and writing copies it); its plan is cached. In
//! `copy`, both ranks copy the bytes into memory from the pool, for scale.

use std::time::Instant;

use isoshard::comm::{Group, Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Placement};
use isoshard::tensor::{DType, ReduceOp, Shape, Tensor};
use isoshard::{Error, Result};

const RANKS: usize = 2;

/// Sizes in bytes, each with the side of a square f32 matrix of that size.
const SIZES: [(usize, usize); 3] = [(4 << 10, 32), (1 << 20, 512), (64 << 20, 4096)];

/// A collective, given the group and this rank's input.
type Collective = fn(&Group, &Tensor) -> Result<()>;

const COLLECTIVES: [(&str, Collective); 9] = [
    ("copy", |_, x| x.to_owned_copy().map(drop)),
    ("all_gather", |g, x| gather(g, x).map(drop)),
    ("all_gather joined", |g, x| joined(x, &gather(g, x)?)),
    ("reduce_scatter", |g, x| g.reduce_scatter(halves(g, x)?, ReduceOp::Sum).map(drop)),
    ("reduce_scatter to one", |g, x| {
        let empty = x.narrow(0, 0, 0)?;
        g.reduce_scatter(vec![empty, x.clone()], ReduceOp::Sum).map(drop)
    }),
    ("all_to_all", |g, x| exchange(g, x).map(drop)),
    ("all_to_all joined", |g, x| joined(x, &exchange(g, x)?)),
    ("all_reduce", |g, x| g.all_reduce(x, ReduceOp::Sum).map(drop)),
    ("barrier", |g, _| g.barrier()),
];

const MOVES: [(&str, &str); 6] = [
    ("(S0)", "(S1)"),
    ("(S0)", "(R)"),
    ("(S1)", "(R)"),
    ("(P(sum))", "(S0)"),
    ("(P(sum))", "(S1)"),
    ("(P(sum))", "(R)"),
];

fn main() -> Result<()> {
    let json = std::env::args().any(|a| a == "--json");
    if !json {
        println!("{:<28}{:>10}{:>14}{:>14}", "2 ranks", "bytes", "median us", "fastest us");
    }
    for (bytes, side) in SIZES {
        let calls = [3000, 300, 21][SIZES.iter().position(|s| s.0 == bytes).expect("one of them")];
        for (name, collective) in COLLECTIVES {
            if name != "barrier" || bytes == SIZES[0].0 {
                let micros = spmd(RANKS, move |rank| {
                    let x = Tensor::full(DType::F32, [bytes / 4], 1.0);
                    timed(&rank, calls, || collective(&rank.world(), &x))
                })?;
                report(json, name, bytes, micros)?;
            }
        }
        for (from, to) in MOVES {
            let micros = spmd(RANKS, move |rank| redistributed(&rank, (from, to), side, calls))?;
            let plain = |layout: &str| layout.trim_matches(['(', ')']).replace("P(sum", "P");
            report(json, &format!("{} -> {}", plain(from), plain(to)), bytes, micros)?;
        }
    }
    Ok(())
}

fn redistributed(rank: &Rank, (from, to): (&str, &str), side: usize, calls: usize) -> Result<Vec<f64>> {
    let mesh = DeviceMesh::new(rank, &[("x", RANKS)])?;
    let (from, to): (Layout, Layout) = (from.parse()?, to.parse()?);
    let whole = Tensor::full(DType::F32, [side, side], 1.0);
    let x = match from.placements()[0] {
        Placement::Partial(_) => DTensor::from_local(&mesh, whole, [side, side], from)?,
        _ => DTensor::distribute(&mesh, &whole, from)?,
    };
    assert!(x.redistribute(to.clone())?.local().is_contiguous());
    timed(rank, calls, || x.redistribute(to.clone()).map(drop))
}

/// Returns the microseconds of each call, after a few calls that are not timed.
fn timed(rank: &Rank, calls: usize, call: impl Fn() -> Result<()>) -> Result<Vec<f64>> {
    for _ in 0..calls.div_ceil(10) {
        call()?;
    }
    rank.world().barrier()?;
    let one = |_| {
        let start = Instant::now();
        call().map(|()| start.elapsed().as_secs_f64() * 1e6)
    };
    (0..calls).map(one).collect()
}

fn report(json: bool, case: &str, bytes: usize, all: Vec<Vec<f64>>) -> Result<()> {
    let mut micros = all.into_iter().next().ok_or_else(|| Error::invalid("bench", "no ranks", "", ""))?;
    micros.sort_by(f64::total_cmp);
    let (fastest, median) = (micros[0], micros[micros.len() / 2]);
    if json {
        println!(
            r#"{{"bench":"collectives","side":"isoshard","case":"{case}","bytes":{bytes},"ranks":{RANKS},"value":{median:.2},"best":{fastest:.2},"unit":"us"}}"#
        );
    } else {
        println!("{case:<28}{bytes:>10}{median:>14.2}{fastest:>14.2}");
    }
    Ok(())
}

fn halves(g: &Group, x: &Tensor) -> Result<Vec<Tensor>> {
    let len = x.numel() / g.len();
    (0..g.len()).map(|i| x.narrow(0, i * len, len)).collect()
}

fn gather(g: &Group, x: &Tensor) -> Result<Vec<Tensor>> {
    let mine = x.narrow(0, 0, x.numel() / g.len())?;
    g.all_gather(&mine, &vec![mine.shape().clone(); g.len()])
}

fn exchange(g: &Group, x: &Tensor) -> Result<Vec<Tensor>> {
    let parts = halves(g, x)?;
    let shapes: Vec<Shape> = parts.iter().map(|p| p.shape().clone()).collect();
    g.all_to_all(parts, &shapes)
}

/// Joins the parts, which together have the size of `x`, into one tensor.
fn joined(x: &Tensor, parts: &[Tensor]) -> Result<()> {
    let slices = parts.iter().map(Tensor::as_slice::<f32>).collect::<Result<Vec<_>>>()?;
    let out = Tensor::build(x.shape(), |out: &mut [f32]| {
        let mut rest = out;
        for slice in slices {
            let (here, after) = rest.split_at_mut(slice.len());
            here.copy_from_slice(slice);
            rest = after;
        }
    });
    std::hint::black_box(out);
    Ok(())
}
