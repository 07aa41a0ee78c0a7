//! A Llama whose sizes divide by nothing, trained on many meshes: the same initial parameters, the same losses, the
//! same final parameters, by bits.

use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, Llama, LlamaConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::placement::Mesh;
use isoshard::rng::{Generator, bits32};
use isoshard::tensor::Tensor;
use isoshard::{Error, Failure, Result};

const STEPS: usize = 3;
const CONFIG: LlamaConfig = LlamaConfig {
    vocabulary: 67,
    block: 11,
    layers: 2,
    heads: 6,
    kv_heads: 3,
    head_width: 10,
    width: 37,
    hidden: 101,
    base: 1e4,
    dropout: 0.1,
};

/// What training gave, as every rank sees it: the digests of the first and the last parameters, and the losses.
type Outcome = ([u64; 2], Vec<f32>);

#[test]
fn data_parallel_and_fsdp_train_as_one_rank_does() {
    let single = outcome("1", CONFIG, false);
    assert!(single.1[STEPS - 1] < single.1[0], "{single:?}");
    assert_ne!(single.0[0], single.0[1]);
    for mesh in ["dp=2", "fsdp=2", "fsdp=3", "dp=2,fsdp=2", "fsdp=7"] {
        assert_equal(&single, mesh, CONFIG, false);
    }
}

#[test]
fn tensor_parallel_trains_as_one_rank_does() {
    for (kv_heads, meshes) in
        [(3, ["tp=3", "fsdp=2,tp=3"]), (2, ["tp=2", "dp=2,tp=2"]), (6, ["tp=6", "tp=2"])]
    {
        let config = LlamaConfig { kv_heads, ..CONFIG };
        let single = outcome("1", config, false);
        for mesh in meshes {
            for sequence in [false, true] {
                assert_equal(&single, mesh, config, sequence);
            }
        }
    }
}

#[test]
fn groups_that_no_rank_can_halve_are_refused() {
    let error = spmd(2, |rank| train(&rank, "tp=2", CONFIG, false)).unwrap_err();
    let Error::Rank { cause, .. } = error else { panic!("{error}") };
    let Failure::Error(Error::Sharding(refusal)) = *cause else { panic!("{cause}") };
    assert!(refusal.given.contains("3 blocks (heads)"), "{refusal}");
}

fn outcome(mesh: &'static str, config: LlamaConfig, sequence: bool) -> Outcome {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    let all = spmd(ranks, move |rank| train(&rank, mesh, config, sequence));
    let all = all.unwrap_or_else(|e| panic!("{mesh}: {e}"));
    assert!(all.iter().all(|one| *one == all[0]), "{mesh}: ranks differ: {all:?}");
    all.into_iter().next().unwrap()
}

/// Equal parameters, before and after, and equal losses, by bits.
fn assert_equal(single: &Outcome, mesh: &'static str, config: LlamaConfig, sequence: bool) {
    assert_eq!(outcome(mesh, config, sequence), *single, "{mesh}");
}

/// Trains on one rank.
fn train(rank: &Rank, mesh: &str, config: LlamaConfig, sequence: bool) -> Result<Outcome> {
    let mesh = DeviceMesh::parse(rank, mesh)?;
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: config.kv_heads, sequence })?;
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 11)?;
    let model = Llama::new(&mut params, config)?;
    let first = params.digest()?;
    let mut optimizer = AdamW::new((0.9, 0.99), 0.1);
    let mut dropout = Generator::new(11).child("dropout");
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (tokens, targets) = batch(step)?;
        let tokens = DTensor::distribute(&mesh, &tokens, layout.clone())?;
        let targets = DTensor::distribute(&mesh, &targets, layout.clone())?;
        let cx = Forward::train(&params, &mut dropout);
        let loss = model.loss(&cx, &tokens, &targets)?;
        drop(cx);
        let mut grads = loss.backward()?;
        let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
        optimizer.step(&mut params, &mut grads, &clip_scale(&norm, 1.0)?, 1e-2)?;
        losses.push(loss.full_tensor()?.item()? as f32);
    }
    Ok(([first, params.digest()?], losses))
}

/// 5 sequences of 11 tokens and the tokens that follow them: some of each in an order that repeats.
fn batch(number: usize) -> Result<(Tensor, Tensor)> {
    let mut words = [0; 5];
    bits32(Generator::new(11).child("data").next_draw(), number as u64 * 5, &mut words);
    let rows = |next: usize| {
        let token = move |row: u32, i: usize| ((row as usize % 67 + (i + next) * (i + next)) % 67) as i64;
        let all = words.iter().flat_map(|&row| (0..11).map(move |i| token(row, i)));
        Tensor::from_vec(all.collect(), [5, 11])
    };
    Ok((rows(0)?, rows(1)?))
}
