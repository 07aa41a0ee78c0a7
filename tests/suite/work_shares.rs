//! The ranks' shares of an operator's work add up to the whole if every axis of the mesh cuts the call, and to more if
//! ranks repeat work. A rank that idles is seen.

use isoshard::Result;
use isoshard::comm::{DryRun, Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, WorkTotal};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::ops::{Meta, Sample, Work};
use isoshard::optim::AdamW;
use isoshard::placement::{Layout, Mesh, Placement};
use isoshard::tensor::{DType, Shape, Tensor};
use isoshard::testing::values::values;

use crate::common::samples::catalog;

fn layout(text: &str) -> Layout {
    text.parse().expect("a layout")
}

/// A layout that shards a dim of its own on each axis, as far as there are dims.
fn sharded(shape: &Shape, axes: usize, turn: usize) -> Layout {
    let placement = |axis: usize| match shape.len() {
        0 => Placement::Replicate,
        dims => Placement::Shard((axis + turn) % dims),
    };
    Layout::new((0..axes).map(placement))
}

/// The whole work of a call, the ranks' shares, and true if every axis cuts a result.
type CallWork = (Work, Vec<Work>, bool);

/// Calls a sample's operator on sharded operands.
fn call(sample: &Sample, mesh: &DeviceMesh, turn: usize) -> Result<CallWork> {
    let axes = mesh.mesh().ndim();
    let mut ins = Vec::new();
    for whole in values(sample, DType::F32, 3) {
        ins.push(DTensor::distribute(mesh, &whole, sharded(whole.shape(), axes, turn))?);
    }
    let tally = mesh.tally_work();
    let outs = DTensor::apply(sample.op.as_ref(), &ins.iter().collect::<Vec<_>>())?;
    let WorkTotal { calls, whole, share } = tally.total();
    assert_eq!(calls, 1, "{sample:?}");
    let metas: Vec<Meta> = ins.iter().map(DTensor::meta).collect();
    assert_eq!(whole, sample.op.work(&metas, &sample.op.infer(&metas)?), "{sample:?}");
    let shares = tally.of_ranks()?;
    assert_eq!(shares[mesh.mesh().rank()], share);
    let full = || outs.iter().filter(|out| !out.shape().contains(&0));
    let cuts = |axis: usize| full().any(|out| matches!(out.layout().axis(axis), Placement::Shard(_)));
    Ok((whole, shares, (0..axes).all(cuts)))
}

#[test]
fn shares_add_up_to_the_whole() {
    for text in ["a=3", "a=2,b=2"] {
        let ranks = Mesh::parse(text, 0).expect("a mesh").rank_len();
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::parse(&rank, text)?;
            let (mut cut, mut wrong) = (0, Vec::new());
            for sample in catalog().into_iter().filter(|s| !s.ins.is_empty()) {
                for turn in 0..2 {
                    let (whole, shares, is_cut) = call(&sample, &mesh, turn)?;
                    cut += usize::from(is_cut);
                    for of in [|work: &Work| work.flops, |work: &Work| work.bytes] {
                        let sum: u64 = shares.iter().map(of).sum();
                        // Each share is rounded.
                        let right = match is_cut {
                            true => sum.abs_diff(of(&whole)) <= ranks as u64,
                            false => sum + ranks as u64 >= of(&whole),
                        };
                        if !right || shares.iter().any(|share| of(share) > of(&whole)) {
                            wrong.push(format!("{sample:?} on {text}: {whole:?} in shares {shares:?}"));
                        }
                    }
                }
            }
            Ok((cut, wrong))
        };
        let (cut, wrong) = spmd(ranks, run).unwrap_or_else(|e| panic!("{text}: {e}")).remove(0);
        assert!(cut > 200, "only {cut} calls on {text} are cut on every axis");
        assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong[..wrong.len().min(20)].join("\n"));
    }
}

/// Products whose rows, columns and contracted dim are cut, evenly or not, and those that ranks repeat.
#[test]
fn products_are_shared_by_all_axes() {
    let on = |mesh: &'static str, x: &'static str, w: &'static str, want: &[u64]| {
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::parse(&rank, mesh)?;
            let x = DTensor::zeros(&mesh, DType::F32, [5, 128], layout(x))?;
            let w = DTensor::zeros(&mesh, DType::F32, [128, 6], layout(w))?;
            let tally = mesh.tally_work();
            x.matmul(&w)?;
            Ok(tally.of_ranks()?.iter().map(|work| work.flops).collect::<Vec<u64>>())
        };
        let got = spmd(want.len(), run).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        assert!(got.iter().all(|shares| shares == want), "{mesh} {x} {w}: {got:?}, want {want:?}");
    };
    let triple = 2 * 128;
    on("a=2", "(S0)", "(R)", &[18 * triple, 12 * triple]);
    on("a=4", "(R)", "(S1)", &[10 * triple, 10 * triple, 10 * triple, 0]);
    on("a=2", "(R)", "(R)", &[30 * triple; 2]);
    on("a=2", "(S1)", "(S0)", &[15 * triple; 2]);
    let rows_and_columns = [9, 9, 6, 6].map(|n| n * triple);
    on("a=2,b=2", "(S0, R)", "(R, S1)", &rows_and_columns);
    on("a=2,b=2", "(S0, S1)", "(R, S0)", &rows_and_columns);
    // Two axes cut the rows: 2, 1, 1 and 1.
    on("a=2,b=2", "(S0, S0)", "(R, R)", &[12, 6, 6, 6].map(|n| n * triple));
    // One axis cuts the contracted dim, one the columns, one the rows.
    on("a=2,b=2,c=2", "(R, S0, S1)", "(S1, R, S0)", &[9, 9, 6, 6, 9, 9, 6, 6].map(|n: u64| n * triple / 2));
}

