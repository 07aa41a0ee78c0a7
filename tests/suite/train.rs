//! A small GPT and a small Llama, with sizes that no mesh divides evenly, trained on many meshes: initial parameters,
//! losses and final parameters have equal bits. A rank that panics anywhere in training ends the program on all
//! ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use isoshard::comm::{Call, CallResults, Channel, Engine, Rank, Reduce, Request, Spmd, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients, Reduction};
use isoshard::nn::{Forward, Gpt, GptConfig, Llama, LlamaConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::placement::{Mesh, SumGroups};
use isoshard::rng::{Generator, bits32};
use isoshard::tensor::{DType, Device, Tensor};
use isoshard::{Error, Failure, Result};

use crate::common::{self, failures::is_complete};

const STEPS: usize = 3;

/// Sizes that no mesh divides evenly.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Model {
    Gpt { heads: usize, bias: bool },
    Llama { heads: usize, kv_heads: usize },
}

/// A training run: its mesh and plan, its model and settings.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    mesh: &'static str,
    model: Model,
    sequence: bool,
    accumulate: usize,
    steps: usize,
    /// The number of different batches, which repeat.
    batches: usize,
    reduction: Reduction,
    /// The dtype that modules compute in.
    compute: DType,
}

/// The results of training, equal on every rank.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    digests: [u64; 2],
    losses: Vec<f32>,
}

const SINGLE: Run = Run {
    mesh: "1",
    model: Model::Gpt { heads: 4, bias: true },
    sequence: false,
    accumulate: 1,
    steps: STEPS,
    batches: usize::MAX,
    reduction: Reduction::Exact,
    compute: DType::F32,
};

const LLAMA: Model = Model::Llama { heads: 8, kv_heads: 4 };

const MESHES: [&str; 12] = [
    "fsdp=2",
    "fsdp=3",
    "fsdp=4",
    "fsdp=5",
    "dp=2",
    "dp=3",
    "tp=2",
    "tp=4",
    "dp=2,tp=2",
    "fsdp=2,tp=2",
    "fsdp=3,tp=2",
    "dp=2,fsdp=2",
];

#[test]
fn a_gpt_trains_as_one_rank_does_by_bits() {
    let [first, last] = outcome(SINGLE).digests;
    assert_ne!(first, last);
    every_mesh(SINGLE);
}

#[test]
fn a_llama_trains_as_one_rank_does_by_bits() {
    every_mesh(Run { model: LLAMA, ..SINGLE });
}

#[test]
fn groups_of_heads_split_in_every_way_that_leaves_them_whole() {
    for (kv_heads, meshes) in
        [(3, ["tp=3", "fsdp=2,tp=3"]), (2, ["tp=2", "dp=2,tp=2"]), (6, ["tp=6", "tp=2"])]
    {
        on_meshes(Run { model: Model::Llama { heads: 6, kv_heads }, ..SINGLE }, &meshes);
    }
}

/// Training on a CUDA device gives the CPU's results; the shim runs the device's kernels on the CPU.
#[test]
fn a_device_trains_as_the_cpu_does_by_bits() {
    let Some(device) = common::shim::device() else { return };
    for model in [SINGLE.model, LLAMA] {
        let single = Run { model, ..SINGLE };
        let expected = outcome_on(Device::Cpu, single);
        for mesh in ["1", "fsdp=2", "fsdp=2,tp=2"] {
            let run = Run { mesh, ..single };
            assert_eq!(outcome_on(device, run), expected, "{run:?}");
        }
    }
}

#[test]
fn training_lowers_the_loss() {
    for model in [SINGLE.model, LLAMA] {
        let Outcome { losses, .. } = outcome(Run { model, steps: 12, batches: 1, ..SINGLE });
        assert!(losses[11] < 0.9 * losses[0], "{model:?}: {losses:?}");
    }
}

#[test]
fn accumulation_and_models_without_biases_train_alike_by_bits() {
    let run = Run { accumulate: 2, model: Model::Gpt { heads: 4, bias: false }, ..SINGLE };
    assert_ne!(outcome(run).losses, outcome(Run { accumulate: 1, ..run }).losses);
    every_mesh(run);
    every_mesh(Run { model: LLAMA, ..run });
}

