//! Parameters that an optimizer's step rounds to the dtype that modules compute in.

use isoshard::Result;
use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::DeviceMesh;
use isoshard::fsdp::{Block, BlockPolicy, Sharding, fully_shard};
use isoshard::nn::{Forward, ParamId, Params, Plan};
use isoshard::optim::{AdamW, Optimizer, Sgd, UpdateRule};
use isoshard::rng::Init;
use isoshard::tensor::DType;

/// Three parameters of a unit, the last one frozen; stored as a block if `block`. Shards have more than the 16 KiB below
/// which the thread engine keeps what is sent for the next call.
fn params_on(rank: &Rank, block: bool) -> Result<(Params, [ParamId; 3])> {
    let mesh = DeviceMesh::new(rank, &[("fsdp", rank.world_len())])?;
    let plan = if block { Plan::default() } else { Plan::default().fsdp("fsdp") };
    let mut params = Params::new(&mesh, plan, 1)?;
    params.compute_in(DType::BF16)?;
    let normal = Init::Normal { mean: 0.0, std: 1.0 };
    let mut of = |path: &str, shape: [usize; 2]| params.root().param(path, shape, normal);
    let ids = [of("h.0.a", [160, 192])?, of("h.0.b", [256, 128])?, of("h.0.c", [240, 128])?];
    if block {
        fully_shard(&mut params, &["h.*"], &Sharding::zero3("fsdp"), &BlockPolicy::new(Block::Element))?;
    }
    params.freeze("h.0.c")?;
    Ok((params, ids))
}

/// Returns the bf16 elements that modules compute with. They are the stored ones, rounded.
fn used(params: &Params, ids: &[ParamId]) -> Result<Vec<Vec<f64>>> {
    let pass = Forward::eval(params);
    let used = |&id: &ParamId| {
        let (used, stored) = (pass.param(id)?.full_tensor()?, params.value(id).full_tensor()?);
        assert_eq!(used.to_f64_vec(), stored.cast(DType::BF16)?.to_f64_vec(), "{}", params.path(id));
        Ok(used.to_f64_vec())
    };
    ids.iter().map(used).collect()
}

/// Returns the addresses of the elements that modules compute with on one rank.
fn addresses(params: &Params, ids: &[ParamId]) -> Result<Vec<*const half::bf16>> {
    let pass = Forward::eval(params);
    ids.iter().map(|&id| Ok(pass.param(id)?.local().data::<half::bf16>()?.as_ptr())).collect()
}

fn step<R: UpdateRule>(params: &mut Params, ids: &[ParamId], optimizer: &mut Optimizer<R>) -> Result<()> {
    let pass = Forward::train_without_dropout(params);
    let [a, b, c] = [0, 1, 2].map(|i| pass.param(ids[i]).and_then(|x| x.mul(&x)?.sum_all()));
    let mut loss = a?.add(&b?)?.add(&c?)?;
    drop(pass);
    optimizer.step(params, &mut loss.backward()?).map(drop)
}

fn steps<R: UpdateRule>(rank: &Rank, block: bool, mut optimizer: Optimizer<R>) -> Result<()> {
    let alone = rank.world_len() == 1;
    let (mut params, ids) = params_on(rank, block)?;
    let first = used(&params, &ids)?;
    step(&mut params, &ids, &mut optimizer)?;
    let second = used(&params, &ids)?;
    assert!(first[0] != second[0] && first[1] != second[1] && first[2] == second[2]);

    let (before, pass) = (params.mesh().copied_bytes(), Forward::eval(&params));
    ids.iter().try_for_each(|&id| pass.param(id).map(drop))?;
    drop(pass);
    let copied = params.mesh().copied_bytes() - before;
    assert!(copied == 0 || !block, "they lie as they are gathered");

    let at = if alone { addresses(&params, &ids)? } else { Vec::new() };
    step(&mut params, &ids, &mut optimizer)?;
    used(&params, &ids)?;
    assert!(!alone || addresses(&params, &ids)? == at, "a step writes where the one before it wrote");

    params.set(ids[0], params.value(ids[0]).mul_scalar(3.0)?)?;
    used(&params, &ids)?;
    step(&mut params, &ids, &mut optimizer)?;
    used(&params, &ids)?;

    // A step does not overwrite a value that a tape has.
    let pass = Forward::train_without_dropout(&params);
    let kept = pass.param(ids[0])?;
    drop(pass);
    let held = kept.full_tensor()?.to_f64_vec();
    step(&mut params, &ids, &mut optimizer)?;
    assert_eq!(kept.full_tensor()?.to_f64_vec(), held);
    assert_ne!(used(&params, &ids)?[0], held);

    params.compute_in(DType::F32)?;
    step(&mut params, &ids, &mut optimizer)?;
    let pass = Forward::eval(&params);
    let [used, stored] = [&pass.param(ids[0])?, params.value(ids[0])].map(|x| x.full_tensor());
    assert_eq!(used?.to_f64_vec(), stored?.to_f64_vec());
    Ok(())
}

/// The norm of all gradients is a call in which ranks wait for each other, so that none reads what another sent when the
/// step writes to it.
#[test]
fn the_next_pass_computes_with_what_the_step_rounded() {
    for (ranks, block) in [(1, false), (2, false), (2, true), (3, true)] {
        let run = move |rank: Rank| {
            steps(&rank, block, AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.25).clip(1.0))?;
            steps(&rank, block, Sgd::new().momentum(0.5).nesterov().rate(0.5).clip(1.0))
        };
        spmd(ranks, run).unwrap_or_else(|e| panic!("{ranks} ranks, {block}: {e}"));
    }
}
