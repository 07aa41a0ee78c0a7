//! A small GPT, of sizes that divide by nothing, trained on many meshes: the same initial parameters, the same losses.
//! And what becomes of the others when a rank panics anywhere in training.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use isoshard::comm::{Call, Channel, Engine, Rank, Reduce, Request, Spmd, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::placement::Mesh;
use isoshard::rng::{Generator, bits32};
use isoshard::tensor::Tensor;
use isoshard::{Error, Failure, Result};

const STEPS: usize = 3;

/// How a training run lies on its ranks, and what it computes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    mesh: &'static str,
    heads: usize,
    sequence: bool,
    accumulate: usize,
    bias: bool,
}

/// What training gave, as every rank sees it.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    digests: [u64; 2],
    losses: Vec<f32>,
}

const SINGLE: Run = Run { mesh: "1", heads: 5, sequence: false, accumulate: 1, bias: true };

#[test]
fn data_parallel_and_fsdp_train_as_one_rank_does() {
    let single = outcome(SINGLE);
    assert!(single.losses[STEPS - 1] < single.losses[0], "{single:?}");
    assert_ne!(single.digests[0], single.digests[1]);
    for mesh in ["dp=2", "fsdp=2", "fsdp=3", "fsdp=4", "dp=2,fsdp=2"] {
        assert_equal(&single, Run { mesh, ..SINGLE });
    }
}

#[test]
fn tensor_parallel_trains_as_one_rank_does() {
    let single = Run { heads: 6, ..SINGLE };
    let expected = outcome(single);
    for mesh in ["tp=2", "tp=3", "dp=2,tp=2", "fsdp=2,tp=2"] {
        for sequence in [false, true] {
            assert_equal(&expected, Run { mesh, sequence, ..single });
        }
    }
}

#[test]
fn accumulation_and_models_without_biases_train_alike() {
    let single = Run { accumulate: 2, bias: false, ..SINGLE };
    let expected = outcome(single);
    assert_ne!(expected.losses, outcome(Run { accumulate: 1, ..single }).losses);
    for mesh in ["dp=2", "fsdp=3"] {
        assert_equal(&expected, Run { mesh, ..single });
    }
}

#[test]
fn heads_that_no_rank_can_halve_are_refused() {
    let run = Run { mesh: "tp=2", ..SINGLE };
    let error = spmd(2, move |rank| train(&rank, run)).unwrap_err();
    let Error::Rank { cause, .. } = error else { panic!("{error}") };
    let Failure::Error(Error::Sharding(refusal)) = *cause else { panic!("{cause}") };
    assert!(refusal.given.contains("5 blocks (heads)"), "{refusal}");
    assert!(refusal.remedy.contains("divides 5"), "{refusal}");
}

#[test]
fn batches_and_sequences_shorter_than_the_ranks_are_legal() {
    // A batch of 5 rows on 7 ranks: two of them have none.
    assert_equal(&outcome(SINGLE), Run { mesh: "fsdp=7", ..SINGLE });
}

/// A rank that panics at any of its calls to others, in the forward pass, the backward pass or the optimizer, ends the
/// program within the deadline, with an error that names it.
#[test]
fn a_panic_ends_the_program_and_is_named() {
    const REPETITIONS: usize = 100;
    const DEADLINE: Duration = Duration::from_secs(5);
    let run = Run { mesh: "fsdp=2,tp=2", heads: 6, ..SINGLE };
    // How many such calls a rank makes: the same number on all.
    let calls = spmd(4, move |rank| {
        let fault = Fault::new(usize::MAX);
        train(&fault.on(&rank)?, run)?;
        Ok(fault.passed.load(Ordering::Relaxed))
    });
    let calls = calls.unwrap();
    assert!(calls.iter().all(|&c| c == calls[0]), "{calls:?}");
    let calls = calls[0];
    assert!(calls > 100 * STEPS, "{calls} calls");

    let mut words = [0; 2 * REPETITIONS];
    bits32(Generator::new(5).next_draw(), 0, &mut words);
    for pair in words.chunks(2) {
        let (victim, at) = (pair[0] as usize % 4, pair[1] as usize % calls);
        let began = Instant::now();
        let result = Spmd::new(4).deadline(DEADLINE).run(move |rank| {
            let fault = Fault::new(if rank.rank() == victim { at } else { usize::MAX });
            train(&fault.on(&rank)?, run)
        });
        let cause = Box::new(Failure::Panic(format!("struck at call {at}")));
        assert_eq!(result.unwrap_err(), Error::Rank { rank: victim, cause });
        assert!(began.elapsed() < DEADLINE, "{:?} after a panic at call {at}", began.elapsed());
    }
}

