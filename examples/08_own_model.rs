//! 8. A model of your own: parameters by path, a plan, equal bits on three meshes. `cargo run --example 08_own_model`

use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, LayerNorm, Linear, Module, Params, Plan, Scope};
use isoshard::optim::{AdamW, WarmupCosine};
use isoshard::placement::{Mesh, Placement};
use isoshard::rng::{Generator, Init, uniform};
use isoshard::tensor::Tensor;
use isoshard::{Error, Result};

const STEPS: usize = 40;
const POINTS: usize = 61;
const WIDTH: usize = 12;

/// A residual block: `x + down(gelu(up(norm(x))))`.
struct ResidualBlock {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl ResidualBlock {
    fn new(mut scope: Scope<'_>) -> Result<ResidualBlock> {
        let init = Init::Normal { mean: 0.0, std: 0.2 };
        Ok(ResidualBlock {
            norm: LayerNorm::new(scope.child("norm"), WIDTH)?,
            up: Linear::new(scope.child("up"), WIDTH, 3 * WIDTH, init)?,
            down: Linear::new(scope.child("down"), 3 * WIDTH, WIDTH, init)?,
        })
    }
}

impl Module for ResidualBlock {
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let hidden = self.up.forward(cx, &self.norm.forward(cx, x)?)?.gelu()?;
        cx.dropout(self.down.forward(cx, &hidden)?, 0.1)?.add(x)
    }
}

/// A classifier of points in the plane: the scores of three rings.
struct RingClassifier {
    stem: Linear,
    blocks: Vec<ResidualBlock>,
    head: Linear,
}

impl RingClassifier {
    /// Declares the parameters `stem.weight`, `h.0.norm.weight`, `h.0.up.weight`, ..., `head.bias`.
    fn new(params: &mut Params) -> Result<RingClassifier> {
        let init = Init::Normal { mean: 0.0, std: 0.5 };
        let mut root = params.root();
        let stem = Linear::new(root.child("stem"), 2, WIDTH, init)?;
        let mut h = root.child("h");
        let blocks = (0..3).map(|i| ResidualBlock::new(h.child(i))).collect::<Result<_>>()?;
        let head = Linear::new(root.child("head"), WIDTH, 3, init)?;
        Ok(RingClassifier { stem, blocks, head })
    }
}

impl Module for RingClassifier {
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let x = self.blocks.forward(cx, &self.stem.forward(cx, x)?)?;
        self.head.forward(cx, &x)
    }
}

/// The plan, outside the model: the layouts of its parameters and activations on any mesh of these axes.
fn plan(mesh: &Mesh) -> Result<Plan> {
    let axes = (0..mesh.ndim()).map(|axis| mesh.axis_name(axis));
    axes.into_iter().try_fold(Plan::default(), |plan, axis| match axis {
        "dp" => Ok(plan.batch("dp")),
        "fsdp" => Ok(plan.fsdp("fsdp")),
        // Tensor parallelism shards the hidden width of each block, and reduces its result once.
        "tp" => Ok(plan.shard("h.*.up.*", "tp", 0).shard("h.*.down.weight", "tp", 1).site(
            "h.*.down",
            "tp",
            Placement::Replicate,
        )),
        other => Err(Error::other(format!("there is no plan for the axis {other}"))),
    })
}

/// Points in a square, and the ring around the origin that each lies in.
fn data() -> Result<(Tensor, Tensor)> {
    let mut points = vec![0f32; 2 * POINTS];
    uniform(Generator::new(1).child("data").next_draw(), 0, &mut points);
    points.iter_mut().for_each(|x| *x = 2.0 * *x - 1.0);
    let ring = |point: &[f32]| match point[0].hypot(point[1]) {
        radius if radius < 0.5 => 0,
        radius if radius < 0.9 => 1,
        _ => 2i64,
    };
    let rings = points.chunks(2).map(ring).collect();
    Ok((Tensor::from_vec(points, [POINTS, 2])?, Tensor::from_vec(rings, [POINTS])?))
}

/// The outcome of training, which is the same on every rank.
#[derive(Debug, PartialEq)]
struct Outcome {
    losses: Vec<f64>,
    digest: u64,
    right: usize,
}

fn train(mesh: &'static str) -> Result<Outcome> {
    let ranks = Mesh::parse(mesh, 0)?.rank_len();
    let outcomes = spmd(ranks, move |rank| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let mut params = Params::new(&mesh, plan(mesh.mesh())?, 7)?;
        let model = RingClassifier::new(&mut params)?;

        // Every rank makes the whole batch and keeps its rows: 61 points on 1, 2 or 3 ranks.
        let ((points, rings), batch) = (data()?, params.batch_layout());
        let x = DTensor::distribute(&mesh, &points, batch.clone())?;
        let targets = DTensor::distribute(&mesh, &rings, batch)?;

        let schedule = WarmupCosine { peak: 3e-2, floor: 3e-3, warmup: 5, steps: STEPS };
        let mut optimizer =
            AdamW::new().betas(0.9, 0.99).decay(0.1).group_decay("head.*", 0.0).rate(schedule).clip(1.0);
        let (mut dropout, mut losses) = (Generator::new(7).child("dropout"), Vec::new());
        for _ in 0..STEPS {
            let scores = model.forward(&Forward::train(&params, &mut dropout), &x)?;
            let mut loss = scores.cross_entropy(&targets)?.mean_all()?;
            optimizer.step(&mut params, &mut loss.backward()?)?;
            losses.push(loss.item()?);
        }

        let guesses = model.forward(&Forward::eval(&params), &x)?.argmax(-1)?.full_tensor()?;
        let pairs = guesses.to_vec::<i64>()?.into_iter().zip(rings.to_vec::<i64>()?);
        Ok(Outcome { losses, digest: params.digest()?, right: pairs.filter(|(a, b)| a == b).count() })
    })?;
    Ok(outcomes.into_iter().next().expect("there is a rank"))
}

/// Trains on three meshes, prints the losses side by side and compares their bits.
///
/// # Errors
/// Returns an error if a rank fails.
pub fn main() -> Result<()> {
    let meshes = ["1", "fsdp=3", "dp=2,tp=2"];
    let outcomes = meshes.into_iter().map(train).collect::<Result<Vec<_>>>()?;
    println!("step {}", meshes.map(|mesh| format!("{mesh:>12}")).join(""));
    for step in (0..STEPS).step_by(5).chain([STEPS - 1]) {
        let losses: Vec<String> = outcomes.iter().map(|o| format!("{:>12.7}", o.losses[step])).collect();
        println!("{step:>4} {}", losses.concat());
    }
    for (mesh, outcome) in meshes.iter().zip(&outcomes) {
        assert_eq!(*outcome, outcomes[0], "{mesh}");
    }
    let Outcome { losses, right, digest } = &outcomes[0];
    assert!(losses[STEPS - 1] < 0.5 * losses[0] && *right > POINTS * 4 / 5);
    println!("{right} of {POINTS} points are classified rightly; digest {digest:016x} on all three meshes");
    Ok(())
}
