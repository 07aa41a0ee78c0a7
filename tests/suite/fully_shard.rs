//! `fully_shard`: every sharding of parameters, gradients and states trains with the bits of a single rank, in a gather a pass and
//! a reduction per unit; wrong input is refused and moves nothing.

use isoshard::comm::{DryRun, Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients, Reduction};
use isoshard::fsdp::{Block, BlockPolicy, ShardedBytes, Sharding, fully_shard};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, WarmupCosine};
use isoshard::placement::Mesh;
use isoshard::rng::{Generator, Init};
use isoshard::tensor::{DType, Tensor, meta};
use isoshard::{Error, Result};

use crate::common::in_place::{HEAD_BYTES, head_bytes, sharded_steps_in_place, steps_in_place};

const CONFIG: GptConfig =
    GptConfig { vocabulary: 13, block: 6, layers: 3, heads: 2, width: 8, dropout: 0.1, bias: true };

/// A limit of gathered bytes in f32 for the root and one block.
const ONE_UNIT: usize = 5000;

/// A training run: its mesh, sharding and blocks.
#[derive(Clone)]
struct Run {
    mesh: &'static str,
    sharding: Option<Sharding>,
    units: &'static [&'static str],
    blocks: BlockPolicy,
    compute: DType,
    recompute: bool,
}

impl Run {
    fn new(mesh: &'static str, sharding: Sharding) -> Run {
        let (units, blocks): (&[&str], _) = (&["h.*"], BlockPolicy::default());
        Run { mesh, sharding: Some(sharding), units, blocks, compute: DType::F32, recompute: false }
    }

    /// Returns the losses, the norms and the digest of the parameters after three steps.
    fn train(&self, rank: &Rank) -> Result<Vec<f64>> {
        let mesh = DeviceMesh::parse(rank, self.mesh)?;
        let mut plan = match mesh.mesh().axis("tp") {
            Ok(_) => Plan::transformer(&Mesh::parse("tp=2", 0)?, Parallel { heads: 2, sequence: true })?,
            Err(_) => Plan::default(),
        };
        if self.recompute {
            plan = plan.recompute("h.*");
        }
        let mut params = Params::new(&mesh, plan, 7)?;
        params.compute_in(self.compute)?;
        let model = Gpt::new(&mut params, CONFIG)?;
        if let Some(sharding) = &self.sharding {
            fully_shard(&mut params, self.units, sharding, &self.blocks)?;
        }
        let schedule = WarmupCosine { peak: 0.02, floor: 0.0, warmup: 1, steps: 3 };
        let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(schedule).clip(0.5);
        let layout = params.batch_layout();
        let text = |from: i64| Tensor::from_vec((from..from + 36).map(|i| i * i % 13).collect(), [6, 6]);
        let (tokens, targets) = (text(0)?, text(1)?);
        let tokens = DTensor::distribute(&mesh, &tokens, layout.clone())?;
        let targets = DTensor::distribute(&mesh, &targets, layout)?;
        let mut dropout = Generator::new(3).child("dropout");
        let mut seen = Vec::new();
        for step in 0..3 {
            let mut gradients = Gradients::default();
            // The second step adds two passes, and an evaluation comes between them.
            for _ in 0..1 + step % 2 {
                let mut loss = model.loss(&Forward::train(&params, &mut dropout), &tokens, &targets)?;
                loss.backward_into(&mut gradients)?;
                let eval = model.loss(&Forward::eval(&params), &tokens, &targets)?;
                seen.extend([loss.item()?, eval.item()?]);
            }
            let report = optimizer.step(&mut params, &mut gradients)?;
            seen.push(report.norm.expect("there is a limit").item()?);
        }
        seen.push(params.digest()? as f64);
        Ok(seen)
    }

    fn on_its_mesh(&self) -> Vec<f64> {
        let ranks = Mesh::parse(self.mesh, 0).unwrap().rank_len();
        let run = self.clone();
        let all = spmd(ranks, move |rank| run.train(&rank)).unwrap_or_else(|e| panic!("{self:?}: {e}"));
        assert!(all.iter().all(|other| *other == all[0]), "{self:?}: ranks differ");
        all.into_iter().next().expect("a rank")
    }

