//! Joint maps: products of one input with several weights have one rank's bits, and leave one sum for the input's
//! gradient. Gradients of a shared parameter are reduced in one call.

use isoshard::Result;
use isoshard::comm::{DryRun, Rank, Tally, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::nn::{Embedding, Forward, Linear, Module, Parallel, Params, Plan};
use isoshard::placement::{Layout, Mesh, Placement};
use isoshard::rng::Init;
use isoshard::tensor::{DType, Tensor};
use isoshard::testing::values::{bits_differ, ordinary};
use isoshard::testing::{Equivalence, Trial};

const INIT: Init = Init::Normal { mean: 0.0, std: 1.0 };

fn on<T: Send + 'static>(
    mesh: &'static str,
    run: impl Fn(&Rank, DeviceMesh) -> Result<T> + Send + Sync + 'static,
) -> Vec<T> {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    let run = move |rank: Rank| run(&rank, DeviceMesh::parse(&rank, mesh)?);
    spmd(ranks, run).unwrap_or_else(|e| panic!("{mesh}: {e}"))
}

/// The products of an input of random leading dims with three weights, whose rows have these multiples.
fn products(trial: &Trial, dtype: DType) -> Result<Vec<DTensor>> {
    let (dims, groups) = (trial.size("dims", 0..=3), trial.size("groups", 1..=9));
    let width = trial.size("width", 0..=40);
    let leading: Vec<usize> = (0..dims).map(|d| trial.size(&format!("extent {d}"), 0..=7)).collect();
    let x = trial.leaf("x", dtype, &[&leading[..], &[width]].concat()[..])?;
    let weight = |name: &str, times: usize| trial.leaf(name, dtype, [groups * times, width]);
    let weights = [weight("q", trial.size("times", 0..=7))?, weight("k", 3)?, weight("v", 1)?];
    let weights = weights.each_ref();
    match trial.size("given", 0..=1) {
        0 => x.joint_linear(&weights),
        _ => x.joint_linear_in(groups, &weights),
    }
}

fn named(results: Vec<DTensor>) -> Vec<(String, DTensor)> {
    results.into_iter().enumerate().map(|(i, y)| (format!("result {i}"), y)).collect()
}

#[test]
fn every_mesh_has_one_ranks_bits() {
    for dtype in [DType::F32, DType::BF16] {
        // The product of all results: each gradient depends on each weight.
        let program = move |trial: &Trial| {
            let ys = products(trial, dtype)?;
            let ys = ys.iter().map(|y| y.tanh()?.sum(&[-1], false)).collect::<Result<Vec<_>>>()?;
            ys[0].mul(&ys[1])?.mul(&ys[2])
        };
        Equivalence::new(program).runs(12).assert();
    }
}

/// Small integers have exact sums, so that fast mode's order changes nothing.
#[test]
fn fast_mode_computes_the_same() {
    Equivalence::new(|trial: &Trial| Ok(named(products(trial, DType::F32)?))).runs(8).fast(1e-5).assert();
}

#[test]
fn second_derivatives_have_one_ranks_bits() {
    let program = |trial: &Trial| {
        let x = trial.leaf("x", DType::F64, [3, 4, 5])?;
        let (q, k) = (trial.leaf("q", DType::F64, [8, 5])?, trial.leaf("k", DType::F64, [4, 5])?);
        let ys = x.joint_linear_in(2, &[&q, &k])?;
        let loss = ys[0].tanh()?.sum_all()?.add(&ys[1].square()?.tanh()?.sum_all()?)?;
        let grads = loss.grad(&[&x, &q, &k])?;
        Ok(named(grads.iter().map(|g| g.square()?.sum_all()).collect::<Result<_>>()?))
    };
    Equivalence::new(program).runs(8).assert();
}

/// Returns the results' and the operands' gradients of a program of `x` and weights of these rows.
fn outcome(
    mesh: &DeviceMesh,
    rows: &[usize],
    layouts: [&'static str; 2],
    program: impl Fn(&DTensor, &[&DTensor]) -> Result<Vec<DTensor>>,
) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
    let leaf = |shape: &[usize], layout: &str, salt: u64| {
        let whole = ordinary(DType::F32, &shape.into(), salt);
        DTensor::distribute(mesh, &whole, layout)?.requires_grad()
    };
    let x = leaf(&[2, 3, 11], layouts[0], 1)?;
    let weights = rows.iter().zip(2..).map(|(&n, salt)| leaf(&[n, 11], layouts[1], salt));
    let weights = weights.collect::<Result<Vec<_>>>()?;
    let ys = program(&x, &weights.iter().collect::<Vec<_>>())?;
    let mut loss = DTensor::zeros(mesh, DType::F32, [], Layout::replicated(mesh.mesh().ndim()))?;
    for y in &ys {
        loss = loss.add(&y.square()?.sum_all()?)?;
    }
    let grads = loss.backward()?;
    let gradient = |leaf: &DTensor| grads.get(leaf).expect("a leaf").full_tensor();
    let ys = ys.iter().map(DTensor::full_tensor).collect::<Result<_>>()?;
    Ok((ys, [&x].into_iter().chain(&weights).map(gradient).collect::<Result<_>>()?))
}

