//! 6. Two meshes: one trains, the other generates with its weights. `cargo run --example 06_two_meshes`

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{Bridge, DTensor, DeviceMesh};
use isoshard::nn::{Forward, Gpt, GptConfig, Module, Parallel, Params, Plan};
use isoshard::optim::{AdamW, Optimizer};
use isoshard::placement::{Layout, Mesh};
use isoshard::rng::Generator;
use isoshard::tensor::Tensor;

const CONFIG: GptConfig =
    GptConfig { vocabulary: 11, block: 6, layers: 2, heads: 2, width: 8, dropout: 0.1, bias: true };
const PARALLEL: Parallel = Parallel { heads: 2, sequence: false };

fn text(from: usize) -> Result<Tensor> {
    Tensor::from_vec((from..from + 24).map(|i| (i * i % 11) as i64).collect(), [4, 6])
}

/// One step of training.
fn step(
    model: &Gpt,
    params: &mut Params,
    optimizer: &mut Optimizer<AdamW>,
    dropout: &mut Generator,
) -> Result<()> {
    let batch = params.batch_layout();
    let tokens = DTensor::distribute(params.mesh(), &text(0)?, batch.clone())?;
    let targets = DTensor::distribute(params.mesh(), &text(1)?, batch)?;
    let mut loss = model.loss(&Forward::train(params, dropout), &tokens, &targets)?;
    optimizer.step(params, &mut loss.backward()?).map(drop)
}

/// The scores of the next tokens, whole.
fn scores(model: &Gpt, params: &Params) -> Result<Vec<f32>> {
    let tokens =
        DTensor::distribute(params.mesh(), &text(2)?, Layout::replicated(params.mesh().mesh().ndim()))?;
    model.forward(&Forward::eval(params), &tokens)?.full_tensor()?.to_vec::<f32>()
}

/// The outcome of one rank, of the side that trains and of the side that generates.
#[derive(Default)]
struct Outcome {
    scores: [Option<Vec<f32>>; 2],
    pictures: [Option<String>; 2],
    /// The bytes of weights that the rank sends and receives per transfer.
    moved: (u64, u64),
}

fn main() -> Result<()> {
    let results = spmd(5, |rank| {
        // Ranks 0 to 2 train, 2 to 4 generate: rank 2 does both. A `Mesh` is metadata: a rank may create one that it is not in.
        let train = Mesh::over(&[("fsdp", 3)], 0..3)?;
        let generate = Mesh::over(&[("dp", 1), ("tp", 2)], [4, 2])?;
        if rank.rank() == 3 {
            return Ok(Outcome::default()); // It is in neither.
        }
        let plans = [Plan::transformer(&train, PARALLEL)?, Plan::transformer(&generate, PARALLEL)?];

        // Each rank declares the model on the meshes that it is in.
        let declare = |mesh: &Mesh, plan: &Plan, seed: u64| -> Result<Option<(Gpt, Params)>> {
            if !mesh.contains(rank.rank()) {
                return Ok(None);
            }
            let mut params = Params::new(&DeviceMesh::on(&rank, mesh)?, plan.clone(), seed)?;
            Ok(Some((Gpt::new(&mut params, CONFIG)?, params)))
        };
        let mut trainer = declare(&train, &plans[0], 7)?;
        let mut server = declare(&generate, &plans[1], 0)?;

        // The bridge from one to the other is planned once, from metadata.
        let (_, any) = trainer.as_ref().or(server.as_ref()).expect("the rank is in one of them");
        let weights = any.transfers((&train, &plans[0]), (&generate, &plans[1]))?;
        let bridge = Bridge::new(&rank, &train, &generate, weights)?;
        let pictures = [&trainer, &server].map(|side| {
            let (_, params) = side.as_ref()?;
            Some(params.value(params.find("h.0.mlp.up.weight")?).spec().draw())
        });
        let moved = (bridge.sent_bytes(), bridge.received_bytes());

        let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1).rate(1e-2).clip(1.0);
        let mut dropout = Generator::new(7).child("dropout");
        for _ in 0..2 {
            if let Some((model, params)) = &mut trainer {
                step(model, params, &mut optimizer, &mut dropout)?;
            }
            // The weights go over: every rank receives exactly what it lacks of its part there.
            let leaving = trainer.iter().flat_map(|(_, params)| params.values());
            let onto = server.as_ref().map(|(_, params)| params.mesh().clone());
            let transit = bridge.send_async(leaving, onto.as_ref())?;
            transit.wait_each(|i, weight| {
                let (_, params) = server.as_mut().expect("they arrive on the generation mesh");
                let id = params.ids().nth(i).expect("one for each parameter");
                params.set(id, weight)
            })?;
        }
        let score = |side: &Option<(Gpt, Params)>| {
            side.as_ref().map(|(model, params)| scores(model, params)).transpose()
        };
        Ok(Outcome { scores: [score(&trainer)?, score(&server)?], pictures, moved })
    })?;

    // Not close: equal, on another mesh of another size under another kind of parallelism.
    let trained = results[0].scores[0].as_ref().expect("rank 0 trains");
    for (rank, outcome) in results.iter().enumerate() {
        for scores in outcome.scores.iter().flatten() {
            assert!(scores.iter().zip(trained).all(|(a, b)| a.to_bits() == b.to_bits()), "rank {rank}");
        }
    }
    let [_, _, both, none, generates] = &results[..] else { unreachable!("there are five ranks") };
    assert!(both.scores[1].is_some() && generates.scores[1].is_some() && none.scores == [None, None]);

    println!("h.0.mlp.up.weight on the training mesh, then on the generation mesh:");
    for picture in both.pictures.iter().flatten() {
        println!("{picture}");
    }
    for (rank, Outcome { moved: (sent, received), .. }) in results.iter().enumerate() {
        println!("rank {rank} sends {sent:>5} bytes of weights and receives {received:>5}");
    }
    println!("both meshes give the same {} scores, bit for bit", trained.len());
    Ok(())
}