#[test]
fn models_that_compute_in_bf16_train_alike_by_bits() {
    let single = outcome(SINGLE);
    for model in [SINGLE.model, LLAMA] {
        let run = Run { model, compute: DType::BF16, ..SINGLE };
        every_mesh(run);
        let rounded = outcome(run);
        if model == SINGLE.model {
            assert_eq!(rounded.digests[0], single.digests[0], "what is kept is f32");
            assert!(approx::relative_eq!(rounded.losses[0], single.losses[0], max_relative = 1e-2));
            assert_ne!(rounded.losses, single.losses);
        }
    }
}

/// Widths and batches that the groups' parts do not divide evenly: a mesh that would split a part moves operands.
#[test]
fn sums_in_groups_train_alike_by_bits() {
    for (model, compute, wire) in [
        (SINGLE.model, DType::BF16, DType::BF16),
        (LLAMA, DType::F32, DType::F16),
        (LLAMA, DType::BF16, DType::BF16),
    ] {
        let groups = SumGroups::new(4).unwrap().with_gradient_parts(2).unwrap().with_wire(wire).unwrap();
        let run = Run { model, compute, reduction: Reduction::Grouped(groups), ..SINGLE };
        assert_ne!(outcome(run).losses, outcome(Run { reduction: Reduction::Exact, ..run }).losses);
        every_mesh(run);
    }
}

#[test]
fn fast_reductions_train_alike_up_to_rounding() {
    let single = outcome(SINGLE);
    let mut differ = 0;
    for mesh in ["fsdp=3", "tp=2", "dp=2,fsdp=2"] {
        let fast = outcome(Run { mesh, reduction: Reduction::Fast, ..SINGLE });
        assert_eq!(fast.digests[0], single.digests[0], "{mesh}: initial parameters");
        for (step, (a, b)) in fast.losses.iter().zip(&single.losses).enumerate() {
            assert!(
                approx::relative_eq!(a, b, max_relative = 1e-5),
                "{mesh}: step {step}: {a} instead of {b}"
            );
        }
        differ += usize::from(fast.digests[1] != single.digests[1]);
    }
    assert!(differ > 0, "were fast reductions exact, nobody would need the other ones");
}

/// Compares the run on every mesh with a single rank, with sequence parallelism too if there is a tp axis.
fn every_mesh(single: Run) {
    on_meshes(single, &MESHES);
}

