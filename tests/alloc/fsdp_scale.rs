//! Llama 8B and a model of the sizes of GPT-OSS 120B under `fully_shard`, by dry runs of whole steps: a rank's memory and
//! bytes beside their formulas, and the share of communication that computation hides. These tests write two parts of
//! `docs/scale.md`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

use isoshard::Result;
use isoshard::comm::{Cost, DryRun, DryTime, Level, Machine, Network};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::fsdp::{BlockPolicy, ShardedBytes, ShardedUnits, Sharding, fully_shard};
use isoshard::nn::{
    Activation, Decoder, DecoderConfig, DecoderLayer, ExpertWeights, FeedForwardConfig, Forward, MlpConfig,
    MoeConfig, NormConfig, Params, Plan, RotaryConfig, SelfAttentionConfig,
};
use isoshard::optim::AdamW;
use isoshard::placement::{Layout, Mesh};
use isoshard::tensor::{DType, meta};

use crate::scale_page;

const CONTEXT: usize = 8192;

/// A model, and the sizes from which its activations follow.
#[derive(Clone, Copy)]
struct Model {
    name: &'static str,
    config: fn() -> DecoderConfig,
    hidden: usize,
    /// The number of feed-forward layers that a token visits in a block.
    choices: usize,
}

const LLAMA: Model = Model { name: "Llama 8B", config: llama_8b, hidden: 14_336, choices: 1 };
const GPT_OSS: Model = Model { name: "GPT-OSS 120B", config: gpt_oss, hidden: 2880, choices: 4 };

fn llama_8b() -> DecoderConfig {
    let attention = SelfAttentionConfig {
        rotary: Some(RotaryConfig::plain(5e5)),
        ..SelfAttentionConfig::new(32, 8, 128)
    };
    let mlp =
        MlpConfig { hidden: 14_336, gated: true, activation: Activation::Silu, bias: false, dropout: 0.0 };
    let layer = DecoderLayer { attention, feed_forward: FeedForwardConfig::Mlp(mlp) };
    let norm = NormConfig::Rms { eps: 1e-5, unit_offset: false };
    DecoderConfig::new(128_256, CONTEXT, 4096, norm, vec![layer; 32])
}

/// The sizes of GPT-OSS, without the parts that no module has: biases of experts and of routers, attention sinks. Gates
/// and ups are two tensors, as long as its fused one.
fn gpt_oss() -> DecoderConfig {
    let moe = MoeConfig {
        width: 2880,
        hidden: 2880,
        experts: 128,
        top_k: 4,
        capacity_factor: Some(1.0),
        gated: true,
        activation: Activation::Silu,
        weights: ExpertWeights::SoftmaxOfChosen,
        shared_hidden: None,
        shared_gate: false,
        dropout: 0.0,
    };
    let layer = |i: usize| DecoderLayer {
        attention: SelfAttentionConfig {
            rotary: Some(RotaryConfig::plain(1.5e5)),
            qkv_bias: true,
            out_bias: true,
            window: i.is_multiple_of(2).then_some(128),
            ..SelfAttentionConfig::new(64, 8, 64)
        },
        feed_forward: FeedForwardConfig::Moe(moe),
    };
    let norm = NormConfig::Rms { eps: 1e-5, unit_offset: false };
    DecoderConfig::new(201_088, CONTEXT, 2880, norm, (0..36).map(layer).collect())
}

/// A dry run of a sharded model.
struct Sharded {
    dry: DryRun,
    mesh: DeviceMesh,
    params: Params,
    model: Decoder,
    tokens: DTensor,
    units: ShardedUnits,
}

impl Sharded {
    /// Shards a model whose blocks are recomputed, with so many sequences per rank.
    fn new(
        model: &Model,
        dry: DryRun,
        (mesh, units): (&str, &[&str]),
        sharding: &Sharding,
        sequences: usize,
    ) -> Result<Sharded> {
        let mesh = DeviceMesh::parse(&dry.rank()?, mesh)?;
        let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp").recompute("h.*"), 7)?;
        params.compute_in(DType::BF16)?;
        let model = Decoder::new(&mut params, (model.config)())?;
        let units = fully_shard(&mut params, units, sharding, &BlockPolicy::default())?;
        let layout = params.batch_layout();
        let batch = sequences * mesh.mesh().rank_len();
        let tokens = DTensor::zeros(&mesh, DType::I64, [batch, CONTEXT], layout)?;
        Ok(Sharded { dry, mesh, params, model, tokens, units })
    }