    fn single(&self) -> Vec<f64> {
        Run { mesh: "1", sharding: None, ..self.clone() }.on_its_mesh()
    }
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sharding = self.sharding.as_ref().map(|s| s.to_string());
        write!(f, "{} {sharding:?} {:?} {:?} {}", self.mesh, self.units, self.blocks, self.compute)
    }
}

#[test]
fn every_sharding_has_the_bits_of_a_single_rank() {
    let single = Run::new("1", Sharding::over(&[])).single();
    let runs = [
        ("dp=2", Sharding::ddp("dp")),
        ("dp=2", Sharding::zero1("dp")),
        ("dp=3", Sharding::zero1("dp")),
        ("dp=2", Sharding::zero2("dp")),
        ("dp=3", Sharding::zero2("dp")),
        ("dp=2", Sharding::zero3("dp")),
        ("dp=3", Sharding::zero3("dp")),
        ("dp=5", Sharding::zero3("dp")),
        ("dp=2", Sharding::zero3("dp").stay_gathered("h.1")),
        ("dp=2", Sharding::zero3("dp").gather_at_most(ONE_UNIT)),
        ("dp=2,fsdp=2", Sharding::hsdp("dp", "fsdp").gather_at_most(ONE_UNIT)),
        ("dp=2,fsdp=2", Sharding::hsdp("dp", "fsdp")),
        ("dp=2,fsdp=2", Sharding::hfsdp("dp", "fsdp")),
        ("dp=2,fsdp=3", Sharding::hfsdp("dp", "fsdp")),
        // Gradients reduced to shards over both axes, states over one.
        ("dp=2,fsdp=2", Sharding::hsdp("dp", "fsdp").states(&["fsdp", "dp"])),
        ("dp=2,fsdp=2", Sharding::over(&["dp", "fsdp"]).states(&["fsdp", "dp"])),
        ("fsdp=2,tp=2", Sharding::zero3("fsdp")),
        ("fsdp=3,tp=2", Sharding::zero2("fsdp")),
        ("dp=2,fsdp=2,tp=2", Sharding::hsdp("dp", "fsdp")),
        ("dp=2,fsdp=2,tp=2", Sharding::hfsdp("dp", "fsdp")),
    ];
    for (mesh, sharding) in runs {
        let run = Run::new(mesh, sharding);
        assert_eq!(run.on_its_mesh(), single, "{run:?}");
    }
}

#[test]
fn every_block_and_every_unit_has_the_bits_of_a_single_rank() {
    let single = Run::new("1", Sharding::over(&[])).single();
    let tile = Block::Tile { rows: 4, columns: 8 };
    let policies = [
        BlockPolicy::new(Block::Element),
        BlockPolicy::new(Block::Matrix),
        BlockPolicy::new(Block::Rows(16)),
        BlockPolicy::new(Block::Element).set("h.*.attn.**", Block::Rows(3)).set("h.*.mlp.*.weight", tile),
    ];
    let units: [&[&str]; 4] = [&[], &["h.*.attn", "h.*.mlp", "wte"], &["h.0", "h.2"], &["**"]];
    for (blocks, units) in policies.into_iter().zip(units) {
        // Tensor parallelism cuts its 13 rows unequally, and larger blocks of those are refused.
        let blocks = blocks.set("wte.weight", Block::Rows(1));
        for mesh in ["fsdp=2", "fsdp=3,tp=2"] {
            let run = Run { blocks: blocks.clone(), units, ..Run::new(mesh, Sharding::zero3("fsdp")) };
            assert_eq!(run.on_its_mesh(), single, "{run:?}");
        }
    }
}

#[test]
fn rounded_parameters_and_recomputed_blocks_have_the_bits_of_a_single_rank() {
    for (compute, recompute) in [(DType::BF16, false), (DType::BF16, true), (DType::F32, true)] {
        let with = |run: Run| Run { compute, recompute, ..run };
        let single = with(Run::new("1", Sharding::over(&[]))).single();
        for (mesh, sharding) in [
            ("dp=2", Sharding::zero1("dp")),
            ("dp=2", Sharding::zero2("dp")),
            ("dp=3", Sharding::zero3("dp")),
            ("dp=3", Sharding::zero3("dp").gather_at_most(ONE_UNIT / (4 / compute.size_bytes()))),
            ("dp=2,fsdp=2", Sharding::hfsdp("dp", "fsdp")),
        ] {
            let run = with(Run::new(mesh, sharding));
            assert_eq!(run.on_its_mesh(), single, "{run:?}, recomputed: {recompute}");
        }
    }
}

