//! The exact texts of refusals. Every rank refuses alike, because the decision depends only on data that all ranks
//! share.

use isoshard::comm::{Rank, Spmd, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, LossReduction};
use isoshard::nn::{Embedding, Forward, LayerNorm, Linear, Module, ParamId, Params, Plan};
use isoshard::placement::{Layout, Mesh, Placement};
use isoshard::rng::Init;
use isoshard::tensor::{DType, Shape, Tensor};
use isoshard::{Error, Failure, Result};

#[test]
fn strict_mode_names_the_operand_and_the_remedy() {
    refused(
        2,
        "a=2",
        |mesh| {
            let x = zeros(mesh, &[4, 6], "(S1)")?;
            // A plan made while moves were allowed is refused as well.
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
            let x = DTensor::from_local(mesh, part, [4, 6], "(P(max))")?;
            let w = zeros(mesh, &[6, 2], "(R)")?;
            // If moves are allowed, the tensor is reduced first.
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
            DTensor::from_local(mesh, part, [3, 2], "(R)").map(drop)
        },
        "from_local: the layout gives rank 0 a f32[3, 2]; got f32[2, 2] for f32[3, 2]@(a:R); pass the part that belongs \
         to this rank",
    );
}

#[test]
fn a_mesh_without_named_ranks_is_the_world() {
    let make = |text: &'static str| text_of(spmd(3, move |rank| DeviceMesh::parse(&rank, text).map(drop)));
    assert_eq!(
        make("a=2,b=2"),
        "device_mesh: the mesh is larger than the world; got (a=2, b=2) for 3 rank(s); start 4 rank(s)"
    );
    assert_eq!(
        make("a=2"),
        "device_mesh: the axes do not cover the world; got (a=2) for 3 rank(s); start 2 rank(s), or name the mesh's with \
         DeviceMesh::over"
    );
}

#[test]
fn a_mesh_has_ranks_of_the_world_once_each() {
    let make = |ranks: &'static [usize]| {
        let run = move |rank| DeviceMesh::over(&rank, &[("a", 3)], ranks.iter().copied()).map(drop);
        // Every rank refuses alike.
        let texts = spmd(4, move |rank| Ok(text(run(rank)))).unwrap_or_else(|e| panic!("{e}"));
        assert!(texts.iter().all(|t| *t == texts[0]), "{texts:?}");
        texts[0].clone()
    };
    assert_eq!(make(&[1, 3, 1]), "mesh: a rank is listed twice; got (a=3) over {1, 3, 1}; name rank 1 once");
    assert_eq!(
        make(&[1, 3, 4]),
        "device_mesh: no such rank; got rank 4 in (a=3) over {1, 3, 4} for 4 rank(s); ranks are 0 to 3"
    );
    assert_eq!(
        make(&[0, 1]),
        "mesh: the number of ranks differs from the product of the axis lengths; got (a=3) over {0, 1}; name 3, not 2"
    );
    let larger = spmd(4, |rank| DeviceMesh::over(&rank, &[("a", 5)], 0..5).map(drop));
    assert_eq!(
        text_of(larger),
        "device_mesh: the mesh is larger than the world; got (a=5) for 4 rank(s); start 5 rank(s)"
    );
}

#[test]
fn only_members_make_a_mesh() {
    let run = |rank: Rank| Ok(text(DeviceMesh::over(&rank, &[("tp", 2)], [3, 1]).map(drop)));
    let texts = spmd(4, run).unwrap_or_else(|e| panic!("{e}"));
    let refused = |r| {
        format!(
            "device_mesh: this rank is not in the mesh; got (tp=2) over {{3, 1}} on rank {r}; only members make it: ask \
             Mesh::contains first"
        )
    };
    assert_eq!(texts, [refused(0), String::new(), refused(2), String::new()]);
}

