//! What users read when they are refused, to the letter. Every rank refuses alike, from facts that all share.

use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::Plan;
use isoshard::placement::Layout;
use isoshard::tensor::{DType, Shape, Tensor};
use isoshard::{Error, Result};

#[test]
fn strict_mode_names_the_operand_and_the_remedy() {
    refused(
        2,
        "a=2",
        |mesh| {
            let x = zeros(mesh, &[4, 6], "(S1)")?;
            // A plan that was made while moves were allowed does not slip through either.
            x.softmax(1)?;
            mesh.set_strict(true);
            x.softmax(0)?;
            x.softmax(1).map(drop)
        },
        "softmax: operand 0 would have to move, which strict mode forbids; got f32[4, 6]@(a:S1); redistribute operand 0 to \
         f32[4, 6]@(a:S0) first",
    );
}

#[test]
fn a_partial_maximum_cannot_be_multiplied_in_strict_mode() {
    refused(
        2,
        "a=2",
        |mesh| {
            let part = Tensor::zeros(DType::F32, [4, 6]);
            let x = DTensor::from_local(mesh, part, [4, 6], "(P(max))".parse()?)?;
            let w = zeros(mesh, &[6, 2], "(R)")?;
            // Where moves are allowed it is reduced first.
            assert_eq!(x.matmul(&w)?.full_tensor()?.to_vec::<f32>()?, [0.0; 8]);
            mesh.set_strict(true);
            x.matmul(&w).map(drop)
        },
        "matmul: operand 0 would have to move, which strict mode forbids; got f32[4, 6]@(a:P(max)), f32[6, 2]@(a:R); \
         redistribute operand 0 to f32[4, 6]@(a:S0) first",
    );
}

#[test]
fn local_parts_have_the_layouts_shape() {
    refused(
        2,
        "a=2",
        |mesh| {
            let part = Tensor::zeros(DType::F32, [2, 2]);
            DTensor::from_local(mesh, part, [3, 2], "(R)".parse()?).map(drop)
        },
        "from_local: the layout gives rank 0 a f32[3, 2]; got f32[2, 2] for f32[3, 2]@(a:R); pass the part that belongs \
         to this rank",
    );
}

#[test]
fn a_mesh_covers_the_world() {
    let run = |rank| DeviceMesh::parse(&rank, "a=2,b=2").map(drop);
    let text = text(spmd(2, run).map(drop));
    assert_eq!(
        text,
        "device_mesh: the axes do not cover the world; got (a=2, b=2) for 2 rank(s); start 4 rank(s)"
    );
}

#[test]
fn operands_live_on_one_mesh() {
    refused(
        1,
        "a=1",
        |mesh| {
            let other = DeviceMesh::parse(mesh.rank(), "b=1")?;
            zeros(mesh, &[2], "(S0)")?.add(&zeros(&other, &[2], "(R)")?).map(drop)
        },
        "add: the operands live on different meshes; got f32[2]@(a:S0) on (a=1), f32[2]@(b:R) on (b=1); make both on one \
         DeviceMesh",
    );
}

#[test]
fn shapes_that_do_not_fit() {
    let on = |f: fn(&DTensor, &DTensor) -> Result<()>, text: &str| {
        let run = move |mesh: &DeviceMesh| f(&zeros(mesh, &[5, 3], "(S0)")?, &zeros(mesh, &[2, 3], "(R)")?);
        refused(2, "a=2", run, text);
    };
    on(
        |x, _| x.reshape([4, 4]).map(drop),
        "reshape: the number of elements changes; got f32[5, 3] to [4, 4]; 16 elements there, 15 here",
    );
    on(
        |x, _| x.expand([5, 4]).map(drop),
        "expand: extents neither agree nor are 1; got [5, 3], [5, 4]; reshape or expand one of them",
    );
    on(
        |x, _| x.slice(0, 3, 4).map(drop),
        "slice: the range leaves the tensor; got 3..3+4 of dim 0 of f32[5, 3]",
    );
    on(
        |x, y| DTensor::cat(&[x, y], 1).map(drop),
        "cat: the operands' dtypes or other extents differ; got dim 1 of f32[5, 3], f32[2, 3]",
    );
    on(
        |x, y| x.matmul(y).map(drop),
        "matmul: dim k has extents 3 and 2; got f32[5, 3], f32[2, 3]; the operands are m k, k n -> m n",
    );
}

#[test]
fn backward_wants_one_element_and_a_history() {
    let on = |f: fn(&DTensor) -> Result<()>, text: &str| {
        refused(2, "a=2", move |mesh: &DeviceMesh| f(&zeros(mesh, &[5, 3], "(S0)")?), text);
    };
    on(
        |x| x.requires_grad()?.scale(2.0)?.backward().map(drop),
        "backward: wants one element; got f32[5, 3]@(a:S0); sum it first",
    );
    on(
        |x| x.sum_all()?.backward().map(drop),
        "backward: no leaf that requires a gradient stands behind this tensor; got f32[]@(a:P(sum)); call requires_grad() \
         on a leaf, outside no_grad()",
    );
    on(
        |x| x.requires_grad()?.scale(2.0)?.backward_from(x.sum_all()?).map(drop),
        "backward: the gradient does not fit; got f32[]@(a:P(sum)) for f32[5, 3]@(a:S0)",
    );
}

#[test]
fn gradients_are_of_whole_floating_values() {
    refused(
        2,
        "a=2",
        |mesh| DTensor::zeros(mesh, DType::I64, [4], "(S0)".parse()?)?.requires_grad().map(drop),
        "requires_grad: wants floating-point elements; got i64; cast it first",
    );
    refused(
        2,
        "a=2",
        |mesh| zeros(mesh, &[4], "(S0)")?.sum_all()?.requires_grad().map(drop),
        "requires_grad: a Partial layout has no values of its own; got f32[]@(a:P(sum)); redistribute first",
    );
}

#[test]
fn a_plan_names_axes_of_the_mesh() {
    refused(
        2,
        "pp=2",
        |mesh| Plan::transformer(mesh.mesh(), isoshard::nn::Parallel { heads: 2, sequence: false }).map(drop),
        "plan: no such kind of parallelism; got axis \"pp\" of (pp=2); name the axes dp, fsdp or tp",
    );
}

/// Holds the program's refusal, on rank 0, against `text`, and that no rank lets it pass.
#[track_caller]
fn refused(
    ranks: usize,
    mesh: &'static str,
    f: impl Fn(&DeviceMesh) -> Result<()> + Send + Sync + 'static,
    want: &str,
) {
    let texts = spmd(ranks, move |rank| Ok(text(f(&DeviceMesh::parse(&rank, mesh)?))));
    let texts = texts.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(texts[0], want);
    assert!(texts.iter().all(|t| !t.is_empty()), "a rank did not refuse: {texts:?}");
}

/// The text of an error, without the rank that had it first; empty where there is none.
fn text(result: Result<()>) -> String {
    match result {
        Ok(()) => String::new(),
        Err(Error::Rank { cause, .. }) => cause.to_string(),
        Err(e) => e.to_string(),
    }
}

fn zeros(mesh: &DeviceMesh, shape: &[usize], layout: &str) -> Result<DTensor> {
    DTensor::zeros(mesh, DType::F32, Shape::from(shape), layout.parse::<Layout>()?)
}