/// The tied table is a unit of its own, which is freed between its two uses.
#[test]
fn a_rounded_tied_table_has_the_bits_of_a_single_rank_under_every_sharding() {
    for compute in [DType::BF16, DType::F16] {
        let with = |run: Run| Run { compute, units: &["h.*", "wte"], ..run };
        let single = with(Run::new("1", Sharding::over(&[]))).single();
        for (mesh, sharding) in [
            ("dp=1", Sharding::zero1("dp")),
            ("dp=1", Sharding::zero3("dp")),
            ("dp=2", Sharding::ddp("dp")),
            ("dp=3", Sharding::zero1("dp")),
            ("dp=2", Sharding::zero2("dp")),
            ("dp=3", Sharding::zero3("dp")),
            ("dp=2,fsdp=2", Sharding::hsdp("dp", "fsdp")),
            ("dp=2,fsdp=2", Sharding::hfsdp("dp", "fsdp")),
            ("fsdp=2,tp=2", Sharding::zero3("fsdp")),
        ] {
            let run = with(Run::new(mesh, sharding));
            assert_eq!(run.on_its_mesh(), single, "{run:?}");
        }
    }
}

#[test]
fn a_unit_is_one_gather_a_pass_and_one_reduction() {
    let run = |rank: Rank, sharding: Sharding| {
        let (rank, tally) = isoshard::comm::Tally::of(&rank)?;
        let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let model = Gpt::new(&mut params, GptConfig { dropout: 0.0, ..CONFIG })?;
        fully_shard(&mut params, &["h.*"], &sharding, &BlockPolicy::default())?;
        let batch = params.batch_layout();
        let tokens = DTensor::zeros(&mesh, DType::I64, [4, 6], batch)?;
        let before = tally.total().calls;
        let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?;
        let forward = tally.total().calls - before;
        drop(loss.backward()?);
        Ok((forward, tally.total().calls - before - forward))
    };
    let zero3 = || Sharding::zero3("fsdp");
    let found = spmd(2, move |rank| run(rank, zero3())).unwrap_or_else(|e| panic!("{e}"));
    // Three blocks and the root, and the loss; in the backward pass two blocks again (the last is still there), the gradients
    // of three blocks and of the last norm, the tied table's two in one call, and the positions' in two: its derivative's
    // reduction comes first.
    assert_eq!(found, [(5, 9); 2]);
    let limited = spmd(2, move |rank| run(rank, zero3().gather_at_most(ONE_UNIT)));
    assert_eq!(
        limited.unwrap_or_else(|e| panic!("{e}")),
        found,
        "units are gathered later, in as many calls"
    );
}

/// The gradients of the head and the last norm lie mostly on one rank, and are copied side by side, once per call. Shards have
/// more than the 16 KiB below which the thread engine keeps a result for the next call.
#[test]
fn replicas_of_shards_agree_in_place() {
    const WIDTH: usize = 40;
    let run = |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, "dp=2,fsdp=2")?;
        sharded_steps_in_place(&mesh, DType::F32, &Sharding::hsdp("dp", "fsdp"), WIDTH)
    };
    for (rank, copied) in spmd(4, run).unwrap_or_else(|e| panic!("{e}")).iter().enumerate() {
        assert_eq!(copied.map(|step| step.gather), [0; 4], "rank {rank}");
        let reduce = copied.map(|step| step.reduce);
        assert!(reduce[1..].iter().all(|bytes| *bytes <= 2 * head_bytes(WIDTH)), "rank {rank}: {reduce:?}");
    }
}

