//! Times planning: the first training step of one rank of 16,384 without data, the plan of one operator for it, and the
//! positions of a real layer's parameters in a buffer that ranks share. `cargo bench --bench dry [-- --json]`.
//!
//! A step is forward, backward, clipping and AdamW of a GPT with 12 layers, all plans included; the minimum of several
//! runs. Later steps reuse the plans. The operator is planned on a fresh mesh each time; the minimum of many runs, on
//! one core. Shards are those of `docs/padding.md`'s layers by blocks of rows, the minimum of five runs.

use std::time::Instant;

use isoshard::Result;
use isoshard::comm::{DryRun, Level, Network};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::fsdp::{BlockedTensor, ShardPlanner};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::placement::Layout;
use isoshard::rng::Generator;
use isoshard::tensor::DType;

#[path = "../tests/suite/shard_plans/shapes.rs"]
mod shapes;

const MESH: &str = "dp=64,fsdp=32,tp=8";
const WORLD: usize = 64 * 32 * 8;

fn main() -> Result<()> {
    let json = std::env::args().any(|a| a == "--json");
    let say = |case: &str, seconds: f64| match json {
        true => println!(r#"{{"bench":"dry","case":"{case}","value":{:.1},"unit":"us"}}"#, seconds * 1e6),
        false => println!("{case:<44}{:>12.1} us", seconds * 1e6),
    };
    for (case, network) in [("equal links", Network::default()), ("fast and slow links", nodes()?)] {
        let [first, later] = steps(&network)?;
        say(&format!("first step of {MESH}, {case}"), first);
        say(&format!("second step of {MESH}, {case}"), later);
    }
    for (case, from) in [("nothing moves", ["(S0)", "(S0)"]), ("one operand moves", ["(S0)", "(S1)"])] {
        say(&format!("plan of add, {case}"), plan("a=2", from)?);
    }
    say("plan of add on three axes, an operand moves", plan("a=2,b=2,c=2", ["(S0, S1, R)", "(S1, S0, R)"])?);
    say("plan of add on three axes, another order", plan("a=2,b=2,c=2", ["(S0, S0, R)", "(S0^1, S0^0, R)"])?);
    for (mesh, layouts) in [
        ("a=8", ["(S0)", "(S1)"]),
        ("a=8", ["(P(sum))", "(R)"]),
        ("a=8,b=8", ["(S0, S1)", "(S1, S0)"]),
        ("a=8,b=8", ["(P(sum), S0)", "(S1, R)"]),
        ("a=16,b=16,c=8,d=8", ["(S0, S1, R, R)", "(S1, R, S0, R)"]),
    ] {
        say(&format!("plan of matmul on {mesh}, {} by {}", layouts[0], layouts[1]), product(mesh, layouts)?);
    }
    say("plan of attention over one sequence on a=8", attention()?);
    for (layer, shapes) in shapes::layers() {
        for ranks in [64, 1024, 16_384] {
            for rows in [1, 16, 128] {
                let seconds = shard_plan(&shapes, rows, ranks)?;
                let params = shapes.len();
                say(&format!("shards of {layer}: {params} parameters, {ranks} ranks, {rows} rows"), seconds);
            }
        }
    }
    Ok(())
}

/// Returns the least seconds of the positions of one layer's parameters in blocks of rows.
fn shard_plan(shapes: &[Vec<usize>], rows: usize, ranks: usize) -> Result<f64> {
    let tensor = |shape: &Vec<usize>| {
        let block = if shape.len() > 1 { rows * shape[shape.len() - 1] } else { 1 };
        BlockedTensor { len: shape.iter().product(), block }
    };
    let tensors: Vec<BlockedTensor> = shapes.iter().map(tensor).collect();
    let mut least = f64::INFINITY;
    for _ in 0..5 {
        let began = Instant::now();
        ShardPlanner::new(ranks).plan(&tensors)?;
        least = least.min(began.elapsed().as_secs_f64());
    }
    Ok(least)
}

/// Returns the least seconds of `call` on a fresh mesh, without elements.
fn fresh(mesh: &str, call: impl Fn(&DeviceMesh) -> Result<[DTensor; 2]>, run: Binary) -> Result<f64> {
    let len =
        mesh.split(',').map(|axis| axis[2..].parse::<usize>().expect("one letter, =, a number")).product();
    let dry = DryRun::new(len, 0)?;
    let rank = dry.rank()?;
    let mut least = f64::INFINITY;
    for _ in 0..200 {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let [x, y] = call(&mesh)?;
        let began = Instant::now();
        run(&x, &y)?;
        least = least.min(began.elapsed().as_secs_f64());
    }
    Ok(least)
}

/// An operator on two tensors.
type Binary = fn(&DTensor, &DTensor) -> Result<DTensor>;

fn product(mesh: &str, layouts: [&str; 2]) -> Result<f64> {
    let operands = |mesh: &DeviceMesh| -> Result<[DTensor; 2]> {
        let zeros = |layout: &str| {
            let everywhere = Layout::replicated(mesh.mesh().ndim());
            DTensor::zeros(mesh, DType::F32, [4096, 4096], everywhere)?
                .redistribute(layout.parse::<Layout>()?)
        };
        Ok([zeros(layouts[0])?, zeros(layouts[1])?])
    };
    fresh(mesh, operands, |x, y| x.matmul(y))
}

fn attention() -> Result<f64> {
    let operands = |mesh: &DeviceMesh| -> Result<[DTensor; 2]> {
        let zeros = || DTensor::zeros(mesh, DType::F32, [1, 32, 8192, 128], "(S2)");
        Ok([zeros()?, zeros()?])
    };
    fresh("a=8", operands, |q, k| q.attention(k, k, 0.125))
}

/// A network with eight ranks per node.
fn nodes() -> Result<Network> {
    let level = |ranks, latency_s, bytes_per_s| Level { ranks, latency_s, bytes_per_s };
    Network::new([level(8, 2e-6, 400e9), level(usize::MAX, 10e-6, 50e9)])
}

/// Returns the seconds of the first step and of the second.
fn steps(network: &Network) -> Result<[f64; 2]> {
    let mut least = [f64::INFINITY; 2];
    for _ in 0..5 {
        let began = Instant::now();
        let dry = DryRun::with_network(WORLD, 9_999, network.clone())?;
        let mesh = DeviceMesh::parse(&dry.rank()?, MESH)?;
        let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 16, sequence: true })?;
        let layout = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(&mesh, plan, 11)?;
        let config = GptConfig {
            vocabulary: 50_304,
            block: 1024,
            layers: 12,
            heads: 16,
            width: 1024,
            dropout: 0.1,
            bias: false,
        };
        let model = Gpt::new(&mut params, config)?;
        let (mut adam, mut dropout) = (AdamW::new().betas(0.9, 0.99).decay(0.1), Generator::new(3));
        let mut last = began;
        for least in &mut least {
            let tokens = DTensor::zeros(&mesh, DType::I64, [4096, 1024], layout.clone())?;
            let mut loss = model.loss(&Forward::train(&params, &mut dropout), &tokens, &tokens)?;
            let mut grads = loss.backward()?;
            let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
            adam.step(&mut params, &mut grads, &clip_scale(&norm, 1.0)?, 1e-3)?;
            *least = least.min(last.elapsed().as_secs_f64());
            last = Instant::now();
        }
    }
    Ok(least)
}

/// Returns the seconds that adding two tensors takes without elements, on a mesh that has no plans yet.
fn plan(mesh: &str, layouts: [&str; 2]) -> Result<f64> {
    let dry = DryRun::new(mesh.split(',').fold(1, |n, _| n * 2), 0)?;
    let rank = dry.rank()?;
    let mut least = f64::INFINITY;
    for _ in 0..300 {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let zeros = |layout: &str| DTensor::zeros(&mesh, DType::F32, [64, 64], layout.parse::<Layout>()?);
        let (x, y) = (zeros(layouts[0])?, zeros(layouts[1])?);
        let began = Instant::now();
        x.add(&y)?;
        least = least.min(began.elapsed().as_secs_f64());
    }
    Ok(least)
}