fn on_meshes(single: Run, meshes: &[&'static str]) {
    let expected = outcome_on(Device::Cpu, single);
    if common::device() != Device::Cpu {
        assert_eq!(outcome(single), expected, "{single:?} on {}", common::device());
    }
    let is_tried = |mesh: &&str| common::ranks::is_tried(Mesh::parse(mesh, 0).unwrap().rank_len());
    for mesh in meshes.iter().copied().filter(is_tried) {
        for sequence in [false, true] {
            if !sequence || mesh.contains("tp") {
                let run = Run { mesh, sequence, ..single };
                assert_eq!(outcome(run), expected, "{run:?}");
            }
        }
    }
}

#[test]
fn heads_that_no_rank_can_halve_are_refused() {
    let groups = Model::Llama { heads: 6, kv_heads: 3 };
    for (model, blocks) in [(Model::Gpt { heads: 5, bias: true }, 5), (groups, 3)] {
        let run = Run { mesh: "tp=2", model, ..SINGLE };
        let error = spmd(2, move |rank| train(&rank, run)).unwrap_err();
        let Error::Rank { cause, .. } = error else { panic!("{error}") };
        let Failure::Error(Error::Sharding(refusal)) = *cause else { panic!("{cause}") };
        assert!(refusal.given.contains(&format!("{blocks} blocks (heads)")), "{refusal}");
        assert!(refusal.remedy.contains(&format!("divides {blocks}")), "{refusal}");
    }
}

#[test]
fn batches_and_sequences_shorter_than_the_ranks_are_legal() {
    // With a batch of 5 rows on 7 ranks, two ranks have no row.
    for model in [SINGLE.model, LLAMA] {
        on_meshes(Run { model, ..SINGLE }, &["fsdp=7"]);
    }
}

/// A rank that panics at any of its communication calls, in the forward pass, the backward pass or the optimizer,
/// ends the program within the deadline, with an error that names the rank. `tests/complete.sh` tries more calls.
#[test]
fn a_panic_ends_the_program_and_is_named() {
    let repetitions = if is_complete() { 100 } else { 30 };
    const DEADLINE: Duration = Duration::from_secs(5);
    let run = Run { mesh: "fsdp=2,tp=2", ..SINGLE };
    // The number of such calls per rank, which is the same on all ranks.
    let calls = spmd(4, move |rank| {
        let fault = Fault::new(usize::MAX);
        train(&fault.on(&rank)?.on(common::device()), run)?;
        Ok(fault.passed.load(Ordering::Relaxed))
    });
    let calls = calls.unwrap();
    assert!(calls.iter().all(|&c| c == calls[0]), "{calls:?}");
    let calls = calls[0];
    assert!(calls > 100 * STEPS, "{calls} calls");

    let mut words = vec![0; 2 * repetitions];
    bits32(Generator::new(5).next_draw(), 0, &mut words);
    for pair in words.chunks(2) {
        let (victim, at) = (pair[0] as usize % 4, pair[1] as usize % calls);
        let began = Instant::now();
        let result = Spmd::new(4).deadline(DEADLINE).run(move |rank| {
            let fault = Fault::new(if rank.rank() == victim { at } else { usize::MAX });
            train(&fault.on(&rank)?.on(common::device()), run)
        });
        let cause = Box::new(Failure::Panic(format!("struck at call {at}")));
        assert_eq!(result.unwrap_err(), Error::Rank { rank: victim, cause });
        assert!(began.elapsed() < DEADLINE, "{:?} after a panic at call {at}", began.elapsed());
    }
}

fn outcome(run: Run) -> Outcome {
    outcome_on(common::device(), run)
}

fn outcome_on(device: Device, run: Run) -> Outcome {
    let ranks = Mesh::parse(run.mesh, 0).unwrap().rank_len();
    let all = common::spmd(ranks, move |rank| train(&rank.on(device), run));
    let all = all.unwrap_or_else(|e| panic!("{run:?}: {e}"));
    assert!(all.iter().all(|one| *one == all[0]), "{run:?}: ranks differ: {all:?}");
    all.into_iter().next().unwrap()
}

/// A model's loss for tokens and targets.
type Loss = Box<dyn Fn(&Forward, &DTensor, &DTensor) -> Result<DTensor>>;

/// Trains on one rank.
fn train(rank: &Rank, run: Run) -> Result<Outcome> {
    let mesh = DeviceMesh::parse(rank, run.mesh)?;
    mesh.set_reduction(run.reduction);
    // The heads that a rank holds whole: in a Llama, query heads stay with the keys and values that they attend to.
    let heads = match run.model {
        Model::Gpt { heads, .. } => heads,
        Model::Llama { kv_heads, .. } => kv_heads,
    };
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads, sequence: run.sequence })?;
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 11)?;
    params.compute_in(run.compute)?;
    let (vocabulary, block, layers, dropout) = (67, 37, 2, 0.1);
    let loss: Loss = match run.model {
        Model::Gpt { heads, bias } => {
            let width = 13 * heads;
            let config = GptConfig { vocabulary, block, layers, heads, width, dropout, bias };
            let model = Gpt::new(&mut params, config)?;
            Box::new(move |cx, tokens, targets| model.loss(cx, tokens, targets))
        }
        Model::Llama { heads, kv_heads } => {
            let (head_width, width, hidden, base) = (10, 37, 101, 1e4);
            let config = LlamaConfig {
                vocabulary,
                block,
                layers,
                heads,
                kv_heads,
                head_width,
                width,
                hidden,
                base,
                dropout,
            };
            let model = Llama::new(&mut params, config)?;
            Box::new(move |cx, tokens, targets| model.loss(cx, tokens, targets))
        }
    };
    let first = params.digest()?;
    let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1);
    let mut dropout = Generator::new(11).child("dropout");
    let mut losses = Vec::new();
    for step in 0..run.steps {
        let mut grads = Gradients::default();
        let mut sum = 0.0;
        for micro in 0..run.accumulate {
            let (tokens, targets) = batch((step * run.accumulate + micro) % run.batches)?;
            let tokens = DTensor::distribute(&mesh, &tokens, layout.clone())?;
            let targets = DTensor::distribute(&mesh, &targets, layout.clone())?;
            let cx = Forward::train(&params, &mut dropout);
            let loss = loss(&cx, &tokens, &targets)?;
            grads.merge(loss.mul_scalar(1.0 / run.accumulate as f64)?.backward()?)?;
            sum += loss.item()?;
        }
        let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
        optimizer.step(&mut params, &mut grads, &clip_scale(&norm, 1.0)?, 1e-2)?;
        losses.push((sum / run.accumulate as f64) as f32);
    }
    Ok(Outcome { digests: [first, params.digest()?], losses })
}