    fn loss(&self) -> Result<DTensor> {
        self.model.loss(&Forward::train_without_dropout(&self.params), &self.tokens, &self.tokens)
    }
}

/// The counts of rank 0 in the second step, and what formulas give.
struct Row {
    sharded: ShardedBytes,
    activations: usize,
    peak: usize,
    calls: u64,
    received: u64,
    /// The bytes that this rank receives if it receives each byte that it lacks once.
    own_formula: u64,
    /// The bytes that a rank receives in calls of the planner's equal shards.
    padded_formula: u64,
    /// The bytes that a rank with an equal share of all parameters receives.
    bound: f64,
    seconds: f64,
}

impl Row {
    fn of(model: &Model, ranks: usize) -> Result<Row> {
        let began = Instant::now();
        let dry = DryRun::new(ranks, 0)?;
        let (mesh, sharding) = (format!("fsdp={ranks}"), Sharding::zero3("fsdp"));
        let mut run = Sharded::new(model, dry, (&mesh, &["h.*"]), &sharding, 1)?;
        let sharded = ShardedBytes::of(&run.params)?;
        let config = run.model.config();
        let DecoderConfig { width, vocabulary, .. } = *config;
        let inside = 8 * width + 4 * model.choices * model.hidden;
        let activations = CONTEXT * 2 * (width * config.layers.len() + inside + 2 * vocabulary);
        let last = format!("h.{}.", config.layers.len() - 1);
        let mut padded_formula = 0;
        for unit in run.units.units() {
            let Some(plan) = &unit.plan else { continue };
            let stays = unit.name.is_empty() || last.starts_with(&format!("{}.", unit.name));
            let bytes = if stays { 2 + 4 } else { 2 * 2 + 4 };
            padded_formula += bytes * plan.shard_len() as u64 * (ranks as u64 - 1);
        }
        let (mut own_formula, mut bound) = (0, 0.0);
        for id in run.params.ids() {
            let (path, value) = (run.params.path(id), run.params.value(id));
            // The root and the last block are still there when the backward pass begins.
            let stays = !path.starts_with("h.") || path.starts_with(&last);
            let (gathers, others) = (if stays { 1 } else { 2 }, ranks as u64 - 1);
            let (all, own) = (value.shape().numel() as u64, value.local().numel() as u64);
            own_formula += 2 * gathers * (all - own) + 4 * own * others;
            bound += (2 * gathers + 4) as f64 * all as f64 * others as f64 / ranks as f64;
        }
        let scale = DTensor::full(&run.mesh, DType::F32, [], Layout::replicated(1), 1.0)?;
        let mut adam = AdamW::new().betas(0.9, 0.95).decay(0.1);
        let (mut before, mut after) = Default::default();
        for _ in 0..2 {
            // The second step has the optimizer's states.
            meta::reset_memory_peak();
            before = run.dry.report().total();
            let mut gradients = run.loss()?.backward()?;
            adam.step(&mut run.params, &mut gradients, &scale, 1e-4)?;
            after = run.dry.report().total();
        }
        Ok(Row {
            sharded,
            activations,
            peak: run.dry.report().peak_bytes,
            calls: after.calls - before.calls,
            received: after.received_bytes - before.received_bytes,
            own_formula,
            padded_formula,
            bound,
            seconds: began.elapsed().as_secs_f64(),
        })
    }

    /// Returns the sums of the formula: parameters, their copy in bf16, gradients and states; gathered and unreduced units, and
    /// what arrives of one; activations.
    fn formula(&self) -> [usize; 3] {
        let ShardedBytes { gathered, unreduced, received, .. } = self.sharded;
        let units = gathered + unreduced + received;
        [self.sharded.with_states(2) - units, units, self.activations]
    }

    fn memory_ratio(&self) -> f64 {
        self.peak as f64 / self.formula().iter().sum::<usize>() as f64
    }
}

const INTRO: &str = "
## Under `fully_shard`

Whole steps of rank 0, by `Sharding::zero3` with a unit per block: a sequence of 8,192 tokens per rank, exact mode, bf16 over f32, each
block recomputed. *GPT-OSS 120B* has the sizes of that model (36 layers, 128 experts, 4 per token) with equally many tokens for each expert,
without biases of experts and routers and without attention sinks, which no module of this library has.

