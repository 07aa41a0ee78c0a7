//! Layers on inputs of any number of leading dims, sharded along any of them; passes with and without history.

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Embedding, Forward, LayerNorm, Linear, Mlp, MlpConfig, Module, Params, Plan};
use isoshard::placement::Layout;
use isoshard::rng::{Draw, Generator, Init};
use isoshard::tensor::{DType, Tensor};
use isoshard::testing::{Equivalence, Trial};

const INIT: Init = Init::Normal { mean: 0.0, std: 1.0 };
/// Leading extents: odd, and one smaller than the ranks.
const EXTENTS: [usize; 4] = [3, 2, 5, 1];
const INPUTS: usize = 7;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Linear,
    Scores,
    Lookup,
}

/// Returns the result, and records the gradients of all parameters and of the input.
fn outcome(kind: Kind, trial: &Trial, plan: Plan, dims: usize) -> Result<DTensor> {
    let mut params = Params::new(trial, plan, 7)?;
    let leading = &EXTENTS[..dims];
    let x = match kind {
        Kind::Lookup => {
            let n: usize = leading.iter().product();
            trial.place("x", &Tensor::from_vec((0..n).map(|i| (i * i % 11) as i64).collect(), leading)?)?
        }
        Kind::Linear | Kind::Scores => trial.leaf("x", DType::F32, &[leading, &[INPUTS]].concat()[..])?,
    };
    let cx;
    let y = match kind {
        Kind::Linear => {
            let map = Linear::new(params.root().child("m"), INPUTS, 11, INIT)?;
            cx = Forward::train_without_dropout(&params);
            map.forward(&cx, &x)?
        }
        Kind::Scores | Kind::Lookup => {
            let table = Embedding::new(params.root().child("m"), 11, INPUTS, INIT)?;
            cx = Forward::train_without_dropout(&params);
            if matches!(kind, Kind::Scores) { table.scores(&cx, &x)? } else { table.forward(&cx, &x)? }
        }
    };
    drop(cx);
    let grads = y.mul(&y)?.sum_all()?.backward()?;
    for id in params.ids() {
        let grad = grads.get(params.value(id)).expect("the result depends on every parameter");
        trial.record(params.path(id), grad)?;
    }
    Ok(y)
}

#[test]
fn any_number_of_leading_dims_in_any_layout() {
    type PlanMaker = fn() -> Plan;
    let plans: [(&str, PlanMaker); 3] = [
        ("replicated", Plan::default),
        ("rows", || Plan::default().shard("m.weight", "b", 0)),
        ("inputs", || Plan::default().shard("m.weight", "b", 1)),
    ];
    for kind in [Kind::Linear, Kind::Scores, Kind::Lookup] {
        for dims in 0..=EXTENTS.len() {
            for (name, plan) in plans {
                let check = Equivalence::new(move |trial| outcome(kind, trial, plan(), dims));
                let check = check.meshes(["a=3,b=2"]).runs(8);
                let found = check.check();
                let report = found.unwrap_or_else(|e| panic!("{kind:?}, {name}, {dims} leading dims: {e}"));
                assert_eq!(report.runs, 8);
                // Along each leading dim over axis a, and along the last one too.
                for dim in 0..dims + usize::from(!matches!(kind, Kind::Lookup)) {
                    let scenario = format!("a=3,b=2 | seed 1 | x = (S{dim}, R)");
                    check.clone().replay(&scenario).assert();
                }
            }
        }
    }
}

/// Every vector is mapped alike: leading dims only say how many there are.
#[test]
fn leading_dims_do_not_change_values() {
    let same = spmd(1, |rank| {
        let mesh = DeviceMesh::new(&rank, &[])?;
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let map = Linear::new(params.root().child("m"), INPUTS, 11, INIT)?;
        let cx = Forward::eval(&params);
        let whole = |shape: &[usize]| {
            DTensor::init(&mesh, DType::F32, shape, Layout::replicated(0), INIT, Draw { seed: 3, number: 0 })
        };
        let flat = map.forward(&cx, &whole(&[30, INPUTS])?)?.full_tensor()?.to_vec::<f32>()?;
        let deep = map.forward(&cx, &whole(&[3, 2, 5, 1, INPUTS])?)?;
        assert_eq!(deep.shape()[..], [3, 2, 5, 1, 11]);
        let first = map.forward(&cx, &whole(&[INPUTS])?)?.full_tensor()?.to_vec::<f32>()?;
        Ok(deep.full_tensor()?.to_vec::<f32>()? == flat && first == flat[..11])
    });
    assert_eq!(same.unwrap_or_else(|e| panic!("{e}")), [true]);
}

#[test]
fn a_linear_map_wants_a_dim() {
    let text = spmd(1, |rank| {
        let mesh = DeviceMesh::new(&rank, &[])?;
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let map = Linear::new(params.root().child("m"), 1, 1, INIT)?;
        let x = DTensor::zeros(&mesh, DType::F32, [], Layout::replicated(0))?;
        Ok(map.forward(&Forward::eval(&params), &x).unwrap_err().to_string())
    });
    assert_eq!(
        text.unwrap_or_else(|e| panic!("{e}"))[0],
        "linear: wants 1 to 25 dims; got f32[], f32[1, 1], f32[1] at m.weight; reshape it first"
    );
}

#[test]
fn only_a_training_pass_keeps_history() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
        let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
        let config = |config| MlpConfig { dropout: 0.5, ..config };
        let mlp = Mlp::new(params.root().child("h").child(0), 4, config(MlpConfig::new(8)), INIT)?;
        let gated = Mlp::new(params.root().child("h").child(1), 4, config(MlpConfig::gated(8)), INIT)?;
        let norm = LayerNorm::new(params.root().child("norm"), 4)?;
        let model: Vec<Box<dyn Module>> = vec![Box::new(mlp), Box::new(gated), Box::new(norm)];
        let x = DTensor::full(&mesh, DType::F32, [2, 3, 4], Layout::replicated(1), 0.5)?;
        let mut generator = Generator::new(7).child("dropout");
        let values = |y: &DTensor| y.full_tensor()?.to_vec::<f32>();

        let evaluated = model.forward(&Forward::eval(&params), &x)?;
        assert!(!evaluated.has_history());
        let pass = Forward::eval(&params);
        assert!(
            !params.value(params.ids().next().expect("one")).sum_all()?.has_history(),
            "while the pass lives"
        );
        drop(pass);
        let trained = model.forward(&Forward::train_without_dropout(&params), &x)?;
        assert_eq!(values(&trained)?, values(&evaluated)?);
        let grads = trained.sum_all()?.backward()?;
        assert!(params.values().all(|value| grads.get(value).is_some()), "every parameter has a gradient");
        let dropped = model.forward(&Forward::train(&params, &mut generator), &x)?;
        assert_ne!(values(&dropped)?, values(&evaluated)?);
        assert!(trained.has_history() && dropped.has_history());
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}