#[test]
fn parts_of_a_split_do_not_overlap() {
    let split = |parts: &'static [&'static [usize]]| {
        let run = move |rank: Rank| {
            let parts: Vec<Vec<usize>> = parts.iter().map(|part| part.to_vec()).collect();
            Ok(text(rank.split(&parts, "half").map(drop)))
        };
        let texts = spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
        assert!(texts.iter().all(|t| *t == texts[0]), "{texts:?}");
        texts[0].clone()
    };
    assert_eq!(
        split(&[&[0, 1], &[1, 2]]),
        "split: the parts overlap; got half[[0, 1], [1, 2]] for 3 rank(s); name rank 1 once"
    );
    assert_eq!(
        split(&[&[0], &[2]]),
        "split: the parts do not cover the world; got half[[0], [2]] for 3 rank(s); name each rank once"
    );
    assert_eq!(split(&[&[0, 1], &[2]]), "");
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
        "add: the operands are on different meshes; got f32[2]@(a:S0) on (a=1), f32[2]@(b:R) on (b=1); make both on one \
         DeviceMesh, of which clones are the same mesh",
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
        "expand: two extents of a dim differ and neither is 1; got [5, 3], [5, 4]; reshape or expand one of them",
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
fn attention_knows_the_times_of_its_queries() {
    let on = |f: fn(&DTensor, &DTensor) -> Result<DTensor>, text: &str| {
        let run = move |mesh: &DeviceMesh| {
            f(&zeros(mesh, &[1, 2, 3, 4], "(S1)")?, &zeros(mesh, &[1, 2, 8, 4], "(S1)")?).map(drop)
        };
        refused(2, "tp=2", run, text);
    };
    on(
        |q, k| q.attention(k, k, 0.5),
        "attention: queries and keys differ in number, so the queries' positions are not known; got 3 queries, 8 keys in \
         f32[1, 2, 3, 4], f32[1, 2, 8, 4]; pass the first query's position, the number of keys before it, to attention_at",
    );
    on(
        |q, k| q.attention_at(k, k, 0.5, 6),
        "attention: a query has a position that no key has; got 3 queries from position 6 on, 8 keys in f32[1, 2, 3, 4], \
         f32[1, 2, 8, 4]; append the keys of the queries' own positions first, and pass the number of keys before them",
    );
}

#[test]
fn backward_wants_one_element_and_a_history() {
    let on = |f: fn(&DTensor) -> Result<()>, text: &str| {
        refused(2, "a=2", move |mesh: &DeviceMesh| f(&zeros(mesh, &[5, 3], "(S0)")?), text);
    };
    on(
        |x| x.requires_grad()?.mul_scalar(2.0)?.backward().map(drop),
        "backward: wants one element; got f32[5, 3]@(a:S0); sum it first",
    );
    on(
        |x| x.sum_all()?.backward().map(drop),
        "backward: this tensor does not depend on a leaf that requires a gradient; got f32[]@(a:P(sum)); call requires_grad() \
         on a leaf, outside no_grad() and Forward::eval",
    );
    on(
        |x| x.requires_grad()?.mul_scalar(2.0)?.backward_from(x.sum_all()?).map(drop),
        "backward: the gradient does not fit; got f32[]@(a:P(sum)) for f32[5, 3]@(a:S0)",
    );
}