/// Returns 5 sequences of 37 tokens and the tokens that follow them, in a repeating order.
fn batch(number: usize) -> Result<(Tensor, Tensor)> {
    let mut words = [0; 5];
    bits32(Generator::new(11).child("data").next_draw(), number as u64 * 5, &mut words);
    let rows = |next: usize| {
        let token = move |row: u32, i: usize| ((row as usize % 67 + (i + next) * (i + next)) % 67) as i64;
        let all = words.iter().flat_map(|&row| (0..37).map(move |i| token(row, i)));
        Tensor::from_vec(all.collect(), [5, 37])
    };
    Ok((rows(0)?, rows(1)?))
}

/// An engine that panics at one of the calls, or of the waits, that pass through it.
#[derive(Clone, Debug)]
struct Fault {
    at: usize,
    passed: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Faulty<T: ?Sized> {
    fault: Fault,
    inner: Arc<T>,
}

struct FaultyRequest {
    fault: Fault,
    inner: Box<dyn Request>,
}

impl Fault {
    fn new(at: usize) -> Fault {
        Fault { at, passed: Arc::default() }
    }

    /// Returns `rank` with all its calls passing through this engine.
    fn on(&self, rank: &Rank) -> Result<Rank> {
        Rank::new(Arc::new(Faulty { fault: self.clone(), inner: rank.engine().clone() }))
    }

    fn pass(&self) {
        if self.passed.fetch_add(1, Ordering::Relaxed) == self.at {
            // Unlike panic!, this prints nothing.
            std::panic::resume_unwind(Box::new(format!("struck at call {}", self.at)));
        }
    }

    fn request(&self, inner: Box<dyn Request>) -> Box<dyn Request> {
        Box::new(FaultyRequest { fault: self.clone(), inner })
    }
}

impl Engine for Faulty<dyn Engine> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_len(&self) -> usize {
        self.inner.world_len()
    }

    fn deadline(&self) -> Duration {
        self.inner.deadline()
    }

    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
        Ok(Arc::new(Faulty { fault: self.fault.clone(), inner: self.inner.open(ranks, name)? }))
    }

    fn end(&self) -> Result<()> {
        self.inner.end()
    }

    fn abort(&self, cause: &Error) {
        self.inner.abort(cause);
    }
}

impl Channel for Faulty<dyn Channel> {
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.fault.pass();
        Ok(self.fault.request(self.inner.start(call)?))
    }

    fn all_reduce(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.fault.pass();
        Ok(self.fault.request(self.inner.all_reduce(reduce, call)?))
    }

    fn reduce_scatter(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.fault.pass();
        Ok(self.fault.request(self.inner.reduce_scatter(reduce, call)?))
    }

    fn reduces_well(&self) -> bool {
        self.inner.reduces_well()
    }
}

impl Request for FaultyRequest {
    fn wait(self: Box<Self>) -> Result<CallResults> {
        self.fault.pass();
        self.inner.wait()
    }

    fn is_ready(&self) -> bool {
        self.inner.is_ready()
    }
}
