//! 10. From an empty file to a training run that any mesh continues. `cargo run --example 10_own_training`

use std::path::{Path, PathBuf};

use isoshard::Result;
use isoshard::checkpoint::{CheckpointFolder, StateTree};
use isoshard::comm::{Rank, spmd_first};
use isoshard::data::{TokenWidth, TokenWriter, Tokens, TokensConfig};
use isoshard::dtensor::DeviceMesh;
use isoshard::nn::{Activation, Decoder, DecoderConfig, DecoderLayer, FeedForwardConfig, Forward, MlpConfig};
use isoshard::nn::{NormConfig, Parallel, Params, Plan, RotaryConfig, SelfAttentionConfig};
use isoshard::optim::{AdamW, WarmupCosine};
use isoshard::placement::Mesh;
use isoshard::rng::Generator;

const TEXT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/glossary.md"));
const STEPS: u64 = 30;

/// The model: four query heads in two groups, rotary positions, norms of queries and keys, SiLU-gated MLPs, as in Qwen3.
fn model() -> DecoderConfig {
    let attention = SelfAttentionConfig {
        rotary: Some(RotaryConfig::plain(1e4)),
        head_norm: Some(NormConfig::Rms { eps: 1e-6, unit_offset: false }),
        dropout: 0.1,
        ..SelfAttentionConfig::new(4, 2, 8)
    };
    let mlp = MlpConfig { hidden: 96, gated: true, activation: Activation::Silu, bias: false, dropout: 0.1 };
    let layer = DecoderLayer { attention, feed_forward: FeedForwardConfig::Mlp(mlp) };
    let norm = NormConfig::Rms { eps: 1e-6, unit_offset: false };
    DecoderConfig { tied_head: true, ..DecoderConfig::new(256, 32, 32, norm, vec![layer; 2]) }
}

/// Trains up to a step, from the newest checkpoint in `dir` if there is one. Every rank runs this.
fn train(rank: &Rank, mesh: &str, dir: &Path, until: u64) -> Result<(Vec<f64>, u64)> {
    let mesh = DeviceMesh::parse(rank, mesh)?;
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
    let batch_layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 7)?;
    let model = Decoder::new(&mut params, model())?;
    let schedule = WarmupCosine { peak: 1e-2, floor: 1e-3, warmup: 5, steps: STEPS as usize };
    let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(schedule).clip(1.0);
    let mut dropout = Generator::new(7).child("dropout");
    // Batches of 12 rows of 32 tokens. A rank reads only its rows.
    let mut tokens = Tokens::open(&[dir.join("text.bin")], TokensConfig::new(256, 32, 12, 7))?;

    let mut checkpoints = CheckpointFolder::new(dir.join("checkpoints")).keep(2);
    let mut step = 0;
    if let Some((newest, saved)) = checkpoints.newest(&mesh)? {
        let text = |name: &str| saved.value(name).and_then(|value| value.as_str()).unwrap_or_default();
        tokens.restore(text("data").parse()?)?;
        dropout.restore(text("dropout").parse()?);
        params.load_state(&saved.subtree("model"))?;
        optimizer.load_state(&params, &saved.subtree("optimizer"))?;
        step = newest;
    }
    let mut losses = Vec::new();
    while step < until {
        let (x, targets) = tokens.next_batch(&mesh, batch_layout.clone())?;
        let mut loss = model.loss(&Forward::train(&params, &mut dropout), &x, &targets)?;
        optimizer.step(&mut params, &mut loss.backward()?)?;
        losses.push(loss.item()?);
        step += 1;
        if step.is_multiple_of(10) {
            let mut state = StateTree::new();
            state.insert_tree("model", params.state()?)?;
            state.insert_tree("optimizer", optimizer.state(&params)?)?;
            state.insert_value("dropout", dropout.state().to_string())?;
            state.insert_value("data", tokens.position().to_string())?;
            checkpoints.save_async(&mesh, step, &state)?; // training goes on meanwhile
        }
    }
    checkpoints.wait(&mesh)?;
    Ok((losses, params.digest()?))
}

fn run(mesh: &'static str, dir: PathBuf, until: u64) -> Result<(Vec<f64>, u64)> {
    let ranks = Mesh::parse(mesh, 0)?.rank_len();
    spmd_first(ranks, move |rank| train(&rank, mesh, &dir, until))
}

/// Trains without a pause on one rank, then in parts on three other meshes, and compares the bits.
pub fn main() -> Result<()> {
    let root = std::env::temp_dir().join(format!("isoshard-own-training-{}", std::process::id()));
    let [whole, parts] = ["whole", "parts"].map(|name| root.join(name));
    for dir in [&whole, &parts] {
        std::fs::create_dir_all(dir).map_err(isoshard::Error::other)?;
        let mut file = TokenWriter::create(dir.join("text.bin"), TokenWidth::for_vocabulary(256))?;
        file.write(&TEXT.bytes().map(u32::from).collect::<Vec<_>>())?;
        file.finish()?;
    }
    let (losses, digest) = run("1", whole, STEPS)?;
    for (mesh, until) in [("fsdp=2", 10), ("dp=2,tp=2", 20), ("fsdp=3", 30)] {
        let (part, after) = run(mesh, parts.clone(), until)?;
        assert_eq!(part, losses[until as usize - 10..until as usize], "{mesh}");
        println!("step {until} on {mesh:<9}: loss {:.6}, digest {after:016x}", part[9]);
    }
    println!("step 30 on one rank : loss {:.6}, digest {digest:016x}", losses[29]);
    std::fs::remove_dir_all(root).map_err(isoshard::Error::other)
}
