//! Training steps of a small Llama whose units are gathered, reduced and updated in place, over any engine.

use std::collections::BTreeSet;

use isoshard::Result;
use isoshard::dtensor::DeviceMesh;
use isoshard::fsdp::{BlockPolicy, Sharding, fully_shard};
use isoshard::nn::{Forward, Llama, LlamaConfig, Params, Plan};
use isoshard::optim::AdamW;
use isoshard::tensor::{DType, Device, Tensor};

const WIDTH: usize = 8;

/// The bytes of the gradients of the head and the last norm. They arrive before the rest of the root's, and lie mostly on one
/// rank: equal shards of these two alone would be padding, so they are copied side by side.
pub const HEAD_BYTES: u64 = head_bytes(WIDTH);

/// Returns [`HEAD_BYTES`] of a model of another width.
pub const fn head_bytes(width: usize) -> u64 {
    4 * (13 * width + width) as u64
}

/// The bytes that a rank has copied outside of collectives in one step.
#[derive(Clone, Copy, Debug)]
pub struct CopiedBytes {
    pub gather: u64,
    pub reduce: u64,
}

/// Runs four steps of FSDP over the axis `fsdp` that compute in `compute`.
pub fn steps_in_place(mesh: &DeviceMesh, compute: DType) -> Result<[CopiedBytes; 4]> {
    sharded_steps_in_place(mesh, compute, &Sharding::zero3("fsdp"), WIDTH)
}

/// Runs four steps of a model of a multiple of 4 columns that compute in `compute`. Shards stay where they are: the optimizer
/// writes them in place, except in the third step, after which a tape still has the values.
pub fn sharded_steps_in_place(
    mesh: &DeviceMesh,
    compute: DType,
    sharding: &Sharding,
    width: usize,
) -> Result<[CopiedBytes; 4]> {
    let config = LlamaConfig {
        vocabulary: 13,
        block: 8,
        layers: 3,
        heads: 2,
        kv_heads: 2,
        head_width: width / 2,
        width,
        hidden: 3 * width,
        base: 1e4,
        dropout: 0.0,
    };
    let mut params = Params::new(mesh, Plan::default(), 7)?;
    params.compute_in(compute)?;
    let model = Llama::new(&mut params, config)?;
    let units = fully_shard(&mut params, &["h.*"], sharding, &BlockPolicy::default())?;
    let text = Tensor::from_vec((0..128i64).map(|i| i * i % 13).collect(), [16, 8])?;
    let tokens = params.batch(&text)?;
    let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.01).clip(0.5);
    let held: Vec<_> = params.ids().filter(|&id| params.value(id).local().numel() > 0).collect();
    let addresses =
        |params: &Params| held.iter().map(|&id| address(params.value(id).local())).collect::<Vec<_>>();
    let before = addresses(&params);
    assert!(mesh.device() != Device::Cpu || !before.contains(&None));
    for id in params.ids().collect::<Vec<_>>() {
        let other = params.value(id).detach().mul_scalar(1.0)?;
        params.set(id, other)?;
    }
    assert_eq!(addresses(&params), before, "other values are written where the shards are");
    let mut copied = [CopiedBytes { gather: 0, reduce: 0 }; 4];
    let mut before_last = None;
    for (i, step) in copied.iter_mut().enumerate() {
        let start = mesh.copied_bytes();
        let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?;
        step.gather = mesh.copied_bytes() - start;
        let mut gradients = if i == 2 { loss.backward_keeping()? } else { loss.backward()? };
        step.reduce = mesh.copied_bytes() - start - step.gather;
        if i == 2 {
            assert_eq!(addresses(&params), before, "the optimizer writes where the shards are");
        }
        optimizer.step(&mut params, &mut gradients)?;
        if i == 2 {
            before_last = Some(addresses(&params));
        }
    }
    let placed_again = before_last.expect("there was a third step");
    let tape_has_copies = compute != DType::F32 || mesh.device() != Device::Cpu;
    assert!(tape_has_copies || placed_again != before, "the tape had the values");
    assert_eq!(addresses(&params), placed_again, "the last step wrote where the new shards are");
    let mut distances = BTreeSet::new();
    for &id in &held {
        let [param, first, second] = {
            let [first, second] = optimizer.rule().moments().each_ref().map(|moments| moments.get(id));
            [Some(params.value(id)), first, second].map(|x| x.and_then(|x| address(x.local())).unwrap_or(0))
        };
        distances.insert((first.wrapping_sub(param), second.wrapping_sub(param)));
    }
    assert!(distances.len() <= units.units().len(), "the moments of a unit lie as its parameters do");
    Ok(copied)
}

/// Returns the address of a tensor's elements, unless they are on a device.
fn address(x: &Tensor) -> Option<usize> {
    x.data::<f32>().ok().map(|x| x.as_ptr() as usize)
}