#[test]
fn gradients_are_of_whole_floating_values() {
    refused(
        2,
        "a=2",
        |mesh| DTensor::zeros(mesh, DType::I64, [4], "(S0)")?.requires_grad().map(drop),
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

/// Returns the error of a plan at the first forward pass of a model with two blocks of one linear layer each.
fn under(plan: Plan, want: &str) {
    let run = move |mesh: &DeviceMesh| {
        let mut params = Params::new(mesh, plan.clone(), 1)?;
        let mut root = params.root();
        let init = Init::Ones;
        let map =
            |i: usize, root: &mut isoshard::nn::Scope| Linear::new(root.child("h").child(i), 2, 2, init);
        let maps = [map(0, &mut root)?, map(1, &mut root)?];
        let pass = Forward::eval(&params);
        let x = zeros(mesh, &[1, 3, 2], "(R)")?;
        maps.iter().try_fold(x, |x, map| map.forward(&pass, &x)).map(drop)
    };
    refused(2, "tp=2", run, want);
}

#[test]
fn a_plans_patterns_match_something() {
    under(
        Plan::default().shard("h.*.weight", "tp", 0).shard("h.*.wieght", "tp", 1),
        "plan: a pattern matches no parameter; got \"h.*.wieght\" among 4 parameter(s); the nearest are h.*.weight, h.*.bias",
    );
    under(
        Plan::default().shard("h.weight", "tp", 1),
        "plan: a pattern matches no parameter; got \"h.weight\" among 4 parameter(s); the nearest are h.0.weight, \
         h.1.weight, h.0.bias",
    );
    under(
        Plan::default().site("h.*.input", "tp", Placement::Replicate),
        "plan: a pattern matches no site; got \"h.*.input\" among 2 site(s); the nearest are h.0, h.1",
    );
    let parallel = isoshard::nn::Parallel { heads: 2, sequence: false };
    let tensor_parallel = Plan::transformer(&Mesh::new(&[("tp", 2)], 0).expect("a mesh"), parallel);
    under(
        tensor_parallel.expect("a plan"),
        "plan: no pattern of a transformer's plan matches a parameter; got \"wte.weight\" and others among 4 parameter(s); \
         pass a plan of the model's own",
    );
}

#[test]
fn errors_inside_a_layer_name_the_parameter() {
    refused(
        2,
        "tp=2",
        |mesh| {
            let mut params = Params::new(mesh, Plan::default(), 1)?;
            let mut block = params.root();
            let mut block = block.child("gpt");
            let map = Linear::new(block.child("h").child(3).child("up"), 4, 6, Init::Ones)?;
            map.forward(&Forward::eval(&params), &zeros(mesh, &[1, 3, 5], "(R)")?).map(drop)
        },
        "linear: wants weights [rows, 5] or [groups, rows, 5] for x's last dim; got f32[1, 3, 5], f32[6, 4], f32[6] at \
         gpt.h.3.up.weight; transpose them",
    );
    refused(
        2,
        "tp=2",
        |mesh| {
            let mut params = Params::new(mesh, Plan::default(), 1)?;
            let norm = LayerNorm::new(params.root().child("norm"), 4)?;
            norm.forward(&Forward::eval(&params), &zeros(mesh, &[1, 3, 5], "(R)")?).map(drop)
        },
        "layer_norm: wants weights of x's dtype, one for each index of its last dim; got f32[1, 3, 5], f32[4], f32[4] at \
         norm.weight",
    );
    refused(
        2,
        "tp=2",
        |mesh| {
            let mut params = Params::new(mesh, Plan::default(), 1)?;
            let table = Embedding::new(params.root().child("wte"), 4, 2, Init::Ones)?;
            table.forward(&Forward::eval(&params), &zeros(mesh, &[1, 3], "(R)")?).map(drop)
        },
        "embedding: indices are i64; got f32[1, 3] at wte.weight; cast them first",
    );
}

#[test]
fn a_parameter_belongs_to_one_model() {
    let with = |f: fn(&mut Params, ParamId) -> Result<()>, text: &str| {
        let run = move |mesh: &DeviceMesh| {
            let mut params = Params::new(mesh, Plan::default(), 1)?;
            let mut others = Params::new(mesh, Plan::default(), 1)?;
            params.root().param("w", [2], Init::Ones)?;
            let id = others.root().param("w", [2], Init::Ones)?;
            assert!(params.ids().all(|own| own != id));
            f(&mut params, id)
        };
        refused(1, "tp=1", run, text);
    };
    let rest = "the parameter is another model's; got ParamId(0) of another, this one has 1 parameter(s); pass an id of Params::ids";
    with(|params, id| Forward::eval(params).param(id).map(drop), &format!("param: {rest}"));
    with(
        |params, id| {
            let value = params.values().next().expect("one").clone();
            params.set(id, value)
        },
        &format!("set: {rest}"),
    );
    let panicked = std::panic::catch_unwind(|| {
        with(|params, id| params.value(id).sum_all().map(drop), "");
    });
    assert!(panicked.is_err(), "a reference cannot be an error");
}

#[test]
fn a_site_is_declared() {
    refused(
        1,
        "tp=1",
        |mesh| {
            let mut params = Params::new(mesh, Plan::default(), 1)?;
            assert_eq!(params.root().child("h").site("input"), "h.input");
            let x = zeros(mesh, &[2], "(R)")?;
            let x = Forward::eval(&params).site("h.input", x)?;
            Forward::eval(&params).site("h.imput", x).map(drop)
        },
        "site: no module declared the site; got \"h.imput\"; declare it with Scope::site; the nearest are h.input",
    );
}

/// An error of a program's own, such as `thiserror` writes them.
#[derive(Debug, thiserror::Error)]
enum TrainingError {
    #[error("cannot read the data")]
    Data(#[from] std::io::Error),
    #[error(transparent)]
    Tensor(#[from] Error),
}

#[test]
fn a_programs_own_error_keeps_its_source_and_names_its_rank() {
    // Rank 1 has no data; the others return its failure in the program's own error type.
    fn train(rank: &Rank) -> Result<(), TrainingError> {
        if rank.rank() == 1 {
            std::fs::read("no/such/data")?;
        }
        Ok(rank.world().barrier()?)
    }
    let error = spmd(3, |rank| train(&rank).map_err(Error::other)).unwrap_err();
    assert_eq!(error.to_string(), "rank 1: cannot read the data");
    assert!(matches!(error, Error::Rank { rank: 1, .. }));
    let io = error.downcast_ref::<std::io::Error>().expect("the source of the program's error");
    assert_eq!(io.kind(), std::io::ErrorKind::NotFound);
    let sources = std::iter::successors(std::error::Error::source(&error), |e| e.source());
    assert!(sources.into_iter().any(|e| matches!(e.downcast_ref(), Some(TrainingError::Data(_)))));

    let ends = Spmd::new(3).run_each(|rank| train(&rank).map_err(Error::other)).unwrap();
    for (rank, end) in ends.iter().enumerate() {
        let Err(Failure::Error(error)) = end else { panic!("{end:?}") };
        assert_eq!(error.is_echo(), rank != 1, "{error}");
    }
}

#[test]
fn usual_errors_pass_by_a_question_mark() {
    let texts = |f: fn() -> Result<()>| spmd(1, move |_| f()).unwrap_err().to_string();
    assert_eq!(texts(|| Ok("x".parse::<usize>().map(|_| ())?)), "rank 0: invalid digit found in string");
    assert_eq!(texts(|| Ok("x".parse::<f32>().map(|_| ())?)), "rank 0: invalid float literal");
    assert_eq!(
        texts(|| Ok(u8::try_from(300).map(|_| ())?)),
        "rank 0: out of range integral type conversion attempted"
    );
    assert_eq!(
        texts(|| Ok(String::from_utf8(vec![255]).map(|_| ())?)),
        "rank 0: invalid utf-8 sequence of 1 bytes from index 0"
    );
    assert_eq!(
        texts(|| Ok(serde_json::from_str::<u8>("").map(|_| ())?)),
        "rank 0: EOF while parsing a value at line 1 column 0"
    );
    assert_eq!(
        texts(|| Ok(Err::<(), Box<dyn std::error::Error + Send + Sync>>("own".into())?)),
        "rank 0: own"
    );
}

/// Compares the program's refusal on rank 0 with `text`, and checks that every rank refuses.
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

/// Returns an error's text without the rank that had it first, or "" if there is no error.
fn text(result: Result<()>) -> String {
    match result {
        Ok(()) => String::new(),
        Err(Error::Rank { cause, .. }) => cause.to_string(),
        Err(e) => e.to_string(),
    }
}

/// Returns the text of a program's error.
fn text_of<T>(result: Result<Vec<T>>) -> String {
    text(result.map(drop))
}

fn zeros(mesh: &DeviceMesh, shape: &[usize], layout: &str) -> Result<DTensor> {
    DTensor::zeros(mesh, DType::F32, Shape::from(shape), layout.parse::<Layout>()?)
}

/// Methods that are composed of operators refuse in their own names.
#[test]
fn composed_methods_refuse_in_their_own_names() {
    type Call = fn(&DTensor, &DTensor) -> Result<DTensor>;
    // The first operand is `i64[4, 6]`, the second `f32[5, 7]`: neither the dtype nor the shape fits.
    let calls: &[(&str, Call)] = &[
        ("relu6", |i, _| i.relu6()),
        ("hardtanh", |i, _| i.hardtanh(-1.0, 1.0)),
        ("leaky_relu", |i, _| i.leaky_relu(0.1)),
        ("threshold", |i, _| i.threshold(0.5, 0.25)),
        ("celu", |i, _| i.celu(1.0)),
        ("glu", |i, _| i.glu(1)),
        ("softplus_with", |i, _| i.softplus_with(1.0, 20.0)),
        ("var", |i, _| i.var(&[0], 1, false)),
        ("std", |i, _| i.std(&[0], 1, false)),
        ("logsumexp", |i, _| i.logsumexp(&[0], false)),
        ("softmax", |i, _| i.softmax(1)),
        ("log_softmax", |i, _| i.log_softmax(1)),
        ("mean", |i, _| i.mean(&[0], false)),
        ("mean", |_, f| f.mean(&[7], false)),
        ("var", |_, f| f.var(&[7], 1, false)),
        ("std", |_, f| f.std(&[7], 1, false)),
        ("logsumexp", |_, f| f.logsumexp(&[7], false)),
        ("softmax", |_, f| f.softmax(7)),
        ("log_softmax", |_, f| f.log_softmax(7)),
        ("glu", |_, f| f.glu(7)),
        ("glu", |_, f| f.glu(0)),
        ("geglu", |i, _| i.geglu(1)),
        ("swiglu", |i, _| i.swiglu(1)),
        ("any", |_, f| f.any(&[7], false)),
        ("all", |_, f| f.all(&[7], false)),
        ("count_nonzero", |_, f| f.count_nonzero(&[7], false)),
        ("transpose", |_, f| f.transpose(0, 7)),
        ("unsqueeze", |_, f| f.unsqueeze(7)),
        ("squeeze", |_, f| f.squeeze(0)),
        ("flatten", |_, f| f.flatten(0, 7)),
        ("movedim", |_, f| f.movedim(0, 7)),
        ("unflatten", |_, f| f.unflatten(0, &[2, 2])),
        ("chunk", |_, f| f.chunk(2, 7).map(|mut all| all.remove(0))),
        ("split", |_, f| f.split(&[2, 3], 7).map(|mut all| all.remove(0))),
        ("unbind", |_, f| f.unbind(7).map(|mut all| all.remove(0))),
        ("repeat_interleave", |_, f| f.repeat_interleave(2, 7)),
        ("diagonal", |_, f| f.diagonal(0, 0, 7)),
        ("argsort", |_, f| f.argsort(7, false)),
        ("kthvalue", |_, f| f.kthvalue(2, 7, false).map(|(values, _)| values)),
        ("mse_loss", |i, f| f.mse_loss(i, LossReduction::Mean)),
        ("l1_loss", |i, f| f.l1_loss(i, LossReduction::Mean)),
        ("huber_loss", |i, f| f.huber_loss(i, 1.0, LossReduction::Mean)),
        ("smooth_l1_loss", |i, f| f.smooth_l1_loss(i, 1.0, LossReduction::Mean)),
        ("cosine_similarity", |i, f| f.cosine_similarity(i, 0, 1e-8)),
        ("logical_and", |i, f| f.logical_and(i)),
        ("logical_or", |i, f| f.logical_or(i)),
        ("logical_xor", |i, f| f.logical_xor(i)),
        ("masked_fill", |i, f| f.masked_fill(i, 1.0)),
        ("lerp_scalar", |i, f| f.lerp_scalar(i, 0.5)),
        ("square", |i, _| i.gt_scalar(1.0)?.square()),
        ("reciprocal", |i, _| i.gt_scalar(1.0)?.reciprocal()),
        ("div_scalar", |i, _| i.gt_scalar(1.0)?.div_scalar(2.0)),
        ("weight_norm", |i, _| i.weight_norm(&i.sum_all()?, 0)),
    ];
    let wrong = spmd(2, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
        let i = DTensor::zeros(&mesh, DType::I64, [4, 6], "(S0)")?;
        let f = DTensor::zeros(&mesh, DType::F32, [5, 7], "(S0)")?;
        let of = |(name, call): &(&str, Call)| match call(&i, &f) {
            Ok(_) => Some(format!("{name} succeeds")),
            Err(e) => (!e.to_string().starts_with(&format!("{name}: "))).then(|| format!("{name} says: {e}")),
        };
        Ok(calls.iter().filter_map(of).collect::<Vec<_>>())
    });
    let wrong = wrong.unwrap().concat();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A refusal inside a block of a program's own model names the block, and `main` prints the message.
#[test]
fn refusals_name_the_module() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let mut params = Params::new(&mesh, Plan::default(), 1)?;
        let block = params.root().child("h").child(3).block_here();
        let x = zeros(&mesh, &[4, 6], "(S0)")?;
        Forward::eval(&params).block(&block, &[&x], |_, ins| ins[0].slice(1, 0, 20)).map(drop)
    };
    let error = spmd(2, run).unwrap_err();
    let text = "slice: the range leaves the tensor; got 0..0+20 of dim 1 of f32[4, 6] at h.3";
    assert!(error.to_string().contains(text), "{error}");
    assert_eq!(format!("{error:?}"), error.to_string());
}

/// A pass that is refused keeps the tape, and a freed tape says so.
#[test]
fn a_refused_backward_pass_keeps_the_tape() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let w = zeros(&mesh, &[4], "(S0)")?.requires_grad()?;
        let mut y = w.exp()?;
        assert!(y.backward().unwrap_err().to_string().starts_with("backward: wants one element"));
        let other = zeros(&mesh, &[5], "(S0)")?;
        assert!(y.backward_from(other).is_err());
        let mut loss = y.sum_all()?;
        let guard = mesh.no_sync();
        assert!(
            loss.backward().is_err()
                && DTensor::backward_all(&mut [&mut loss], &mut Default::default()).is_err()
        );
        drop(guard);
        assert!(loss.has_history() && loss.backward_keeping().is_ok() && loss.backward().is_ok());
        let freed = loss.backward().unwrap_err().to_string();
        assert!(freed.contains("an earlier pass has freed this tensor's tape"), "{freed}");
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}