fn outcome(run: Run) -> Outcome {
    let ranks = Mesh::parse(run.mesh, 0).unwrap().rank_len();
    let all = spmd(ranks, move |rank| train(&rank, run)).unwrap_or_else(|e| panic!("{run:?}: {e}"));
    assert!(all.iter().all(|one| *one == all[0]), "{run:?}: ranks differ: {all:?}");
    all.into_iter().next().unwrap()
}

/// Equal initial parameters by bits, and equal losses.
fn assert_equal(single: &Outcome, run: Run) {
    let other = outcome(run);
    assert_eq!(other.digests[0], single.digests[0], "{run:?}: initial parameters");
    for (step, (a, b)) in other.losses.iter().zip(&single.losses).enumerate() {
        assert!(approx::relative_eq!(a, b, max_relative = 1e-5), "{run:?}: step {step}: {a} instead of {b}");
    }
}

/// Trains on one rank.
fn train(rank: &Rank, run: Run) -> Result<Outcome> {
    let mesh = DeviceMesh::parse(rank, run.mesh)?;
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: run.heads, sequence: run.sequence })?;
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 11)?;
    let config = GptConfig {
        vocabulary: 67,
        block: 8,
        layers: 2,
        heads: run.heads,
        width: 30,
        dropout: 0.1,
        bias: run.bias,
    };
    let model = Gpt::new(&mut params, config)?;
    let first = params.digest()?;
    let mut optimizer = AdamW::new((0.9, 0.99), 0.1);
    let mut dropout = Generator::new(11).child("dropout");
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut grads = Gradients::default();
        let mut sum = 0.0;
        for micro in 0..run.accumulate {
            let (tokens, targets) = batch(step * run.accumulate + micro)?;
            let tokens = DTensor::distribute(&mesh, &tokens, layout.clone())?;
            let targets = DTensor::distribute(&mesh, &targets, layout.clone())?;
            let cx = Forward::train(&params, &mut dropout);
            let loss = model.loss(&cx, &tokens, &targets)?;
            grads.merge(loss.scale(1.0 / run.accumulate as f64)?.backward()?)?;
            sum += loss.full_tensor()?.item()?;
        }
        let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
        optimizer.step(&mut params, &mut grads, &clip_scale(&norm, 1.0)?, 1e-2)?;
        losses.push((sum / run.accumulate as f64) as f32);
    }
    Ok(Outcome { digests: [first, params.digest()?], losses })
}

/// 5 sequences of 8 tokens and the tokens that follow them: some of each in an order that repeats.
fn batch(number: usize) -> Result<(Tensor, Tensor)> {
    let mut words = [0; 5];
    bits32(Generator::new(11).child("data").next_draw(), number as u64 * 5, &mut words);
    let rows = |next: usize| {
        let token = move |row: u32, i: usize| ((row as usize % 67 + (i + next) * (i + next)) % 67) as i64;
        let all = words.iter().flat_map(|&row| (0..8).map(move |i| token(row, i)));
        Tensor::from_vec(all.collect(), [5, 8])
    };
    Ok((rows(0)?, rows(1)?))
}

/// Panics at one of the calls, or of the waits for their ends, that pass through it.
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

    /// `rank` with all its calls passing through here.
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

    fn abort(&self, cause: &Error) {
        self.inner.abort(cause);
    }
}

impl Channel for Faulty<dyn Channel> {
    fn start(&self, call: Call) -> Result<Box<dyn Request>> {
        self.fault.pass();
        Ok(self.fault.request(self.inner.start(call)?))
    }

    fn all_reduce(&self, reduce: Reduce, call: Call) -> Result<Box<dyn Request>> {
        self.fault.pass();
        Ok(self.fault.request(self.inner.all_reduce(reduce, call)?))
    }

    fn reduces_well(&self) -> bool {
        self.inner.reduces_well()
    }
}

impl Request for FaultyRequest {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        self.fault.pass();
        self.inner.wait()
    }

    fn is_ready(&self) -> bool {
        self.inner.is_ready()
    }
}