/// A tensor with fewer rows than ranks is cut along its longest dim among replicas, so that no rank has much more than its
/// share; two steps have the bits of a single rank.
#[test]
fn few_rows_are_shared_among_replicas_too() {
    let train = |rank: Rank, mesh: &str, sharding: Sharding| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let normal = Init::Normal { mean: 0.0, std: 1.0 };
        let mut add =
            |name: &str, shape: &[usize]| params.root().child("h").child(0).param(name, shape, normal);
        let ids = [add("experts", &[2, 31, 4])?, add("w", &[31, 8])?, add("bias", &[8])?];
        let units = fully_shard(&mut params, &["h.*"], &sharding, &BlockPolicy::default())?;
        let shard_len = units.units()[0].plan.as_ref().map_or(0, |plan| plan.shard_len());
        let own: usize = params.values().map(|value| value.local().numel()).sum();
        let x = Tensor::from_vec((0..372).map(|i| (i % 7) as f32 - 3.0).collect(), [12, 31])?;
        let x = params.batch(&x)?;
        let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.1).clip(1.0);
        for _ in 0..2 {
            let cx = Forward::train_without_dropout(&params);
            let y = x.matmul(&cx.param(ids[1])?)?.add(&cx.param(ids[2])?)?.sum_all()?;
            let experts = x.matmul(&cx.param(ids[0])?.sum(&[0], false)?)?;
            let mut loss = experts.mul(&experts)?.sum_all()?.add(&y)?;
            drop(cx);
            optimizer.step(&mut params, &mut loss.backward()?)?;
        }
        Ok((shard_len, own, params.digest()?))
    };
    let single =
        spmd(1, move |rank| train(rank, "dp=1", Sharding::ddp("dp"))).unwrap_or_else(|e| panic!("{e}"));
    for (mesh, replicas) in [("dp=3,fsdp=2", 3), ("dp=2,fsdp=3", 2)] {
        let run = move |rank| train(rank, mesh, Sharding::hfsdp("dp", "fsdp"));
        let all = spmd(6, run).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        for (shard_len, own, digest) in all {
            assert_eq!(digest, single[0].2, "{mesh}");
            // One index more of the experts' longest dim, of the weight's rows and of the bias.
            let most = shard_len / replicas + 2 * 4 + 8 + 1;
            assert!(own <= most, "{mesh}: {own} elements of {shard_len}");
        }
    }
}

/// A pass through eight matrices of 1 MiB on one of eight ranks, which gathers one of them at once, or two: in order, with each
/// used twice, and with every second one skipped.
#[test]
fn a_limit_of_gathered_bytes_is_kept() {
    const MATRIX: usize = 4 * 512 * 512;
    let peak = |limit: usize, order: &[usize]| -> Result<usize> {
        let dry = DryRun::new(8, 3)?;
        let mesh = DeviceMesh::parse(&dry.rank()?, "fsdp=8")?;
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let matrix = |i| params.root().child("h").child(i).param("w", [512, 512], Init::Ones);
        let ids = (0..8).map(matrix).collect::<Result<Vec<_>>>()?;
        let sharding = Sharding::zero3("fsdp").gather_at_most(limit);
        fully_shard(&mut params, &["h.*"], &sharding, &BlockPolicy::default())?;
        let bytes = ShardedBytes::of(&params)?;
        assert!(bytes.gathered <= limit, "{bytes}");
        let layout = params.batch_layout();
        let mut x = DTensor::full(&mesh, DType::F32, [8, 512], layout, 1.0)?;
        meta::reset_memory_peak();
        let cx = Forward::train_without_dropout(&params);
        for &i in order {
            x = x.matmul(&cx.param(ids[i])?)?;
        }
        drop(cx);
        let forward = dry.report().peak_bytes;
        // Activations take 2 KiB each.
        assert!((bytes.parameters + bytes.gathered..).contains(&forward), "{forward} for {bytes}");
        assert!(forward <= bytes.parameters + bytes.gathered + 17 * 2048 + 4096, "{forward} for {bytes}");
        drop(x.sum_all()?.backward()?);
        let all = dry.report().peak_bytes;
        // The first contribution to a sum waits for the second.
        let waiting = order.len().saturating_sub(8) * MATRIX;
        let of_formula = bytes.parameters + bytes.gradients + bytes.gathered + bytes.unreduced + waiting;
        assert!(all <= of_formula + MATRIX / 8, "{all} for {bytes}");
        Ok(all)
    };
    let in_order = [0, 1, 2, 3, 4, 5, 6, 7];
    let twice = [in_order, in_order].concat();
    for order in [&in_order[..], &twice, &[0, 2, 4, 6]] {
        let of = |limit| peak(limit, order).unwrap_or_else(|e| panic!("{order:?}: {e}"));
        let (one, two) = (of(MATRIX), of(2 * MATRIX));
        assert!(one + MATRIX * 3 / 4 <= two, "{order:?}: {one} and {two}");
    }
    let refused = peak(MATRIX - 1, &in_order).unwrap_err().to_string();
    let wanted = "0 bytes that stay gathered and 1048576 of unit \"h.";
    assert!(refused.starts_with("fully_shard: ") && refused.contains(wanted), "{refused}");
}

