//! Operators that compute in one pass what several do: a linear map with its bias and its function, a sum with its norm. They
//! have one rank's bits on every mesh, the bits of separate operators in f32 and f64, and round once in f16 and bf16.

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Activation, Forward, MapInits, Mlp, MlpConfig, Module, Params, Plan};
use isoshard::placement::{Layout, Mesh, Placement};
use isoshard::rng::{Generator, Init};
use isoshard::tensor::{DType, Tensor, storage};
use isoshard::testing::{Equivalence, Trial};

const FUNCTIONS: [Option<Activation>; 5] = [
    None,
    Some(Activation::Gelu),
    Some(Activation::GeluTanh),
    Some(Activation::Silu),
    Some(Activation::Relu),
];

fn extents(trial: &Trial, least: usize) -> Vec<usize> {
    let dims = trial.size("dims", least..=3);
    (0..dims).map(|d| trial.size(&format!("extent {d}"), 0..=7)).collect()
}

/// A linear map of random dims, with a weight of one or two dims of rows.
fn map(trial: &Trial, dtype: DType) -> Result<DTensor> {
    let (leading, inputs) = (extents(trial, 0), trial.size("inputs", 0..=70));
    let rows: Vec<usize> = match trial.size("groups", 0..=3) {
        0 => vec![trial.size("rows", 0..=40)],
        groups => vec![groups, trial.size("rows", 0..=9)],
    };
    let x = trial.leaf("x", dtype, [&leading[..], &[inputs]].concat())?;
    let w = trial.leaf("w", dtype, [&rows[..], &[inputs]].concat())?;
    let bias = trial.leaf("b", dtype, rows)?;
    let bias = Some(&bias).filter(|_| trial.size("bias", 0..=3) > 0);
    x.linear(&w, bias, FUNCTIONS[trial.size("function", 0..=4)])
}

/// The norm of a sum of random dims, beside the sum: both have gradients.
fn norm(trial: &Trial, dtype: DType) -> Result<DTensor> {
    let (leading, width) = (extents(trial, 0), trial.size("width", 1..=70));
    let leaf = |name: &str, shape: Vec<usize>| trial.leaf(name, dtype, shape);
    let shape = [&leading[..], &[width]].concat();
    let (x, residual) = (leaf("x", shape.clone())?, leaf("residual", shape)?);
    let (w, b) = (leaf("w", vec![width])?, leaf("b", vec![width])?);
    let (y, sum) = match trial.size("norm", 0..=2) {
        0 => x.add_layer_norm(&residual, &w, Some(&b), 1e-3)?,
        1 => x.add_layer_norm(&residual, &w, None, 1e-3)?,
        _ => x.add_rms_norm(&residual, &w, 1e-3)?,
    };
    y.mul(&sum)
}

#[test]
fn every_mesh_has_one_ranks_bits() {
    for dtype in [DType::F32, DType::BF16] {
        Equivalence::new(move |trial: &Trial| map(trial, dtype)).runs(16).assert();
        Equivalence::new(move |trial: &Trial| norm(trial, dtype)).runs(12).assert();
    }
}

fn on<T: Send + 'static>(
    axes: &'static str,
    run: impl Fn(DeviceMesh) -> Result<T> + Send + Sync + 'static,
) -> Vec<T> {
    let ranks = Mesh::parse(axes, 0).unwrap().rank_len();
    spmd(ranks, move |rank| run(DeviceMesh::parse(&rank, axes)?)).unwrap_or_else(|e| panic!("{axes}: {e}"))
}

fn leaf(mesh: &DeviceMesh, dtype: DType, shape: &[usize], layout: &str) -> Result<DTensor> {
    let len: usize = shape.iter().product();
    let values = (0..len).map(|i| ((i * i + shape.len()) as f64 * 0.37).sin()).collect();
    let x = Tensor::from_vec(values, shape)?;
    DTensor::distribute(mesh, &x, layout)?.cast(dtype)?.detach().requires_grad()
}

/// A weight or bias of a norm, on all ranks.
fn vector(mesh: &DeviceMesh, dtype: DType) -> Result<DTensor> {
    let replicated = Layout::replicated(mesh.mesh().ndim()).to_string();
    leaf(mesh, dtype, &[70], &replicated)
}

