//! A small GPT, of sizes that divide by nothing, trained on many meshes: the same initial parameters, the same losses.
//! And what becomes of the others when a rank panics anywhere in training.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use isoshard::comm::{Rank, Spmd, spmd};
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
    let error = spmd(2, move |rank| train(&rank, run, &|| {})).unwrap_err();
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

/// A rank that panics anywhere ends the program within the deadline, with an error that names it.
#[test]
fn a_panic_ends_the_program_and_is_named() {
    const REPETITIONS: usize = 100;
    const DEADLINE: Duration = Duration::from_secs(5);
    let run = Run { mesh: "fsdp=2,tp=2", heads: 6, ..SINGLE };
    let points = Arc::new(AtomicUsize::new(0));
    let counter = points.clone();
    // How many points a rank passes where it may fail.
    Spmd::new(4)
        .run(move |rank| {
            let first = rank.rank() == 0;
            train(&rank, run, &|| _ = first.then(|| counter.fetch_add(1, Ordering::Relaxed)))
        })
        .unwrap();
    let points = points.load(Ordering::Relaxed) as u64;
    assert!(points >= 3 * STEPS as u64);

    let mut words = [0; 2 * REPETITIONS];
    bits32(Generator::new(5).next_draw(), 0, &mut words);
    for pair in words.chunks(2) {
        let victim = pair[0] as usize % 4;
        let at = u64::from(pair[1]) % points;
        let began = Instant::now();
        let result = Spmd::new(4).deadline(DEADLINE).run(move |rank| {
            let passed = std::cell::Cell::new(0);
            let fail = || {
                if rank.rank() == victim && passed.replace(passed.get() + 1) == at {
                    std::panic::panic_any(format!("struck at point {at}"));
                }
            };
            train(&rank, run, &fail)
        });
        let expected =
            Error::Rank { rank: victim, cause: Box::new(Failure::Panic(format!("struck at point {at}"))) };
        assert_eq!(result.unwrap_err(), expected);
        assert!(
            began.elapsed() < DEADLINE,
            "{:?} after rank {victim} panicked at point {at}",
            began.elapsed()
        );
    }
}

fn outcome(run: Run) -> Outcome {
    let ranks = Mesh::parse(run.mesh, 0).unwrap().rank_len();
    let all = spmd(ranks, move |rank| train(&rank, run, &|| {})).unwrap_or_else(|e| panic!("{run:?}: {e}"));
    assert!(all.iter().all(|one| *one == all[0]), "{run:?}: ranks differ: {all:?}");
    all.into_iter().next().unwrap()
}

/// Equal initial parameters by bits, and equal losses.
fn assert_equal(single: &Outcome, run: Run) {
    let other = outcome(run);
    assert_eq!(other.digests[0], single.digests[0], "{run:?}: initial parameters");
    for (step, (a, b)) in other.losses.iter().zip(&single.losses).enumerate() {
        let relative = (a - b).abs() / b.abs();
        assert!(relative < 1e-5, "{run:?}: step {step}: {a} instead of {b}");
    }
}

/// Trains on one rank; `point` is called wherever a rank might fail.
fn train(rank: &Rank, run: Run, point: &dyn Fn()) -> Result<Outcome> {
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
            point();
            let cx = Forward::train(&params, &mut dropout);
            let scores = model.forward(&cx, &tokens)?;
            point();
            let loss = scores.cross_entropy(&targets)?.mean_all()?;
            point();
            grads.merge(loss.scale(1.0 / run.accumulate as f64)?.backward()?)?;
            point();
            sum += loss.full_tensor()?.item()?;
        }
        let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
        point();
        optimizer.step(&mut params, &mut grads, &clip_scale(&norm, 1.0)?, 1e-2)?;
        point();
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