fn refusal(mesh: &'static str, shard: impl Fn(&mut Params) -> Result<()> + Send + Sync + 'static) -> String {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        for i in 0..2 {
            let mut root = params.root();
            let mut h = root.child("h");
            let mut part = h.child(i);
            part.child("attn").param("w", [6, 4], Init::Ones)?;
            part.param("empty", [0, 4], Init::Ones)?;
            part.param("one", [], Init::Ones)?;
        }
        let before = format!("{params:?}");
        let e = shard(&mut params).expect_err("it is refused");
        assert_eq!(format!("{params:?}"), before, "nothing has moved");
        let works = fully_shard(&mut params, &["h.*"], &Sharding::zero3("dp"), &BlockPolicy::default());
        works.map(|_| e.to_string())
    };
    spmd(ranks, run).unwrap_or_else(|e: Error| panic!("{e}")).remove(0)
}

#[test]
fn wrong_input_is_refused_by_name_and_moves_nothing() {
    fn shard(units: &[&str], sharding: Sharding, blocks: BlockPolicy, params: &mut Params) -> Result<()> {
        fully_shard(params, units, &sharding, &blocks).map(drop)
    }
    let rows = BlockPolicy::default;
    let refused = |units: &'static [&'static str], sharding: Sharding, blocks: BlockPolicy| {
        refusal("dp=2,fsdp=2", move |params| shard(units, sharding.clone(), blocks.clone(), params))
    };
    let zero3 = || Sharding::zero3("dp");
    assert!(refused(&["h.*"], Sharding::zero3("pp"), rows()).contains("no such axis; got \"pp\""));
    assert!(refused(&["g.*"], zero3(), rows()).contains("\"g.*\""));
    assert!(refused(&["h.*", "h.0.attn"], zero3(), rows()).contains("a parameter is in two units"));
    let pattern = rows().set("h.*.mlp.w", Block::Matrix);
    assert!(refused(&["h.*"], zero3(), pattern).contains("a pattern matches no parameter"));
    let tile = rows().set("h.*.attn.w", Block::Tile { rows: 2, columns: 3 });
    assert!(refused(&["h.*"], zero3(), tile).contains("rows hold a whole number of tiles"));
    assert!(refused(&["h.*"], zero3(), BlockPolicy::new(Block::Rows(0))).contains("at least one element"));
    assert!(refused(&["h.*"], zero3().stay_gathered("h.7"), rows()).contains("a pattern matches no unit"));
    let wider = Sharding::over(&["dp", "fsdp"]).parameters(&["dp"]);
    assert!(refused(&["h.*"], wider, rows()).contains("an axis that shards parameters shards gradients"));
    let twice = Sharding::over(&["dp"]).states(&["dp", "dp"]);
    assert!(refused(&["h.*"], twice, rows()).contains("axis dp is named twice"));
    let outside = Sharding::over(&["dp"]).states(&["fsdp"]);
    assert!(refused(&["h.*"], outside, rows()).contains("an axis that shards states shards the batch"));
}