/// The bits of a result and of the gradients of its operands.
fn bits(y: &DTensor, of: &[&DTensor]) -> Result<Vec<Vec<u8>>> {
    let dy = y.detach().cos()?;
    let grads = y.clone().backward_from(dy)?;
    let bits = |x: &DTensor| -> Result<Vec<u8>> { Ok(x.full_tensor()?.as_bytes()?.to_vec()) };
    let mut all = vec![bits(y)?];
    for x in of {
        all.push(bits(grads.get(x).expect("it is used"))?);
    }
    Ok(all)
}

/// The weight's rows, its inputs, the batch, and two of them are sharded.
const LAYOUTS: [(&str, [&str; 3]); 6] = [
    ("dp=1", ["(R)", "(R)", "(R)"]),
    ("dp=3", ["(S0)", "(R)", "(R)"]),
    ("tp=2", ["(R)", "(S0)", "(S0)"]),
    ("tp=3", ["(S2)", "(S1)", "(R)"]),
    ("dp=2,tp=2", ["(S1, R)", "(R, S0)", "(R, S0)"]),
    ("dp=2,tp=2", ["(S0, S2)", "(S0, S1)", "(R, R)"]),
];

/// An input, a weight and a bias.
fn operands(mesh: &DeviceMesh, dtype: DType, layouts: [&str; 3]) -> Result<[DTensor; 3]> {
    let shapes: [&[usize]; 3] = [&[3, 4, 70], &[9, 70], &[9]];
    let of = |i: usize| leaf(mesh, dtype, shapes[i], layouts[i]);
    Ok([of(0)?, of(1)?, of(2)?])
}

#[test]
fn wide_dtypes_have_the_bits_of_separate_operators() {
    for (axes, layouts) in LAYOUTS {
        on(axes, move |mesh| {
            for dtype in [DType::F32, DType::F64] {
                let [x, w, b] = operands(&mesh, dtype, layouts)?;
                for f in FUNCTIONS {
                    let sum = x.einsum("b t k, n k -> b t n", &w)?.add(&b)?;
                    let separate = f.map_or(Ok(sum.clone()), |f| f.apply(&sum))?;
                    let fused = x.linear(&w, Some(&b), f)?;
                    assert!(
                        bits(&fused, &[&x, &w, &b])? == bits(&separate, &[&x, &w, &b])?,
                        "{axes} {layouts:?} {dtype} {f:?}"
                    );
                }
                let residual =
                    leaf(&mesh, dtype, &[3, 4, 70], layouts[0])?.square()?.detach().requires_grad()?;
                let (w, b) = (vector(&mesh, dtype)?, vector(&mesh, dtype)?);
                let sum = x.add(&residual)?;
                let of = [&x, &residual, &w];
                let (y, s) = x.add_layer_norm(&residual, &w, Some(&b), 1e-5)?;
                let separate = sum.layer_norm(&w, Some(&b), 1e-5)?.mul(&sum)?;
                assert!(bits(&y.mul(&s)?, &of)? == bits(&separate, &of)?, "{axes} {layouts:?} {dtype}");
                // The sum alone, without a gradient of its own.
                let (y, _) = x.add_rms_norm(&residual, &w, 1e-5)?;
                assert!(bits(&y, &of)? == bits(&sum.rms_norm(&w, 1e-5)?, &of)?, "{axes} {layouts:?} {dtype}");
            }
            Ok(())
        });
    }
}

#[test]
fn narrow_dtypes_round_once() {
    for (axes, layouts) in LAYOUTS {
        on(axes, move |mesh| {
            for dtype in [DType::F16, DType::BF16] {
                let [x, w, b] = operands(&mesh, dtype, layouts)?;
                let wide = |x: &DTensor| x.detach().cast(DType::F32);
                let same = |one: &DTensor, other: &DTensor| -> Result<bool> {
                    Ok(one.full_tensor()?.as_bytes()? == other.full_tensor()?.as_bytes()?)
                };
                for f in FUNCTIONS.into_iter().flatten() {
                    let once = wide(&x)?.linear(&wide(&w)?, Some(&wide(&b)?), Some(f))?.cast(dtype)?;
                    let fused = x.linear(&w, Some(&b), Some(f))?;
                    assert!(same(&fused, &once)?, "{axes} {layouts:?} {dtype} {f:?}");
                    let product = x.einsum("b t k, n k -> b t n", &w)?;
                    let more = f.apply(&product.add(&b)?)?;
                    assert!(!same(&fused, &more)?, "{axes} {dtype} {f:?}: three roundings are one");
                }
                let (residual, w) = (x.mul_scalar(0.3)?.detach(), vector(&mesh, dtype)?);
                let (y, sum) = x.add_rms_norm(&residual, &w, 1e-5)?;
                let (once, wide_sum) = wide(&x)?.add_rms_norm(&wide(&residual)?, &wide(&w)?, 1e-5)?;
                assert!(
                    same(&y, &once.cast(dtype)?)? && same(&sum, &wide_sum.cast(dtype)?)?,
                    "{axes} {dtype}"
                );
                assert!(!same(&y, &sum.rms_norm(&w, 1e-5)?)?, "{axes} {dtype}: two roundings are one");
            }
            Ok(())
        });
    }
}