/// Only the input's gradient has other bits than with separate products. It has those of a fused weight.
#[test]
fn the_inputs_gradient_is_that_of_a_fused_weight() {
    for (mesh, layouts) in [
        ("tp=1", ["(R)", "(R)"]),
        ("tp=2", ["(R)", "(S0)"]),
        ("tp=3", ["(S1)", "(S0)"]),
        ("tp=2", ["(R)", "(S1)"]),
    ] {
        on(mesh, move |_, mesh| {
            let rows = [4 * 64, 64, 64];
            let separate = |x: &DTensor, weights: &[&DTensor]| {
                weights.iter().map(|w| x.einsum("b t k, n k -> b t n", w)).collect()
            };
            let fused = |x: &DTensor, weights: &[&DTensor]| {
                let parts = weights.iter().zip(rows).map(|(w, n)| w.reshape([4, n / 4, 11]));
                let parts = parts.collect::<Result<Vec<_>>>()?;
                let fused = DTensor::cat(&parts.iter().collect::<Vec<_>>(), 1)?;
                let y = x.einsum("b t k, g n k -> b t g n", &fused)?;
                let ys = y.split(&rows.map(|n| n / 4), -1)?;
                ys.iter().zip(rows).map(|(y, n)| y.reshape([2, 3, n])).collect()
            };
            let joint = outcome(&mesh, &rows, layouts, |x, weights| x.joint_linear_in(4, weights))?;
            let alone = outcome(&mesh, &rows, layouts, separate)?;
            let fused = outcome(&mesh, &rows, layouts, fused)?;
            for (one, other) in joint.0.iter().zip(&alone.0).chain(joint.1[1..].iter().zip(&alone.1[1..])) {
                assert_eq!(bits_differ(one, other), None, "as separate products");
            }
            assert_eq!(bits_differ(&joint.1[0], &fused.1[0]), None, "as a fused weight");
            assert!(bits_differ(&joint.1[0], &alone.1[0]).is_some(), "one sum of all, not a sum of three");
            Ok(())
        });
    }
}

fn calls_of(tally: &Tally, call: &str) -> u64 {
    tally.rows().iter().filter(|row| row.call == call).map(|row| row.total.calls).sum()
}

/// The calls that reduce in a backward pass of a tensor-parallel layer, and the bytes that a rank receives.
fn reductions(mesh: &'static str, sequence: bool, joint: bool) -> (u64, u64) {
    let count = move |rank: &Rank, _: DeviceMesh| {
        let (rank, tally) = Tally::of(rank)?;
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let plan = ["q", "k", "v"].iter().fold(Plan::default(), |p, n| p.shard(&format!("{n}.*"), "tp", 0));
        let mut params = Params::new(&mesh, plan, 7)?;
        let mut map = |name: &str, outputs| Linear::new(params.root().child(name), 16, outputs, INIT);
        let maps = [map("q", 512)?, map("k", 128)?, map("v", 128)?];
        let maps = maps.each_ref();
        let cx = Forward::train_without_dropout(&params);
        let layout = if sequence { "(S0, S1)" } else { "(S0, R)" };
        let x = ordinary(DType::F32, &[2, 8, 16].into(), 1);
        let leaf = DTensor::distribute(&mesh, &x, layout)?.requires_grad()?;
        let x = leaf.tanh()?;
        let ys = match joint {
            true => Linear::forward_joint(&maps, &cx, &x)?,
            false => maps.iter().map(|map| map.forward(&cx, &x)).collect::<Result<_>>()?,
        };
        let squares =
            ys.iter().map(|y| y.square()?.sum_all()?.reduce_partial()).collect::<Result<Vec<_>>>()?;
        let loss = squares[0].add(&squares[1])?.add(&squares[2])?;
        let count =
            || (calls_of(&tally, "reduce_scatter") + calls_of(&tally, "all_reduce"), mesh.received_bytes());
        let before = count();
        loss.grad(&[&leaf])?;
        Ok((count().0 - before.0, count().1 - before.1))
    };
    on(mesh, count)[0]
}