/// From replicated parameters nothing is sent when units are placed, so each rank would take its own cut for everyone's.
#[test]
fn ranks_that_differ_are_refused_by_name_on_every_rank() {
    type Call = fn(&mut Params, bool) -> Result<()>;
    let on_odd_rank = |call: Call| {
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::parse(&rank, "dp=3")?;
            let mut params = Params::new(&mesh, Plan::default(), 7)?;
            for i in 0..2 {
                params.root().child("h").child(i).param("w", [6, 4], Init::Ones)?;
            }
            let before = format!("{params:?}");
            let said = call(&mut params, rank.rank() == 1).expect_err("they differ").to_string();
            assert_eq!(format!("{params:?}"), before, "nothing has moved");
            fully_shard(&mut params, &["h.*"], &Sharding::zero3("dp"), &BlockPolicy::default())?;
            Ok(said)
        };
        let said = spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
        assert!(said.iter().all(|text| *text == said[0]), "{said:?}");
        said.into_iter().next().expect("a rank")
    };
    fn shard(params: &mut Params, unit: &str, sharding: Sharding, blocks: BlockPolicy) -> Result<()> {
        fully_shard(params, &[unit], &sharding, &blocks).map(drop)
    }
    let said = on_odd_rank(|params, odd| {
        let block = if odd { Block::Rows(3) } else { Block::Rows(1) };
        shard(params, "h.*", Sharding::zero3("dp"), BlockPolicy::new(block))
    });
    assert_eq!(
        said,
        "fully_shard: ranks cut parameters at different places; got BlockPolicy { default: Rows(1), rules: [] } on \
         rank(s) 0, 2 and BlockPolicy { default: Rows(3), rules: [] } on rank(s) 1; pass equal arguments on all ranks"
    );
    let said = on_odd_rank(|params, odd| {
        let sharding = if odd { Sharding::zero2("dp") } else { Sharding::zero3("dp") };
        shard(params, "h.*", sharding, BlockPolicy::default())
    });
    assert!(said.starts_with("fully_shard: ranks shard in different ways; got Sharding {"), "{said}");
    let said = on_odd_rank(|params, odd| {
        let sharding = Sharding::zero3("dp");
        let sharding = if odd { sharding.gather_at_most(96) } else { sharding };
        shard(params, "h.*", sharding, BlockPolicy::default())
    });
    assert!(said.contains("gather_limit: Some(96) } on rank(s) 1;"), "{said}");
    let said = on_odd_rank(|params, odd| {
        shard(params, if odd { "h" } else { "h.*" }, Sharding::zero3("dp"), BlockPolicy::default())
    });
    let wanted = "ranks have different units; got h.0, h.1 on rank(s) 0, 2 and h on rank(s) 1;";
    assert!(said.contains(wanted), "{said}");
    // A rank that fails by itself.
    let said = on_odd_rank(|params, odd| {
        shard(params, if odd { "g.*" } else { "h.*" }, Sharding::zero3("dp"), BlockPolicy::default())
    });
    assert!(
        said.starts_with("fully_shard: rank 1 failed; got fully_shard: ") && said.contains("\"g.*\""),
        "{said}"
    );
}