/// The gradient of `z` is zero unless derivatives are differentiated: no zeros are made for it.
#[test]
fn results_of_cheap_functions_are_computed_again_from_the_sum() {
    on("dp=1", |mesh| {
        let x = leaf(&mesh, DType::F32, &[16, 64], "(R)")?;
        let (w, b) = (leaf(&mesh, DType::F32, &[64, 64], "(R)")?, leaf(&mesh, DType::F32, &[64], "(R)")?);
        let pass = || -> Result<(usize, Vec<Vec<u8>>)> {
            let before = storage::pool_stats().live_bytes;
            // The derivative of the square reads the map's result.
            let y = x.linear(&w, Some(&b), Some(Activation::Gelu))?.square()?;
            let kept = storage::pool_stats().live_bytes - before;
            Ok((kept as usize, bits(&y, &[&x, &w, &b])?))
        };
        let (all, plain) = pass()?;
        let guard = mesh.recompute_cheap();
        let (fewer, again) = pass()?;
        drop(guard);
        assert_eq!((all, fewer), (3 * 4096, 2 * 4096), "the sum, the function's result, the square");
        assert!(plain == again);
        Ok(())
    });
}

/// A plan that places the product of a map keeps it apart from its bias.
#[test]
fn layers_keep_their_sites_and_their_bits() {
    let layer = |axes, f| {
        on(axes, move |mesh| {
            let plan = Plan::default().shard("mlp.up.*", "tp", 0).shard("mlp.down.weight", "tp", 1);
            let plan = plan.site("mlp.down", "tp", Placement::Replicate);
            let mut params = Params::new(&mesh, plan, 7)?;
            let config = MlpConfig { activation: f, ..MlpConfig::new(24) };
            let inits = MapInits { inner: Init::Normal { mean: 0.0, std: 1.0 }, out: Init::Ones };
            let mlp = Mlp::new(params.root().child("mlp"), 6, config, inits)?;
            let x = leaf(&mesh, DType::F32, &[2, 5, 6], "(R)")?;
            bits(&mlp.forward(&Forward::train(&params, &mut Generator::new(7)), &x)?, &[&x])
        })
    };
    for f in FUNCTIONS.into_iter().flatten() {
        let one = layer("tp=1", f).remove(0);
        for axes in ["tp=2", "tp=3"] {
            assert!(layer(axes, f).iter().all(|rank| *rank == one), "{axes} {f:?}");
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    on("dp=1", |mesh| {
        let x = leaf(&mesh, DType::F32, &[3, 5], "(R)")?;
        let (w, b) = (leaf(&mesh, DType::F32, &[4, 5], "(R)")?, leaf(&mesh, DType::F32, &[5], "(R)")?);
        let refused = |result: Result<DTensor>| result.map(|_| ()).unwrap_err().to_string();
        let linear = |x: &DTensor, w, b| refused(x.linear(w, b, Some(Activation::Gelu)));
        assert!(
            linear(&x, &w, Some(&b)).starts_with(
                "linear: wants one bias per row of the weight; got f32[3, 5], f32[4, 5], f32[5]"
            )
        );
        assert!(
            linear(&x, &b, None)
                .starts_with("linear: wants weights [rows, 5] or [groups, rows, 5] for x's last dim")
        );
        assert!(linear(&x, &w.cast(DType::F64)?, None).starts_with("linear: wants one floating dtype"));
        // Without a bias and a function it is a product, which is refused alike.
        assert!(refused(x.linear(&b, None, None)).starts_with("linear: wants weights"));
        let norm = |residual| refused(x.add_rms_norm(residual, &b, 1e-5).map(|both| both.0));
        assert!(
            norm(&w).starts_with("add_rms_norm: wants a residual of x's dtype and shape"),
            "{}",
            norm(&w)
        );
        Ok(())
    });
}