/// The shares of a training step of a small GPT, forward, backward and optimizer, as parts of an even share.
fn training_step(mesh: &'static str, batch: usize) -> Vec<f64> {
    let ranks = Mesh::parse(mesh, 0).expect("a mesh").rank_len();
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 4, sequence: false })?;
        let rows = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(&mesh, plan, 7)?;
        let config =
            GptConfig { vocabulary: 16, block: 8, layers: 2, heads: 4, width: 32, dropout: 0.0, bias: true };
        let model = Gpt::new(&mut params, config)?;
        let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1).rate(|_: usize| 1e-3).clip(1.0);
        let tokens = Tensor::from_vec((0..batch * 8).map(|i| (i * i % 16) as i64).collect(), [batch, 8])?;
        let tokens = DTensor::distribute(&mesh, &tokens, rows)?;
        let tally = mesh.tally_work();
        let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?;
        optimizer.step(&mut params, &mut loss.backward()?)?;
        let even = tally.total().whole.flops as f64 / mesh.mesh().rank_len() as f64;
        assert!(tally.rows().iter().any(|row| row.operator == "adamw"), "{tally}");
        Ok(tally.of_ranks()?.iter().map(|share| share.flops as f64 / even).collect::<Vec<f64>>())
    };
    spmd(ranks, run).unwrap_or_else(|e| panic!("{mesh}: {e}")).remove(0)
}

#[test]
fn a_training_step_keeps_every_rank_at_work() {
    for mesh in ["dp=4", "fsdp=4", "tp=4", "dp=2,tp=2", "fsdp=2,tp=2"] {
        let shares = training_step(mesh, 4);
        assert!(shares.iter().all(|share| *share > 0.9 && *share < 2.0), "{mesh}: {shares:?}");
    }
    // Two rows of the batch for four ranks: two ranks have parameters to update, and little else.
    let shares = training_step("fsdp=4", 2);
    assert!(shares[..2].iter().all(|share| *share > 1.5), "{shares:?}");
    assert!(shares[2..].iter().all(|share| *share < 0.3), "{shares:?}");
}

#[test]
fn tallies_count_while_they_live() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
        let x = DTensor::zeros(&mesh, DType::F32, [4], layout("(S0)"))?;
        x.neg()?;
        let outer = mesh.tally_work();
        x.neg()?;
        let inner = mesh.tally_work();
        x.neg()?;
        assert_eq!((inner.total().calls, outer.total().calls), (1, 2));
        assert_eq!(inner.total().share, Work { flops: 2, bytes: 16 });
        drop(outer);
        x.neg()?;
        assert_eq!(inner.total().calls, 2);
        let other = DeviceMesh::new(mesh.rank(), &[("a", 2)])?;
        DTensor::zeros(&other, DType::F32, [4], layout("(S0)"))?.neg()?;
        assert_eq!(inner.total().calls, 2, "another mesh is not counted");
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

/// A dry run counts its own rank's share of any world, and has no other rank to ask.
#[test]
fn a_dry_run_counts_its_own_share() {
    let dry = DryRun::new(4096, 5).and_then(|dry| dry.rank()).expect("a rank");
    let mesh = DeviceMesh::parse(&dry, "a=64,b=64").expect("a mesh");
    let x = DTensor::zeros(&mesh, DType::F32, [640, 64], layout("(S0, R)")).expect("zeros");
    let w = DTensor::zeros(&mesh, DType::F32, [64, 128], layout("(R, S1)")).expect("zeros");
    let tally = mesh.tally_work();
    x.matmul(&w).expect("a product");
    let WorkTotal { whole, share, .. } = tally.total();
    assert_eq!((whole.flops, share.flops), (2 * 640 * 64 * 128, 2 * 10 * 64 * 2));
    let said = tally.of_ranks().unwrap_err().to_string();
    assert_eq!(
        said,
        "of_ranks: a dry run knows its own rank's work only; got (a=64, b=64); read WorkTally::total"
    );
}
