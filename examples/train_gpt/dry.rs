//! Counts a training step of one rank without data: the bytes that it would send, receive and hold, on a mesh of any
//! size.

use std::time::Instant;

use isoshard::Result;
use isoshard::comm::{DryReport, DryRun};
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients, Reduction};
use isoshard::nn::{Forward, Params};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::placement::Mesh;
use isoshard::rng::Generator;
use isoshard::tensor::DType;

use crate::args::Args;
use crate::model::{Model, Sizes};

/// Makes the model and takes one step as `rank` of `world` ranks (by default as many as the mesh has), then prints the
/// counts: a table, or a JSON line per group and collective and one for all.
///
/// # Errors
/// Refuses a rank that is not in the world, a mesh that does not cover it, and sizes that do not fit.
pub fn run(args: &Args, (sizes, batch): (Sizes, usize), world: Option<usize>, rank: usize) -> Result<()> {
    let began = Instant::now();
    let ranks = Mesh::parse(&args.mesh, 0)?.rank_len();
    let dry = DryRun::new(world.unwrap_or(ranks), rank)?;
    step(&dry, args, sizes, batch)?;
    let (report, seconds) = (dry.report(), began.elapsed().as_secs_f64());
    if args.json {
        json(&report, seconds);
    } else {
        println!("{report}planned and counted in {seconds:.3} s");
    }
    Ok(())
}

fn step(dry: &DryRun, args: &Args, sizes: Sizes, batch: usize) -> Result<()> {
    let mesh = DeviceMesh::parse(&dry.rank()?, &args.mesh)?;
    mesh.set_reduction(args.reduction()?);
    let plan = args.plan(mesh.mesh(), (&sizes, batch))?;
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, args.seed)?;
    params.compute_in(args.compute())?;
    let model = Model::new(&mut params, &sizes)?;
    Model::shard(&mut params)?;
    let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(args.weight_decay);
    let mut dropout = Generator::new(args.seed).child("dropout");
    let mut grads = Gradients::default();
    // Exact mode reduces the gradients of each micro-batch.
    let unreduced = mesh.reduction() != Reduction::Exact;
    for micro in 0..args.accumulate {
        let tokens = DTensor::zeros(&mesh, DType::I64, [batch, sizes.block()], layout.clone())?;
        let cx = Forward::train(&params, &mut dropout);
        let mut loss = model.loss(&cx, &tokens, &tokens)?;
        drop(cx);
        if args.accumulate > 1 {
            loss = loss.mul_scalar(1.0 / args.accumulate as f64)?;
        }
        let _guard = (unreduced && micro + 1 < args.accumulate).then(|| mesh.no_sync());
        loss.backward_into(&mut grads)?;
        // Training gathers the loss to report it; here there is no value to read.
        loss.full_tensor()?;
    }
    let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
    let limit = if args.clip == 0.0 { f64::INFINITY } else { args.clip };
    let scale = clip_scale(&norm, limit)?;
    optimizer.step(&mut params, &mut grads, &scale, args.lr)
}

fn json(report: &DryReport, seconds: f64) {
    let counted = |t: isoshard::comm::Total| {
        format!(
            r#""calls":{},"sent_bytes":{},"received_bytes":{},"modelled_s":{:e}"#,
            t.calls,
            t.sent_bytes,
            t.received_bytes,
            t.time.seconds()
        )
    };
    for row in &report.rows {
        let group = serde_json::Value::from(row.group.as_str());
        let (call, len) = (row.call, row.group_len);
        println!(
            r#"{{"event":"calls","call":"{call}","group":{group},"ranks":{len},{}}}"#,
            counted(row.total)
        );
    }
    println!(
        r#"{{"event":"dry","rank":{},"ranks":{},{},"peak_bytes":{},"planned_s":{seconds:.3}}}"#,
        report.rank,
        report.world_len,
        counted(report.total()),
        report.peak_bytes
    );
}
