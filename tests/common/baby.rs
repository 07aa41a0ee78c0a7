//! A training step of a GPT of 10.7 million parameters, which takes some 300 MB.

use isoshard::Result;
use isoshard::comm::Rank;
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::rng::Generator;
use isoshard::tensor::Tensor;

/// The sizes of `train_gpt --config baby --batch 4`, whose text has some 93 characters.
const BABY: GptConfig =
    GptConfig { vocabulary: 93, block: 256, layers: 6, heads: 6, width: 384, dropout: 0.0, bias: false };
const BATCH: usize = 4;

/// Makes the model and takes one step. Returns the loss.
pub fn step(rank: &Rank) -> Result<f64> {
    let mesh = DeviceMesh::new(rank, &[("fsdp", rank.world_len())])?;
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: BABY.heads, sequence: false })?;
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 7)?;
    let model = Gpt::new(&mut params, BABY)?;
    let (mut optimizer, mut dropout) = (AdamW::new().betas(0.9, 0.99).decay(0.1), Generator::new(3));
    let numbers = (0..(BATCH * BABY.block) as i64).map(|i| i % BABY.vocabulary as i64);
    let tokens = Tensor::from_vec(numbers.collect::<Vec<_>>(), [BATCH, BABY.block])?;
    let tokens = DTensor::distribute(&mesh, &tokens, layout)?;
    let mut grads = Gradients::default();
    let cx = Forward::train(&params, &mut dropout);
    let mut loss = model.loss(&cx, &tokens, &tokens)?;
    drop(cx);
    let value = loss.detach();
    loss.backward_into(&mut grads)?;
    let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
    let scale = clip_scale(&norm, 1.0)?;
    optimizer.step(&mut params, &mut grads, &scale, 1e-3)?;
    value.item()
}
