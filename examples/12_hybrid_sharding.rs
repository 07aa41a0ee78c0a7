//! 12. Hybrid sharding: replicas of sharded models, with equal bits. `cargo run --example 12_hybrid_sharding`

use isoshard::Result;
use isoshard::comm::{Tally, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::fsdp::{BlockPolicy, ShardedBytes, Sharding, fully_shard};
use isoshard::nn::{Forward, Gpt, GptConfig, Params, Plan};
use isoshard::optim::{AdamW, WarmupCosine};
use isoshard::placement::Mesh;
use isoshard::rng::Generator;
use isoshard::tensor::Tensor;

const STEPS: usize = 5;

/// A rank's result of training.
struct Outcome {
    bytes: ShardedBytes,
    /// The bytes that the rank received in the last step, and the calls.
    received: u64,
    calls: u64,
    losses: Vec<f64>,
    digest: u64,
}

fn train(mesh: &'static str, sharding: Sharding) -> Result<Vec<Outcome>> {
    let ranks = Mesh::parse(mesh, 0)?.rank_len();
    spmd(ranks, move |rank| {
        let (rank, tally) = Tally::of(&rank)?;
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let config =
            GptConfig { vocabulary: 16, block: 8, layers: 2, heads: 2, width: 16, dropout: 0.1, bias: true };
        let model = Gpt::new(&mut params, config)?;
        fully_shard(&mut params, &["h.*"], &sharding, &BlockPolicy::default())?;
        let bytes = ShardedBytes::of(&params)?;

        let batch = params.batch_layout();
        let text =
            |from: usize| Tensor::from_vec((from..from + 64).map(|i| (i * i % 13) as i64).collect(), [8, 8]);
        let tokens = DTensor::distribute(&mesh, &text(0)?, batch.clone())?;
        let targets = DTensor::distribute(&mesh, &text(1)?, batch)?;
        let schedule = WarmupCosine { peak: 2e-2, floor: 2e-3, warmup: 2, steps: STEPS };
        let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1).rate(schedule).clip(1.0);
        let (mut dropout, mut losses) = (Generator::new(7).child("dropout"), Vec::new());
        let mut before = tally.total();
        for _ in 0..STEPS {
            before = tally.total();
            let mut loss = model.loss(&Forward::train(&params, &mut dropout), &tokens, &targets)?;
            optimizer.step(&mut params, &mut loss.backward()?)?;
            losses.push(loss.item()?);
        }
        let after = tally.total();
        let (received, calls) = (after.received_bytes - before.received_bytes, after.calls - before.calls);
        Ok(Outcome { bytes, received, calls, losses, digest: params.digest()? })
    })
}

fn main() -> Result<()> {
    let single = train("dp=1", Sharding::ddp("dp"))?.remove(0);
    let (both, mesh) = (["dp", "fsdp"], "dp=2,fsdp=2");
    let shardings = [
        ("replicas (DDP)", Sharding::over(&both)),
        ("hybrid (HSDP)", Sharding::hsdp("dp", "fsdp")),
        ("hybrid, states over both (HFSDP)", Sharding::hfsdp("dp", "fsdp")),
    ];
    println!(
        "bytes that rank 0 of {mesh} holds (AdamW's two states take twice the stored parameters), and receives in a step\n"
    );
    println!("{:<34} stored  gradients       held   received  calls", "");
    let mut stored = Vec::new();
    for (name, sharding) in shardings {
        let outcomes = train(mesh, sharding)?;
        for outcome in &outcomes {
            // Not close: equal, bit for bit.
            assert_eq!((&outcome.losses, outcome.digest), (&single.losses, single.digest), "{name}");
        }
        let Outcome { bytes, received, calls, .. } = &outcomes[0];
        let ShardedBytes { parameters, gradients, held, .. } = bytes;
        println!("{name:<33} {parameters:>7} {gradients:>10} {held:>10} {received:>10} {calls:>6}");
        stored.push(outcomes.iter().map(|outcome| outcome.bytes.parameters).sum::<usize>());
    }
    let whole = single.bytes.parameters;
    // Four replicas; two replicas, each in two parts; one, in four parts.
    assert_eq!(stored, [4 * whole, 2 * whole, whole]);
    println!("\nlosses {:.6?} and parameters have the bits of one rank in all of them", single.losses);
    Ok(())
}