The formula of the memory, in gigabytes, is known before the first step. *Shards* are those of parameters, their copy
in bf16, gradients and AdamW's two states; *units* are the gathered and the unreduced ones and what arrives of one before it is folded (`ShardedBytes`); *activations* are the blocks'
inputs, the scores and their gradient, and about those inside one block. The *peak* is that of the second step, between 0.4 and 1.05 of
the sum, since not all are there at once.

The *bound* of the bytes received is that of equal shards without padding: each parameter in bf16 once forward, once backward unless it is
still there (the root and the last block), and each gradient in f32, times `(m - 1) / m`. Rank 0 receives what its own shard
asks for, the padding of the other shards, if they are sent as equal shards, and the loss's scalars ([padding](padding.md)). A test takes the
same steps on 16,384 ranks.

| model | ranks | shards | units | activations | sum | peak | peak / sum | calls | received | bound | ratio |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
";

/// Returns a step's line of the page, after the checks that hold for every world.
fn checked_line(model: Model, ranks: usize) -> String {
    let gb = |bytes: f64| bytes / 1e9;
    let start = format!("| {} | {ranks} |", model.name);
    let row = Row::of(&model, ranks).unwrap_or_else(|e| panic!("{start} {e}"));
    println!("{start} {:.2} s", row.seconds);
    let [shards, units, activations] = row.formula().map(|bytes| gb(bytes as f64));
    let memory = row.memory_ratio();
    assert!((0.4..=1.05).contains(&memory), "{start} the peak is {memory:.3} of the formula");
    // Shards of others may be sent with their padding, and the loss's sums take a few bytes per rank.
    let scalars = 64 * ranks as u64;
    let most = row.own_formula.max(row.padded_formula) + scalars;
    let fits = (row.own_formula - scalars..=most).contains(&row.received);
    assert!(fits, "{start} received {} for {} to {most}", row.received, row.own_formula);
    // A gather and a reduction per block and the root, a second gather of all blocks but one, some for the loss.
    let blocks_len = (model.config)().layers.len() as u64;
    assert!(row.calls <= 3 * blocks_len + 8, "{start} {} calls", row.calls);
    let (received, ratio) = (row.received as f64, row.received as f64 / row.bound);
    assert!(ranks > 64 || ratio <= 1.02, "{start} receives {ratio:.3} of the bound");
    format!(
        "{start} {shards:.2} | {units:.2} | {activations:.2} | {:.2} | {:.2} | {memory:.2} | {} | {:.2} | {:.2} | {ratio:.3} |",
        shards + units + activations,
        gb(row.peak as f64),
        row.calls,
        gb(received),
        gb(row.bound),
    )
}

#[test]
fn whole_steps_take_the_memory_and_bytes_of_formulas() {
    let mut part = INTRO.to_string();
    for model in [LLAMA, GPT_OSS] {
        for ranks in [8, 64, 1024] {
            writeln!(part, "{}", checked_line(model, ranks)).expect("text");
        }
    }
    scale_page::check(1, &part);
}

/// The page leaves this out, since it takes seconds.
#[test]
fn a_rank_of_16384_takes_the_memory_and_bytes_of_formulas() {
    for model in [LLAMA, GPT_OSS] {
        println!("{}", checked_line(model, 16_384));
    }
}

/// Eight GPUs of a node over NVLink, 320 Gbit/s per GPU between nodes; rates that large products reach.
fn cluster() -> (Network, Machine) {
    let level = |ranks, latency_s, bytes_per_s| Level { ranks, latency_s, bytes_per_s };
    let network = Network::new([level(8, 5e-6, 300e9), level(usize::MAX, 20e-6, 40e9)]).expect("sound");
    let rates = Machine { half_flops_per_s: 5e14, f32_flops_per_s: 5e13, ..Machine::default() };
    (network, Machine { bytes_per_s: 3e12, ..rates })
}

/// Seconds of a forward and a backward pass: computing, communicating, waiting; and those that can be hidden.
struct Overlap {
    sums: [f64; 3],
    hideable: f64,
}

