//! The table of `docs/fsdp.md`: the bytes that each sharding stores, holds and receives are those of its formula, in f32 and with
//! modules that compute in bf16; and the norm of all gradients takes one call per set of axes.

use isoshard::Result;
use isoshard::comm::{Rank, Tally, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::fsdp::{BlockPolicy, ShardedBytes, Sharding, fully_shard};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, ParamId, Params, Plan};
use isoshard::optim::AdamW;
use isoshard::placement::Mesh;
use isoshard::rng::Init;
use isoshard::tensor::DType;

/// The matrices of the model, in units of four.
const MATRICES: usize = 12;
const WIDTH: usize = 64;
/// The bytes of all parameters in f32: `P` of the table.
const ALL: usize = MATRICES * WIDTH * WIDTH * 4;

/// The bytes of one rank: those that it keeps, and those that it receives in each part of two steps.
#[derive(Debug, PartialEq)]
struct Measured {
    stored: usize,
    gradients: usize,
    held: usize,
    states: usize,
    rounded: usize,
    /// Received in the forward pass after an update, beyond those of one with the same parameters.
    after_update: usize,
    forward: usize,
    backward: usize,
}

/// A chain of products, whose derivatives read all matrices.
fn measure(rank: &Rank, mesh: &str, sharding: &Sharding, compute: DType) -> Result<Measured> {
    let mesh = DeviceMesh::parse(rank, mesh)?;
    let mut params = Params::new(&mesh, Plan::default(), 7)?;
    params.compute_in(compute)?;
    let mut matrix = |k: usize| -> Result<ParamId> {
        let (name, init) = (format!("w{}", k % 4), Init::Normal { mean: 0.0, std: 0.1 });
        params.root().child("h").child(k / 4).param(&name, [WIDTH, WIDTH], init)
    };
    let ids = (0..MATRICES).map(&mut matrix).collect::<Result<Vec<_>>>()?;
    fully_shard(&mut params, &["h.*"], sharding, &BlockPolicy::default())?;
    let ShardedBytes { parameters, gradients, held, rounded, .. } = ShardedBytes::of(&params)?;
    let len_bytes = |of: &mut dyn Iterator<Item = &DTensor>| of.map(|x| x.local().len_bytes()).sum::<usize>();
    assert_eq!(len_bytes(&mut params.values()), parameters);
    // Without a gradient of `x`, no derivative would read the first matrix.
    let x = DTensor::full(&mesh, compute, [512, WIDTH], params.batch_layout(), 0.5)?;
    let x = x.requires_grad()?;
    let forward = |params: &Params| -> Result<(DTensor, usize)> {
        let before = mesh.received_bytes();
        let cx = Forward::train_without_dropout(params);
        let product = |y: DTensor, id: &ParamId| y.matmul(&cx.param(*id)?);
        let loss = ids.iter().try_fold(x.clone(), product)?.sum_all()?;
        drop(cx);
        Ok((loss, (mesh.received_bytes() - before) as usize))
    };
    let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.01);
    let mut found = None;
    for _ in 0..2 {
        let (mut loss, first) = forward(&params)?;
        let before = mesh.received_bytes();
        let mut all = loss.backward()?;
        let backward = (mesh.received_bytes() - before) as usize;
        drop(loss);
        let of = len_bytes(&mut params.values().map(|value| all.get(value).expect("used")));
        assert_eq!(of, gradients);
        let (_, again) = forward(&params)?;
        let before = mesh.received_bytes();
        optimizer.step(&mut params, &mut all)?;
        assert_eq!(mesh.received_bytes(), before, "an update without clipping sends nothing");
        let moments = optimizer.rule().moments();
        let states = ids.iter().flat_map(|&id| moments.iter().map(move |of| of.get(id).expect("a state")));
        let states = len_bytes(&mut states.into_iter());
        let now = Measured {
            stored: parameters,
            gradients,
            held,
            states,
            rounded,
            after_update: first - again,
            forward: again,
            backward,
        };
        assert!(found.is_none_or(|earlier| earlier == now), "each step receives as much");
        found = Some(now);
    }
    Ok(found.expect("two steps"))
}

