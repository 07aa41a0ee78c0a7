//! 4. A model, a plan, a training step: FSDP is a layout. `cargo run --example 04_fsdp`

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::rng::Generator;
use isoshard::tensor::Tensor;

/// Three steps on a mesh: a digest of the initial parameters, and the losses.
fn train(mesh: &'static str, ranks: usize) -> Result<(u64, Vec<f64>)> {
    let mut results = spmd(ranks, move |rank| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        // The plan, not the model, says how parameters lie and what is split.
        let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
        let batch = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(&mesh, plan, 7)?;
        let config =
            GptConfig { vocabulary: 11, block: 6, layers: 2, heads: 2, width: 8, dropout: 0.1, bias: true };
        let model = Gpt::new(&mut params, config)?;
        // Equal bits on every mesh, although no rank of a sharded one ever makes more than its part.
        let digest = params.digest()?;
        let mut optimizer = AdamW::new((0.9, 0.99), 0.1);
        let mut dropout = Generator::new(7).child("dropout");

        // Every rank knows the whole batch and keeps its rows.
        let token = |i: usize| (i * i % 11) as i64;
        let text = |from: usize| Tensor::from_vec((from..from + 24).map(token).collect(), [4, 6]);
        let tokens = DTensor::distribute(&mesh, &text(0)?, batch.clone())?;
        let targets = DTensor::distribute(&mesh, &text(1)?, batch)?;

        let mut losses = Vec::new();
        for _ in 0..3 {
            // Blocks are gathered one ahead of their use, and gradients arrive where the parameters lie.
            let loss = model.loss(&Forward::train(&params, &mut dropout), &tokens, &targets)?;
            let mut grads = loss.backward()?;
            let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
            optimizer.step(&mut params, &mut grads, &clip_scale(&norm, 1.0)?, 1e-2)?;
            losses.push(loss.full_tensor()?.item()?);
        }
        Ok((digest, losses))
    })?;
    Ok(results.swap_remove(0))
}

fn main() -> Result<()> {
    let (digest, losses) = train("1", 1)?;
    assert!(losses[2] < losses[0]);
    for (mesh, ranks) in [("fsdp=2", 2), ("dp=2,fsdp=2", 4), ("fsdp=2,tp=2", 4)] {
        // Not close: equal.
        assert_eq!(train(mesh, ranks)?, (digest, losses.clone()), "{mesh}");
    }
    println!("losses {losses:?} on four meshes");
    Ok(())
}
