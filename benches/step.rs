//! Times training steps of GPTs: tokens per second, the time of each part, the cost of exact sums, and the bytes of
//! each plan. `cargo bench --bench step [-- --json]`; `-- --baby` times the larger model too, which takes minutes.
//!
//! Exact and fast reductions alternate, step by step, in one run, so that a noisy machine disturbs both alike.

use std::time::Instant;

use isoshard::Result;
use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::placement::Mesh;
use isoshard::rng::Generator;
use isoshard::tensor::Tensor;

#[derive(Clone, Copy)]
struct Size {
    name: &'static str,
    config: GptConfig,
    batch: usize,
    warmup: usize,
    /// The number of steps that are timed with each kind of reduction.
    steps: usize,
}

const NANO: Size = Size {
    name: "nano",
    config: GptConfig {
        vocabulary: 65,
        block: 64,
        layers: 4,
        heads: 4,
        width: 128,
        dropout: 0.0,
        bias: false,
    },
    batch: 12,
    warmup: 10,
    steps: 60,
};

const BABY: Size = Size {
    name: "baby",
    config: GptConfig {
        vocabulary: 65,
        block: 256,
        layers: 6,
        heads: 6,
        width: 384,
        dropout: 0.0,
        bias: false,
    },
    batch: 64,
    warmup: 1,
    steps: 3,
};

const MODES: [(Reduction, &str); 2] = [(Reduction::Exact, "exact"), (Reduction::Fast, "fast")];

/// The parts of a step, in order.
const PARTS: [&str; 4] = ["forward", "backward", "norm", "optimizer"];

/// Meshes whose bytes are listed, with sequence parallelism if they have a `tp` axis.
const PLANS: [(&str, bool); 14] = [
    ("dp=2", false),
    ("dp=3", false),
    ("fsdp=2", false),
    ("fsdp=3", false),
    ("fsdp=4", false),
    ("fsdp=5", false),
    ("tp=2", false),
    ("tp=2", true),
    ("tp=4", false),
    ("tp=4", true),
    ("dp=2,tp=2", true),
    ("fsdp=2,tp=2", true),
    ("fsdp=3,tp=2", true),
    ("dp=2,fsdp=2", false),
];

/// A step: the seconds of its parts on rank 0, and the average bytes that each rank received.
struct Step {
    times: [f64; 4],
    bytes: f64,
}

fn main() -> Result<()> {
    let has = |flag: &str| std::env::args().any(|a| a == flag);
    let (json, baby) = (has("--json"), has("--baby"));
    let report = |case: String, value: f64, unit: &str| {
        if json {
            println!(r#"{{"bench":"step","case":"{case}","value":{value:.3},"unit":"{unit}"}}"#);
        } else {
            println!("{case:<44}{value:>14.2} {unit}");
        }
    };
    for size in [Some(NANO), baby.then_some(BABY)].into_iter().flatten() {
        for mesh in ["1", "fsdp=2"] {
            let steps = run(mesh, false, size)?;
            let mut totals = [0.0; 2];
            for (k, (_, mode)) in MODES.iter().enumerate() {
                let case = |what: &str| format!("{}/{mesh}/{mode}/{what}", size.name);
                let of = |f: &dyn Fn(&Step) -> f64| median(steps[k].iter().map(f).collect());
                totals[k] = of(&|s| s.times.iter().sum());
                report(case("throughput"), (size.batch * size.config.block) as f64 / totals[k], "tokens/s");
                for (part, name) in PARTS.iter().enumerate() {
                    report(case(name), of(&|s| s.times[part]) * 1e3, "ms");
                }
            }
            report(format!("{}/{mesh}/exact over fast", size.name), totals[0] / totals[1], "x");
        }
    }
    for (mesh, sequence) in PLANS {
        let steps = run(mesh, sequence, Size { warmup: 1, steps: 1, ..NANO })?;
        for (k, (_, mode)) in MODES.iter().enumerate() {
            let along = if sequence { "+sequence" } else { "" };
            report(format!("nano/{mesh}{along}/{mode}/received"), steps[k][0].bytes / 1024.0, "KiB/step");
        }
    }
    Ok(())
}

/// The timed steps with each kind of reduction.
fn run(mesh: &'static str, sequence: bool, size: Size) -> Result<[Vec<Step>; 2]> {
    let ranks = Mesh::parse(mesh, 0)?.rank_len();
    let mut all = spmd(ranks, move |rank| train(&rank, mesh, sequence, size))?;
    let mut steps = all.swap_remove(0);
    for (k, steps) in steps.iter_mut().enumerate() {
        for (i, step) in steps.iter_mut().enumerate() {
            let others: f64 = all.iter().map(|rank| rank[k][i].bytes).sum();
            step.bytes = (step.bytes + others) / ranks as f64;
        }
    }
    Ok(steps)
}

fn train(rank: &Rank, mesh: &str, sequence: bool, size: Size) -> Result<[Vec<Step>; 2]> {
    let config = size.config;
    let mesh = DeviceMesh::parse(rank, mesh)?;
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: config.heads, sequence })?;
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 1)?;
    let model = Gpt::new(&mut params, config)?;
    let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1);
    let mut generator = Generator::new(1);
    let tokens = |from: usize| {
        let text = (from..from + size.batch * config.block).map(|i| (i * i % config.vocabulary) as i64);
        let whole = Tensor::from_vec(text.collect(), [size.batch, config.block])?;
        DTensor::distribute(&mesh, &whole, layout.clone())
    };
    let (tokens, targets) = (tokens(0)?, tokens(1)?);
    let mut steps = [Vec::new(), Vec::new()];
    for turn in 0..2 * (size.warmup + size.steps) {
        mesh.set_reduction(MODES[turn % 2].0);
        mesh.barrier()?;
        let before = mesh.received_bytes();
        let mut marks = vec![Instant::now()];
        let mut loss = model.loss(&Forward::train(&params, &mut generator), &tokens, &targets)?;
        marks.push(Instant::now());
        let mut grads = loss.backward()?;
        marks.push(Instant::now());
        let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
        let scale = clip_scale(&norm, 1.0)?;
        marks.push(Instant::now());
        optimizer.step(&mut params, &mut grads, &scale, 1e-3)?;
        drop((loss, grads));
        marks.push(Instant::now());
        if turn >= 2 * size.warmup {
            let times = std::array::from_fn(|i| (marks[i + 1] - marks[i]).as_secs_f64());
            steps[turn % 2].push(Step { times, bytes: (mesh.received_bytes() - before) as f64 });
        }
    }
    Ok(steps)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