/// Tensor parallelism leaves three rows to one rank and two to the other: such a parameter is cut by rows, outside the unit's
/// buffer, or refused by path if its blocks are longer.
#[test]
fn parts_of_unequal_length_are_cut_by_rows_or_refused() {
    let run = |rank: Rank, mesh: &str| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let fsdp = mesh.has("fsdp");
        let plan = if fsdp {
            Plan::default().shard("h.*.w", "tp", 0).shard("h.*.e", "tp", 0)
        } else {
            Plan::default()
        };
        let mut params = Params::new(&mesh, plan, 7)?;
        let normal = Init::Normal { mean: 0.0, std: 1.0 };
        let mut add =
            |name: &str, shape: &[usize]| params.root().child("h").child(0).param(name, shape, normal);
        let ids = [add("w", &[5, 4])?, add("e", &[5, 3, 4])?, add("even", &[4, 4])?];
        if fsdp {
            let zero3 = Sharding::zero3("fsdp");
            let before = format!("{params:?}");
            for (path, block) in [
                ("h.0.w", Block::Rows(2)),
                ("h.0.w", Block::Matrix),
                ("h.0.w", Block::Tile { rows: 2, columns: 2 }),
                ("h.0.e", Block::Rows(3)),
                ("h.0.w", Block::Rows(0)),
            ] {
                let policy = BlockPolicy::default().set(path, block);
                let said = fully_shard(&mut params, &["h.*"], &zero3, &policy).unwrap_err().to_string();
                let remedy = "cut it evenly in the plan, or give it Block::Rows(1)";
                assert!(said.contains(path) && (said.contains(remedy) || block == Block::Rows(0)), "{said}");
            }
            assert_eq!(format!("{params:?}"), before, "nothing has moved");
            let policy = BlockPolicy::default().set("h.0.e", Block::Matrix).set("h.0.even", Block::Rows(2));
            let units = fully_shard(&mut params, &["h.*"], &zero3, &policy)?;
            assert_eq!(units.units()[0].paths, ["h.0.even"]);
            assert_eq!(params.value(ids[0]).layout().to_string(), "(S0^1, S0^0)");
        }
        let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.1).clip(1.0);
        let x = Tensor::from_vec((0..40).map(|i| (i % 7) as f32 - 3.0).collect(), [8, 5])?;
        let x = params.batch(&x)?;
        for _ in 0..2 {
            let cx = Forward::train_without_dropout(&params);
            let y = x.matmul(&cx.param(ids[0])?)?.matmul(&cx.param(ids[2])?)?;
            let mut loss = y.mul(&x.matmul(&cx.param(ids[1])?.sum(&[1], false)?)?)?.sum_all()?;
            drop(cx);
            optimizer.step(&mut params, &mut loss.backward()?)?;
        }
        params.digest()
    };
    let single = spmd(1, move |rank| run(rank, "dp=1")).unwrap_or_else(|e| panic!("{e}"));
    let all = spmd(4, move |rank| run(rank, "fsdp=2,tp=2")).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(all, [single[0]; 4]);
}

/// After a first step no block's parameters or gradients are copied outside of collectives, if each rank brings one node of the
/// reduction tree.
#[test]
fn a_unit_is_gathered_reduced_and_updated_in_place() {
    let (exact, fast) = (Reduction::Exact, Reduction::Fast);
    for (mesh, compute, reduction) in [
        ("fsdp=2", DType::F32, exact),
        ("fsdp=3", DType::F32, exact),
        ("fsdp=2", DType::BF16, exact),
        ("fsdp=2", DType::BF16, fast),
    ] {
        let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::parse(&rank, mesh)?;
            mesh.set_reduction(reduction);
            steps_in_place(&mesh, compute)
        };
        for (rank, copied) in spmd(ranks, run).unwrap_or_else(|e| panic!("{e}")).iter().enumerate() {
            assert_eq!(copied.map(|step| step.gather), [0; 4], "{mesh}: rank {rank}");
            // A third of 16 sequences is several nodes, except on the last rank.
            if mesh != "fsdp=3" || rank == 2 {
                let reduce = copied.map(|step| step.reduce);
                assert!(
                    reduce[0] > HEAD_BYTES && reduce[1..].iter().all(|bytes| *bytes <= HEAD_BYTES),
                    "{mesh} {compute}: rank {rank}: {reduce:?}"
                );
            }
        }
    }
}

/// Blocks longer than a parameter, empty parameters and single elements.
#[test]
fn blocks_that_are_too_long_leave_parameters_whole() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, "dp=3")?;
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let mut root = params.root();
        let ids = [root.param("w", [6, 4], Init::Ones)?, root.param("empty", [0, 4], Init::Ones)?];
        let one = root.param("one", [], Init::Ones)?;
        fully_shard(&mut params, &[], &Sharding::zero3("dp"), &BlockPolicy::new(Block::Rows(100)))?;
        let parts: Vec<usize> = ids.iter().map(|&id| params.value(id).local().numel()).collect();
        assert_eq!(params.value(one).item()?, 1.0);
        let cx = Forward::train_without_dropout(&params);
        let mut loss =
            cx.param(ids[0])?.sum_all()?.add(&cx.param(ids[1])?.sum_all()?)?.add(&cx.param(one)?)?;
        drop(cx);
        let gradients = loss.backward()?;
        assert!(ids.iter().chain([&one]).all(|&id| gradients.get(params.value(id)).is_some()));
        Ok(parts)
    };
    let parts = spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
    let mut of_w: Vec<usize> = parts.iter().map(|parts| parts[0]).collect();
    of_w.sort_unstable();
    assert_eq!(of_w, [0, 0, 24], "one rank has the only block");
}