#[test]
fn the_inputs_gradient_is_reduced_once() {
    for sequence in [false, true] {
        for mesh in ["dp=1,tp=2", "dp=2,tp=4"] {
            let (joint, bytes) = reductions(mesh, sequence, true);
            let (separate, separate_bytes) = reductions(mesh, sequence, false);
            assert_eq!((joint, separate), (1, 3), "{mesh}, {sequence}");
            assert!(2 * bytes <= separate_bytes, "{mesh}, {sequence}: {bytes} of {separate_bytes}");
        }
    }
}

/// Queries, keys and values of three parameters.
fn attention_maps(trial: &Trial, plan: Plan) -> Result<Vec<DTensor>> {
    let mut params = Params::new(trial, plan, 7)?;
    let x = trial.leaf("x", DType::F32, [2, 5, 7])?;
    let mut map = |name: &str, n: usize| Linear::new(params.root().child(name), 7, n, INIT);
    let maps = [map("q", 12)?, map("k", 6)?, map("v", 6)?];
    let cx = Forward::train_without_dropout(&params);
    let ys = Linear::forward_joint_in(&maps.each_ref(), 3, &cx, &x)?;
    drop(cx);
    let mut loss = ys[0].sum_all()?.mul(&ys[1].tanh()?.sum_all()?)?.add(&ys[2].square()?.sum_all()?)?;
    let grads = loss.backward()?;
    trial.record("dx", grads.get(&x).expect("a leaf"))?;
    for id in params.ids() {
        trial.record(params.path(id), grads.get(params.value(id)).expect("used"))?;
    }
    Ok(ys)
}