impl Overlap {
    fn of((mesh, sharding): (&str, &Sharding), units: &[&str], sequences: usize) -> Result<Overlap> {
        let (network, machine) = cluster();
        let ranks = Mesh::parse(mesh, 0)?.rank_len();
        let dry = DryRun::with_network(ranks, 0, network)?.with_machine(machine)?;
        let run = Sharded::new(&LLAMA, dry, (mesh, units), sharding, sequences)?;
        let before = run.dry.time();
        drop(run.loss()?.backward()?);
        let after = run.dry.time();
        let by_unit = seconds_by_unit(&before, &after);
        let mut overlap = Overlap { sums: [0.0; 3], hideable: 0.0 };
        for [computing, communicating, waiting] in by_unit.into_values() {
            let unit = [computing, communicating, waiting];
            overlap.sums.iter_mut().zip(unit).for_each(|(sum, seconds)| *sum += seconds);
            overlap.hideable += computing.min(communicating);
        }
        let passed = after.total.seconds() - before.total.seconds();
        let [computing, _, waiting] = overlap.sums;
        assert!((passed - computing - waiting).abs() < 1e-6, "the clock counts nothing else");
        Ok(overlap)
    }

    fn share(&self) -> f64 {
        let [_, communicating, waiting] = self.sums;
        (communicating - waiting) / self.hideable
    }
}

/// Returns the seconds that each unit computes, communicates and waits between two times. The root is one with tables,
/// the last norm and the loss, unless they are units.
fn seconds_by_unit(before: &DryTime, after: &DryTime) -> BTreeMap<String, [f64; 3]> {
    let mut units: BTreeMap<String, [f64; 3]> = BTreeMap::new();
    for (time, sign) in [(before, -1.0), (after, 1.0)] {
        for module in &time.modules {
            let path = module.path.as_str();
            let len = if path.starts_with("h.") { 2 } else { 1 };
            let unit: Vec<&str> = path.split('.').take(len).collect();
            let sums = units.entry(unit.join(".")).or_default();
            let times = [module.computing, module.communicating, module.waiting].map(Cost::seconds);
            sums.iter_mut().zip(times).for_each(|(sum, seconds)| *sum += sign * seconds);
        }
    }
    units
}

const OVERLAP: &str = "
## Communication behind computation

Forward and backward pass of Llama 8B as above, on the clock of a dry run (`DryRun::time`): nodes of 8 GPUs with 300 GB/s inside and 40 GB/s
per GPU between nodes, 500 Tflop/s in bf16, 3 TB/s of memory. Operators run one after another; calls run beside them, one at a time on each kind
of link. *Hidden* is the communication during which the rank computes. *Can be hidden* is, for each unit, the smaller of its communication and its
computation. Milliseconds.

Each is at least 90%. Under `hsdp` a unit's gradients take three calls: a reduction to shards, and an all-reduce of the shards among replicas in
two halves. The later two start while the next unit's gradients arrive, at equal distances.

| sharding | mesh | units | sequences | computing | communicating | waiting | hidden | can be hidden | share |
|---|---|---|--:|--:|--:|--:|--:|--:|--:|
";

#[test]
fn communication_is_hidden_behind_computation() {
    let zero3 = || ("zero3", Sharding::zero3("fsdp"));
    let (all, head) = (&["h.*"][..], &["h.*", "head"][..]);
    let cells = [
        ("fsdp=64", zero3(), all, 1),
        ("fsdp=64", zero3(), all, 4),
        ("fsdp=64", zero3(), head, 4),
        ("fsdp=1024", zero3(), all, 1),
        ("fsdp=1024", zero3(), all, 4),
        ("fsdp=1024", zero3(), head, 4),
        ("dp=8,fsdp=8", ("hsdp", Sharding::hsdp("dp", "fsdp")), head, 4),
        ("dp=128,fsdp=8", ("hsdp", Sharding::hsdp("dp", "fsdp")), head, 4),
    ];
    let mut part = OVERLAP.to_string();
    for (mesh, (name, sharding), units, sequences) in cells {
        let overlap =
            Overlap::of((mesh, &sharding), units, sequences).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        let [computing, communicating, waiting] = overlap.sums.map(|seconds| seconds * 1e3);
        let (hidden, hideable, share) =
            (communicating - waiting, overlap.hideable * 1e3, 100.0 * overlap.share());
        let line = format!(
            "| `{name}` | `{mesh}` | `{}` | {sequences} | {computing:.0} | {communicating:.0} | {waiting:.0} | {hidden:.0} | \
             {hideable:.0} | {share:.1}% |",
            units.join(", "),
        );
        println!("{line}");
        writeln!(part, "{line}").expect("text");
        assert!(overlap.share() >= 0.9, "{line}");
    }
    scale_page::check(2, &part);
}
