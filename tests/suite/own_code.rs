//! The checking mode of a mesh: what own functions return as replicated, and differs between ranks, is found by its name.

use isoshard::comm::{Rank, Spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::Layout;
use isoshard::tensor::{DType, Tensor};
use isoshard::testing::{Equivalence, Finding, Trial};
use isoshard::{Error, Result};

fn layout(text: &str) -> Layout {
    text.parse().expect("a layout")
}

/// Runs a program on four ranks in checking mode, and returns each rank's error or an empty text.
fn said(program: fn(&DeviceMesh, usize) -> Result<()>) -> Vec<String> {
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2), ("tp", 2)])?;
        mesh.set_check_replicas(true);
        Ok(program(&mesh, rank.rank()).err().map(|e| e.to_string()).unwrap_or_default())
    };
    Spmd::new(4).deadline(std::time::Duration::from_secs(20)).run(run).unwrap_or_else(|e| panic!("{e}"))
}

/// `x`, to which a function adds this rank's number times `factor` in the last element.
fn spoiled(x: &DTensor, name: &'static str, rank: usize, factor: f32) -> Result<DTensor> {
    let map = x.mesh().local_map(name).operand(x, x.layout().clone());
    let outs = map.result(x.dtype(), x.shape(), x.layout().clone()).run(|ins, _| {
        let mut values = ins[0].to_vec::<f32>()?;
        if let Some(last) = values.last_mut() {
            *last += rank as f32 * factor;
        }
        Ok([Tensor::from_vec(values, ins[0].shape())?])
    })?;
    Ok(outs[0].clone())
}

#[test]
fn replicas_that_a_local_function_returns_are_compared() {
    let found = said(|mesh, rank| {
        let x = DTensor::ones(mesh, DType::F32, [5], layout("(S0, R)"))?;
        spoiled(&x, "exact", rank, 0.0)?;
        spoiled(&x, "noisy", rank, 1.0).map(drop)
    });
    // Ranks 0 and 1 hold elements 0 to 2, ranks 2 and 3 the rest. Rank 1 has another last element than rank 0.
    let text = "noisy: result 0 is replicated, and its replicas differ; got f32[5]@(dp:S0, tp:R) at rank(s) [1, 3], first at \
                index [2]: 0x40000000 at rank 1, 0x3f800000 at rank 0; compute it from what all ranks share, or state another \
                layout";
    assert_eq!(found, [text; 4]);
    // Shards are no replicas, and partial contributions have no value of their own.
    let fine = said(|mesh, rank| {
        let x = DTensor::ones(mesh, DType::F32, [4], layout("(S0, S0)"))?;
        spoiled(&x, "shards", rank, 1.0)?;
        let map = mesh.local_map("votes").result(DType::F32, [], layout("(P(sum), R)"));
        map.run(|_, _| Ok([Tensor::scalar(rank as f32)])).map(drop)
    });
    assert_eq!(fine, [""; 4]);
}

/// A function of one operand whose result and gradient are spoiled by these factors.
fn custom(x: &DTensor, rank: usize, result: f32, gradient: f32) -> Result<DTensor> {
    let forward = |ins: &[DTensor]| Ok((vec![spoiled(&ins[0].detach(), "inner", rank, result)?], vec![]));
    let backward = move |_: &[DTensor], grads: &[DTensor]| {
        let dy = grads[0].redistribute(Layout::replicated(2))?;
        let values: Vec<f32> =
            dy.local().to_vec::<f32>()?.iter().map(|g| g + rank as f32 * gradient).collect();
        let local = Tensor::from_vec(values, dy.local().shape())?;
        Ok(vec![Some(DTensor::from_local(dy.mesh(), local, dy.shape().clone(), dy.layout().clone())?)])
    };
    Ok(DTensor::custom_vjp("own", &[x], forward, backward)?.remove(0))
}

#[test]
fn results_and_gradients_of_own_derivatives_are_compared() {
    fn step(mesh: &DeviceMesh, rank: usize, result: f32, gradient: f32) -> Result<()> {
        let x = DTensor::ones(mesh, DType::F32, [3], Layout::replicated(2))?.requires_grad()?;
        custom(&x, rank, result, gradient)?.sum_all()?.backward().map(drop)
    }
    assert_eq!(said(|mesh, rank| step(mesh, rank, 0.0, 0.0)), [""; 4]);
    for found in said(|mesh, rank| step(mesh, rank, 0.0, 1.0)) {
        let text = "own: the gradient of operand 0 is replicated, and its replicas differ; got f32[3]@(dp:R, tp:R) at rank(s) \
                    [1, 2, 3], first at index [0]: 0x40000000 at rank 1, 0x3f800000 at rank 0";
        assert!(found.starts_with(text), "{found}");
    }
    // The inner function is named first: it is compared before the outer one returns.
    for found in said(|mesh, rank| step(mesh, rank, 1.0, 0.0)) {
        assert!(found.contains("inner: result 0 is replicated, and its replicas differ"), "{found}");
    }
}

#[test]
fn other_layouts_and_errors_on_some_ranks_are_told_on_all() {
    for found in said(|mesh, rank| step_that_differs(mesh, rank, false)) {
        let text = "own: ranks return different tensors; got f32[4]@(dp:R, tp:R) on rank(s) 0, 1, 3 and none on rank(s) 2";
        assert!(found.starts_with(text), "{found}");
    }
    for found in said(|mesh, rank| step_that_differs(mesh, rank, true)) {
        assert!(found.contains("the table is not there"), "{found}");
        assert!(found.starts_with("own: rank 2 failed; got ") || found.starts_with("rank 2: "), "{found}");
    }
}

/// A backward function that returns no gradient on one rank, or fails there.
fn step_that_differs(mesh: &DeviceMesh, rank: usize, fails: bool) -> Result<()> {
    let x = DTensor::ones(mesh, DType::F32, [4], Layout::replicated(2))?.requires_grad()?;
    let forward = |ins: &[DTensor]| Ok((vec![ins[0].mul_scalar(2.0)?], vec![]));
    let backward = move |_: &[DTensor], grads: &[DTensor]| match rank {
        2 if fails => Err(Error::other("the table is not there")),
        2 => Ok(vec![None]),
        _ => Ok(vec![Some(grads[0].clone())]),
    };
    let y = DTensor::custom_vjp("own", &[&x], forward, backward)?.remove(0);
    y.sum_all()?.backward().map(drop)
}

/// The harness compares own code always, although no tensor that differs is recorded, and its comparisons are no bytes of the
/// program.
#[test]
fn the_harness_compares_own_code() {
    let program = |trial: &Trial, factor: f32| {
        let everywhere = Layout::replicated(trial.mesh().ndim());
        let x = DTensor::ones(trial, DType::F32, [3], everywhere)?;
        spoiled(&x, "hidden", trial.rank().rank(), factor)?;
        trial.record_value("loss", 1.0)
    };
    let failed = Equivalence::new(move |trial| program(trial, 1.0)).meshes(["a=2"]).check().unwrap_err();
    let Finding::Fails(text) = &failed.finding else { panic!("{failed}") };
    assert!(text.contains("hidden: result 0 is replicated, and its replicas differ"), "{text}");
    Equivalence::new(move |trial| program(trial, 0.0)).meshes(["a=2", "a=2,b=2"]).at_most(0).assert();
}