/// Four ranks; `d` is 4, and for hybrid sharding `n` and `s` are 2. The last unit is still there when the backward pass begins.
#[test]
fn each_sharding_holds_and_moves_the_bytes_of_its_formula() {
    // Parameters and gradients in parts of P, held values in parts of C, the parts of C that one pass gathers, and the parts
    // of P that reductions receive: all in quarters.
    let cases = [
        ("fsdp=4", Sharding::ddp("fsdp"), [4, 4, 0, 0, 6]),
        ("fsdp=4", Sharding::zero1("fsdp"), [1, 4, 4, 0, 6]),
        ("fsdp=4", Sharding::zero2("fsdp"), [1, 1, 4, 0, 3]),
        ("fsdp=4", Sharding::zero3("fsdp"), [1, 1, 0, 3, 3]),
        ("dp=2,fsdp=2", Sharding::over(&["dp", "fsdp"]), [4, 4, 0, 0, 6]),
        ("dp=2,fsdp=2", Sharding::over(&["dp", "fsdp"]).states(&["fsdp", "dp"]), [1, 4, 4, 0, 6]),
        // A reduce-scatter among two, and an all-reduce of half of the gradients.
        ("dp=2,fsdp=2", Sharding::hsdp("dp", "fsdp"), [2, 2, 0, 2, 2 + 2]),
        // A reduce-scatter among two, and one of half of the gradients.
        ("dp=2,fsdp=2", Sharding::hfsdp("dp", "fsdp"), [1, 1, 2, 2, 2 + 1]),
    ];
    for (mesh, sharding, [stored, gradients, held, gathered, reduced]) in cases {
        for compute in [DType::F32, DType::BF16] {
            let all_computed = ALL / 4 * compute.size_bytes();
            let [of_p, of_c] = [ALL, all_computed].map(|all| move |quarters: usize| all / 4 * quarters);
            let is_held = held > 0;
            let wanted = Measured {
                stored: of_p(stored),
                gradients: of_p(gradients),
                held: of_c(held),
                states: 2 * of_p(stored),
                rounded: if compute == DType::F32 || is_held { 0 } else { of_c(stored) },
                after_update: if is_held { of_c(held) - of_c(stored) } else { 0 },
                forward: of_c(gathered),
                backward: of_c(gathered) * 2 / 3 + of_p(reduced),
            };
            let with = sharding.clone();
            let all = spmd(4, move |rank| measure(&rank, mesh, &with, compute));
            for (rank, found) in all.unwrap_or_else(|e| panic!("{sharding}: {e}")).into_iter().enumerate() {
                assert_eq!(found, wanted, "rank {rank} of {mesh}, {compute}, {sharding}");
            }
        }
    }
}

/// Returns the norm of the gradients of a GPT, and the calls that it took.
fn norm(rank: &Rank, mesh: &str, sharding: Option<&Sharding>) -> Result<(f64, u64)> {
    let (rank, tally) = Tally::of(rank)?;
    let mesh = DeviceMesh::parse(&rank, mesh)?;
    let plan = match mesh.mesh().axis("tp") {
        Ok(_) => Plan::transformer(&Mesh::parse("tp=2", 0)?, Parallel { heads: 2, sequence: true })?,
        Err(_) => Plan::default(),
    };
    let mut params = Params::new(&mesh, plan, 7)?;
    let config =
        GptConfig { vocabulary: 13, block: 6, layers: 3, heads: 2, width: 8, dropout: 0.0, bias: true };
    let model = Gpt::new(&mut params, config)?;
    if let Some(sharding) = sharding {
        fully_shard(&mut params, &["h.*"], sharding, &BlockPolicy::default())?;
    }
    let tokens = DTensor::zeros(&mesh, DType::I64, [6, 6], params.batch_layout())?;
    let gradients = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?.backward()?;
    let before = tally.total().calls;
    let norm = params.grad_norm(&gradients)?;
    let calls = tally.total().calls - before;
    Ok((norm.item()?, calls))
}

#[test]
fn the_norm_of_all_gradients_takes_one_call_per_set_of_axes() {
    let single = spmd(1, |rank| norm(&rank, "dp=1", None)).unwrap_or_else(|e| panic!("{e}"))[0];
    assert_eq!(single.1, 0);
    for (mesh, sharding, calls) in [
        ("fsdp=2", Sharding::ddp("fsdp"), 0),
        ("fsdp=2", Sharding::zero3("fsdp"), 1),
        ("fsdp=3", Sharding::zero3("fsdp"), 1),
        ("dp=2,fsdp=2", Sharding::hsdp("dp", "fsdp"), 1),
        ("dp=2,fsdp=2", Sharding::hfsdp("dp", "fsdp"), 1),
        // Gradients that tensor parallelism shards too, and the others.
        ("fsdp=2,tp=2", Sharding::zero3("fsdp"), 2),
        ("dp=2,fsdp=2,tp=2", Sharding::hfsdp("dp", "fsdp"), 2),
    ] {
        let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
        let with = sharding.clone();
        let all = spmd(ranks, move |rank| norm(&rank, mesh, Some(&with)));
        let all = all.unwrap_or_else(|e| panic!("{sharding}: {e}"));
        println!("{mesh} {sharding}: {} calls", all[0].1);
        assert_eq!(all, vec![(single.0, calls); ranks], "{mesh} {sharding}");
    }
}
