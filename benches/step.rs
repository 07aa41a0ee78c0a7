//! A training step of the nano GPT (4 layers, 4 heads, width 128, block 64, batch 12, vocabulary 65): tokens a second on
//! one rank and on two under FSDP, and where the time goes. `cargo bench --bench step [-- --json]`.

use std::time::Instant;

use isoshard::Result;
use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::rng::Generator;
use isoshard::tensor::Tensor;

const CONFIG: GptConfig =
    GptConfig { vocabulary: 65, block: 64, layers: 4, heads: 4, width: 128, dropout: 0.0, bias: false };
const BATCH: usize = 12;
const WARMUP: usize = 10;
const STEPS: usize = 60;

/// The parts of a step, in order.
const PARTS: [&str; 4] = ["forward", "backward", "norm", "optimizer"];

fn main() -> Result<()> {
    let json = std::env::args().any(|a| a == "--json");
    for (mesh, ranks) in [("1", 1), ("fsdp=2", 2)] {
        let times = spmd(ranks, move |rank| train(&rank, mesh))?.swap_remove(0);
        let total = median(times.iter().map(|t| t.iter().sum()).collect());
        let report = |what: &str, value: f64, unit: &str| {
            if json {
                println!(
                    r#"{{"bench":"step","case":"nano/{mesh}/{what}","value":{value:.3},"unit":"{unit}"}}"#
                );
            } else {
                println!("{:<32}{value:>12.2} {unit}", format!("nano, {mesh}, {what}"));
            }
        };
        report("throughput", (BATCH * CONFIG.block) as f64 / total, "tokens/s");
        report("step", total * 1e3, "ms");
        for (part, name) in PARTS.iter().enumerate() {
            report(name, median(times.iter().map(|t| t[part]).collect()) * 1e3, "ms");
        }
    }
    Ok(())
}

/// Seconds of each part of each step after the warm-up.
fn train(rank: &Rank, mesh: &str) -> Result<Vec<[f64; 4]>> {
    let mesh = DeviceMesh::parse(rank, mesh)?;
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: CONFIG.heads, sequence: false })?;
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 1)?;
    let model = Gpt::new(&mut params, CONFIG)?;
    let mut optimizer = AdamW::new((0.9, 0.99), 0.1);
    let mut generator = Generator::new(1);
    let tokens = |from: usize| {
        let text = (from..from + BATCH * CONFIG.block).map(|i| (i * i % CONFIG.vocabulary) as i64);
        let whole = Tensor::from_vec(text.collect(), [BATCH, CONFIG.block])?;
        DTensor::distribute(&mesh, &whole, layout.clone())
    };
    let (tokens, targets) = (tokens(0)?, tokens(1)?);
    let mut times = Vec::new();
    for _ in 0..WARMUP + STEPS {
        let mut marks = vec![Instant::now()];
        let loss = model.loss(&Forward::train(&params, &mut generator), &tokens, &targets)?;
        marks.push(Instant::now());
        let mut grads = loss.backward()?;
        marks.push(Instant::now());
        let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
        let scale = clip_scale(&norm, 1.0)?;
        marks.push(Instant::now());
        optimizer.step(&mut params, &mut grads, &scale, 1e-3)?;
        drop((loss, grads));
        marks.push(Instant::now());
        times.push(std::array::from_fn(|i| (marks[i + 1] - marks[i]).as_secs_f64()));
    }
    Ok(times.split_off(WARMUP))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
