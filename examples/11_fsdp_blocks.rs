//! 11. FSDP in blocks: four rows, or a whole expert's matrix, stay on one rank. `cargo run --example 11_fsdp_blocks`

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::fsdp::{Block, BlockPolicy, ShardedBytes, ShardedUnits, Sharding, fully_shard};
use isoshard::nn::{
    Activation, Decoder, DecoderConfig, DecoderLayer, ExpertWeights, FeedForwardConfig, Forward,
};
use isoshard::nn::{MoeConfig, NormConfig, Params, Plan, RotaryConfig, SelfAttentionConfig};
use isoshard::optim::{AdamW, WarmupCosine};
use isoshard::tensor::Tensor;

const STEPS: usize = 6;
const WIDTH: usize = 16;
const HIDDEN: usize = 24;

/// Two layers, each with five gated experts and two experts per token.
fn model() -> DecoderConfig {
    let moe = MoeConfig {
        width: WIDTH,
        hidden: HIDDEN,
        experts: 5,
        top_k: 2,
        capacity_factor: None,
        gated: true,
        activation: Activation::Silu,
        weights: ExpertWeights::SoftmaxOfChosen,
        shared_hidden: None,
        shared_gate: false,
        dropout: 0.0,
    };
    let rotary = Some(RotaryConfig::plain(1e4));
    let attention = SelfAttentionConfig { rotary, ..SelfAttentionConfig::new(2, 1, 8) };
    let layer = DecoderLayer { attention, feed_forward: FeedForwardConfig::Moe(moe) };
    let norm = NormConfig::Rms { eps: 1e-6, unit_offset: false };
    DecoderConfig::new(32, 8, WIDTH, norm, vec![layer; 2])
}

/// A rank's result of training.
struct Outcome {
    units: ShardedUnits,
    bytes: ShardedBytes,
    /// The path and the shape of each parameter, with the number of its elements that this rank stores.
    stored: Vec<(String, Vec<usize>, usize)>,
    losses: Vec<f64>,
}

fn train(ranks: usize) -> Result<Vec<Outcome>> {
    spmd(ranks, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("fsdp", ranks)])?;
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let model = Decoder::new(&mut params, model())?;
        // A unit per layer. Blocks of four rows, as for a quantiser; experts whole, as for an optimizer of matrices.
        let blocks = BlockPolicy::new(Block::Rows(4)).set("h.*.moe.experts.*", Block::Matrix);
        let units = fully_shard(&mut params, &["h.*"], &Sharding::zero3("fsdp"), &blocks)?;
        let bytes = ShardedBytes::of(&params)?;
        let stored = params.ids().map(|id| {
            let value = params.value(id);
            (params.path(id).to_string(), value.shape().to_vec(), value.local().shape().numel())
        });
        let stored = stored.collect();

        let batch = params.batch_layout();
        let text =
            |from: usize| Tensor::from_vec((from..from + 48).map(|i| (i * i % 32) as i64).collect(), [6, 8]);
        let tokens = DTensor::distribute(&mesh, &text(0)?, batch.clone())?;
        let targets = DTensor::distribute(&mesh, &text(1)?, batch)?;
        let schedule = WarmupCosine { peak: 2e-2, floor: 2e-3, warmup: 2, steps: STEPS };
        let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1).rate(schedule).clip(1.0);
        let mut losses = Vec::new();
        for _ in 0..STEPS {
            let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &targets)?;
            optimizer.step(&mut params, &mut loss.backward()?)?;
            losses.push(loss.item()?);
        }
        Ok(Outcome { units, bytes, stored, losses })
    })
}

fn main() -> Result<()> {
    let (single, sharded) = (train(1)?, train(3)?);
    println!("units\n{}", sharded[0].units);
    println!("{}", sharded[0].units.units()[1].draw());
    for (rank, outcome) in sharded.iter().enumerate() {
        println!("rank {rank}\n{}", outcome.bytes);
        let elements: usize = outcome.stored.iter().map(|(_, _, elements)| elements).sum();
        assert_eq!(outcome.bytes.parameters, 4 * elements, "the bytes that were said before the first step");
        for (path, shape, elements) in &outcome.stored {
            // A matrix has whole experts, another one groups of four rows; a vector's rows are its elements.
            let block = match shape[..] {
                [_, _, _] if path.contains("experts") => WIDTH * HIDDEN,
                [.., columns] if shape.len() > 1 => 4 * columns,
                _ => 4,
            };
            let all: usize = shape.iter().product();
            let is_last = (elements % block) == all % block;
            assert!(
                elements % block == 0 || is_last,
                "{path} {shape:?}: rank {rank} has {elements} elements"
            );
        }
    }
    println!("step    one rank      three ranks");
    for step in 0..STEPS {
        println!("{step:>4} {:>12.8} {:>12.8}", single[0].losses[step], sharded[2].losses[step]);
    }
    assert!(sharded.iter().all(|outcome| outcome.losses == single[0].losses), "equal, bit for bit");
    assert!(single[0].losses[STEPS - 1] < single[0].losses[0]);
    println!("the losses have the same bits, and no rank stores a part of a block");
    Ok(())
}