#[test]
fn layers_of_separate_maps_have_one_ranks_bits() {
    type PlanMaker = fn() -> Plan;
    let plans: [(&str, &[&str], PlanMaker); 4] = [
        ("fsdp", &["a=2,b=3", "a=3,b=2"], || Plan::default().fsdp("a")),
        ("rows", &["a=2,b=3", "a=3,b=2"], || Plan::default().shard("*.*", "b", 0)),
        ("blocks of rows", &["a=2,b=3"], || Plan::default().shard_blocks("*.weight", "b", 0, 3)),
        ("inputs and fsdp", &["a=2,b=3"], || Plan::default().shard("*.weight", "b", 1).fsdp("a")),
    ];
    for (name, meshes, plan) in plans {
        let program = move |trial: &Trial| Ok(named(attention_maps(trial, plan())?));
        let check = Equivalence::new(program).meshes(meshes.iter().copied()).runs(6);
        check.check().unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    on("tp=2", |_, mesh| {
        let zeros = |shape: &[usize], dtype| DTensor::zeros(&mesh, dtype, shape, "(R)");
        let (x, w) = (zeros(&[3, 4], DType::F32)?, zeros(&[6, 4], DType::F32)?);
        let refused = |x: &DTensor, groups: Option<usize>, weights: &[&DTensor]| {
            let ys = groups.map_or_else(|| x.joint_linear(weights), |n| x.joint_linear_in(n, weights));
            ys.map(drop).unwrap_err().to_string()
        };
        assert_eq!(refused(&x, None, &[]), "joint_linear: wants one or more weights; got none");
        let scalar = zeros(&[], DType::F32)?;
        assert_eq!(
            refused(&scalar, None, &[&w]),
            "joint_linear: wants 1 to 24 dims; got f32[]@(tp:R); reshape it first"
        );
        let wants = "joint_linear: wants weights [outputs, inputs] of the input's floating dtype and width 4; \
                     got f32[3, 4]@(tp:R) and weight 1 ";
        for (other, given) in [
            (zeros(&[4, 6], DType::F32)?, "f32[4, 6]@(tp:R)"),
            (zeros(&[4], DType::F32)?, "f32[4]@(tp:R)"),
            (zeros(&[2, 3, 4], DType::F32)?, "f32[2, 3, 4]@(tp:R)"),
            (zeros(&[6, 4], DType::F64)?, "f64[6, 4]@(tp:R)"),
        ] {
            let text = refused(&x, None, &[&w, &other]);
            assert_eq!(text, format!("{wants}{given}; transpose or cast one of them"));
        }
        for groups in [0, 4] {
            let text = refused(&x, Some(groups), &[&w]);
            let rule = "joint_linear: the number of groups does not divide the rows of every weight";
            let remedy = "give a common divisor of the weights' rows";
            assert_eq!(
                text,
                format!("{rule}; got {groups} group(s) for weight 0 f32[6, 4]@(tp:R); {remedy}")
            );
        }
        let other = DeviceMesh::parse(mesh.rank(), "tp=2")?;
        let elsewhere = DTensor::zeros(&other, DType::F32, [6, 4], "(R)")?;
        let text = refused(&x, None, &[&w, &elsewhere]);
        assert!(text.starts_with("joint_linear: the operands are on one mesh; got"), "{text}");
        mesh.set_strict(true);
        let cut = x.redistribute("(S1)")?;
        let whole = zeros(&[6, 4], DType::F32)?;
        assert!(cut.joint_linear(&[&whole, &whole]).is_err(), "strict mode moves nothing");
        Ok(())
    });
}

#[test]
fn layers_name_their_weights_in_refusals() {
    on("1", |_, mesh| {
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let mut map = |name: &str, inputs| Linear::without_bias(params.root().child(name), inputs, 6, INIT);
        let (q, k) = (map("q", 4)?, map("k", 5)?);
        let x = DTensor::zeros(&mesh, DType::F32, [3, 4], "()")?;
        let text = Linear::forward_joint(&[&q, &k], &Forward::eval(&params), &x).map(drop).unwrap_err();
        assert!(text.to_string().contains("weight 1 f32[6, 5]@() at q.weight, k.weight;"), "{text}");
        Ok(())
    });
}

/// A frozen weight, or an input that is no leaf's, has no gradient and costs no product.
#[test]
fn only_wanted_gradients_are_computed() {
    on("1", |_, mesh| {
        let full = |shape: &[usize]| DTensor::full(&mesh, DType::F32, shape, "()", 0.5);
        let products = |x: &DTensor, w: &[&DTensor]| -> Result<u64> {
            let ys = x.joint_linear(w)?;
            let mut loss = ys[0].sum_all()?.add(&ys[1].sum_all()?)?;
            let work = mesh.tally_work();
            loss.backward()?;
            let rows = work.rows();
            Ok(rows.iter().filter(|row| row.operator == "matmul").map(|row| row.total.calls).sum())
        };
        let (x, v, w) = (full(&[3, 4])?, full(&[6, 4])?, full(&[6, 4])?);
        let (x_leaf, v_leaf, w_leaf) = (x.requires_grad()?, v.requires_grad()?, w.requires_grad()?);
        assert_eq!(products(&x_leaf, &[&v, &w])?, 1);
        assert_eq!(products(&x, &[&v_leaf, &w])?, 1);
        assert_eq!(products(&x, &[&v_leaf, &w_leaf])?, 2);
        assert_eq!(products(&x_leaf, &[&v_leaf, &w_leaf])?, 3);
        Ok(())
    });
}

#[test]
fn a_tied_table_is_reduced_once() {
    let step = |rank: &Rank, text: &str, compute: DType| -> Result<(u64, Vec<f64>)> {
        let (rank, tally) = Tally::of(rank)?;
        let mesh = DeviceMesh::parse(&rank, text)?;
        let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 1, sequence: false })?;
        let layout = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(&mesh, plan, 7)?;
        params.compute_in(compute)?;
        let table = Embedding::new(params.root().child("wte"), 13, 8, INIT)?;
        let tokens = Tensor::from_vec((0..60).map(|i: i64| i * i % 13).collect(), [12, 5])?;
        let tokens = DTensor::distribute(&mesh, &tokens, layout)?;
        let cx = Forward::train_without_dropout(&params);
        let scores = table.scores(&cx, &table.forward(&cx, &tokens)?.tanh()?)?;
        let mut loss = scores.tanh()?.mean_all()?.reduce_partial()?;
        drop(cx);
        let reductions = || calls_of(&tally, "reduce_scatter") + calls_of(&tally, "all_reduce");
        let before = reductions();
        let gradient = loss.backward()?.take(params.values().next().expect("the table")).expect("it is used");
        Ok((reductions() - before, gradient.full_tensor()?.to_f64_vec()))
    };
    for compute in [DType::F32, DType::BF16] {
        let one = on("1", move |rank, _| step(rank, "1", compute)).remove(0);
        for (mesh, most) in [("fsdp=2", 1), ("fsdp=3", 1), ("fsdp=5", 1), ("dp=2,fsdp=2", 2), ("dp=3", 1)] {
            for (calls, gradient) in on(mesh, move |rank, _| step(rank, mesh, compute)) {
                assert!(gradient == one.1, "{mesh}, {compute}");
                assert!((1..=most).contains(&calls), "{mesh}, {compute}: {calls} calls");
            }
        }
    }
}

