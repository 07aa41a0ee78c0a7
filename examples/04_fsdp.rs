//! 4. FSDP is a layout: one model and one training loop on four meshes, equal losses. `cargo run --example 04_fsdp`

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, WarmupCosine};
use isoshard::placement::Mesh;
use isoshard::rng::Generator;
use isoshard::tensor::Tensor;

const STEPS: usize = 8;

/// A digest of the initial parameters, and for each step the loss and the gradients' norm.
fn train(mesh: &'static str) -> Result<(u64, Vec<[f64; 2]>)> {
    let ranks = Mesh::parse(mesh, 0)?.rank_len();
    let mut results = spmd(ranks, move |rank| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        // The plan, not the model, gives the layouts of parameters and batch.
        let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
        let batch = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(&mesh, plan, 7)?;
        let config =
            GptConfig { vocabulary: 11, block: 6, layers: 2, heads: 2, width: 8, dropout: 0.1, bias: true };
        let model = Gpt::new(&mut params, config)?;
        // Equal bits on every mesh, although a rank only ever makes its shards.
        let digest = params.digest()?;

        // Every rank makes the whole batch and keeps its rows.
        let token = |i: usize| (i * i % 11) as i64;
        let text = |from: usize| Tensor::from_vec((from..from + 24).map(token).collect(), [4, 6]);
        let tokens = DTensor::distribute(&mesh, &text(0)?, batch.clone())?;
        let targets = DTensor::distribute(&mesh, &text(1)?, batch)?;

        let schedule = WarmupCosine { peak: 2e-2, floor: 2e-3, warmup: 2, steps: STEPS };
        let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1).rate(schedule).clip(1.0);
        let (mut dropout, mut facts) = (Generator::new(7).child("dropout"), Vec::new());
        for _ in 0..STEPS {
            // Blocks are gathered one ahead of their use; gradients arrive in the parameters' layouts.
            let mut loss = model.loss(&Forward::train(&params, &mut dropout), &tokens, &targets)?;
            let report = optimizer.step(&mut params, &mut loss.backward()?)?;
            let norm = report.norm.expect("there is a limit");
            facts.push([loss.item()?, norm.item()?]);
        }
        Ok((digest, facts))
    })?;
    Ok(results.swap_remove(0))
}

fn main() -> Result<()> {
    let meshes = ["1", "fsdp=2", "dp=2,fsdp=2", "fsdp=2,tp=2"];
    let runs = meshes.into_iter().map(train).collect::<Result<Vec<_>>>()?;
    println!(
        "losses of one model on four meshes\nstep {}",
        meshes.map(|mesh| format!("{mesh:>14}")).join("")
    );
    for step in 0..STEPS {
        let losses: Vec<String> = runs.iter().map(|(_, facts)| format!("{:>14.8}", facts[step][0])).collect();
        println!("{step:>4} {}", losses.concat());
    }
    for (mesh, run) in meshes.iter().zip(&runs) {
        // Not close: equal, bit for bit.
        assert_eq!(*run, runs[0], "{mesh}");
    }
    let facts = &runs[0].1;
    assert!(facts[STEPS - 1][0] < facts[0][0]);
    println!("initial parameters, losses and gradient norms have the same bits on all four");
    Ok(())
}