/// A weight that is used many times: its gradients are reduced four at a time, in the order in which they arrive.
#[test]
fn many_gradients_of_one_leaf_wait_in_fours() {
    for (mesh, axes) in [("fsdp=3", "fsdp"), ("dp=2,fsdp=2", "dp and fsdp")] {
        let step = |rank: &Rank, text: &str, uses: usize, plain: Option<usize>| -> Result<(u64, Vec<f64>)> {
            let (rank, tally) = Tally::of(rank)?;
            let mesh = DeviceMesh::parse(&rank, text)?;
            let ndim = mesh.mesh().ndim();
            let batch = Layout::new(vec![Placement::Shard(0); ndim]);
            let mut of_leaf = vec![Placement::Replicate; ndim];
            if let Some(last) = of_leaf.last_mut() {
                *last = Placement::Shard(0);
            }
            let w = ordinary(DType::F32, &[5, 5].into(), 1);
            let leaf = DTensor::distribute(&mesh, &w, Layout::new(of_leaf))?;
            let leaf = leaf.requires_grad()?;
            let whole = leaf.redistribute(Layout::replicated(ndim))?;
            let x = ordinary(DType::F32, &[12, 2, 5].into(), 2);
            let mut x = DTensor::distribute(&mesh, &x, batch)?;
            for i in 0..uses {
                x = x.matmul(&whole)?.tanh()?;
                if plain == Some(i) {
                    // This contribution is no partial sum.
                    x = x.add(&whole.sum(&[0], false)?)?;
                }
            }
            let mut loss = x.sum_all()?.reduce_partial()?;
            let reductions = || calls_of(&tally, "reduce_scatter") + calls_of(&tally, "all_reduce");
            let before = reductions();
            let gradient = loss.backward()?.take(&leaf).expect("a leaf");
            let calls = reductions() - before;
            Ok((calls, gradient.full_tensor()?.to_f64_vec()))
        };
        for (uses, plain) in
            [(1, None), (2, None), (3, None), (4, None), (9, None), (3, Some(1)), (6, Some(5))]
        {
            let one = on("1", move |rank, _| step(rank, "1", uses, plain)).remove(0);
            for (calls, gradient) in on(mesh, move |rank, _| step(rank, mesh, uses, plain)) {
                assert!(gradient == one.1, "{axes}: {uses} uses, {plain:?}");
                if plain.is_none() {
                    assert_eq!(calls as usize, uses.div_ceil(4), "{axes}: {uses} uses");
                }
            }
        }
    }
}

/// Two gradients of a shared table are held unreduced at the end of the pass, next to the buffer that is sent and the
/// one that is received: none of them is held twice.
#[test]
fn gradients_that_wait_take_no_further_memory() {
    let (ranks, rows, width) = (8, 1 << 12, 64);
    let table = rows * width * 4;
    let peak = |reduction, uses: usize| -> Result<usize> {
        let dry = DryRun::new(ranks, 3)?;
        let mesh = DeviceMesh::parse(&dry.rank()?, "fsdp=8")?;
        mesh.set_reduction(reduction);
        let leaf = DTensor::zeros(&mesh, DType::F32, [rows, width], "(S0)")?.requires_grad()?;
        let whole = leaf.redistribute("(R)")?;
        let x = DTensor::zeros(&mesh, DType::F32, [ranks, 2, width], "(S0)")?;
        let mut loss = DTensor::zeros(&mesh, DType::F32, [ranks, 2, rows], "(S0)")?;
        for _ in 0..uses {
            loss = loss.add(&x.einsum("b t k, n k -> b t n", &whole)?)?;
        }
        let mut loss = loss.sum_all()?.reduce_partial()?;
        loss.backward()?;
        Ok(dry.report().peak_bytes)
    };
    let tables = |reduction, uses| peak(reduction, uses).unwrap() as f64 / table as f64;
    // The table is whole until its last use. Each rank holds an eighth of it and of the gradient.
    let [fast, one, two] =
        [tables(Reduction::Fast, 2), tables(Reduction::Exact, 1), tables(Reduction::Exact, 2)];
    println!("fast {fast:.2} tables, one use {one:.2}, two uses {two:.2}");
    assert!(two <= 5.5, "{two}");
    assert!(one <= 3.5 && fast <= 4.5, "{one}, {fast}");
}
