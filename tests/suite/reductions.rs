//! Statistics over dims: their values against definitions and limits, and their bits and gradients on every mesh.

use half::bf16;
use isoshard::Result;
use isoshard::comm::Rank;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::optim::{clip_scale, global_norm};
use isoshard::placement::Layout;
use isoshard::tensor::{DType, Tensor};

use crate::common::{ordinary, small_ints, spmd, tensor};

type Method = fn(&DTensor, &[isize]) -> Result<DTensor>;

/// The differentiable methods.
const METHODS: [(&str, Method); 13] = [
    ("mean", |x, d| x.mean(d, false)),
    ("var", |x, d| x.var(d, 1, false)),
    ("std", |x, d| x.std(d, 0, true)),
    ("logsumexp", |x, d| x.logsumexp(d, false)),
    ("norm 0.5", |x, d| x.norm(0.5, d, false)),
    ("norm 1", |x, d| x.norm(1.0, d, true)),
    ("norm 2", |x, d| x.norm(2.0, d, false)),
    ("norm 3", |x, d| x.norm(3.0, d, false)),
    ("norm -1.5", |x, d| x.norm(-1.5, d, false)),
    ("norm inf", |x, d| x.norm(f64::INFINITY, d, false)),
    ("norm -inf", |x, d| x.norm(f64::NEG_INFINITY, d, false)),
    ("prod", |x, d| x.prod(d, false)),
    ("max with index", |x, d| Ok(x.max_with_index(d[0], true)?.0)),
];

/// The methods whose results are integers or bools.
const INDICES: [(&str, Method); 5] = [
    ("argmax", |x, d| x.argmax(d[0])),
    ("argmin", |x, d| x.argmin(d[0])),
    ("any", |x, d| x.any(d, false)),
    ("all", |x, d| x.all(d, true)),
    ("count_nonzero", |x, d| x.count_nonzero(d, false)),
];

/// Returns the bytes of a method's result, and of the gradient of a weighted sum of it.
fn results(
    method: Method,
    whole: &Tensor,
    dims: &[isize],
    mesh: &'static str,
    layout: Layout,
) -> [Vec<u8>; 2] {
    let (whole, dims) = (whole.clone(), dims.to_vec());
    let ranks = isoshard::placement::Mesh::parse(mesh, 0).expect("a mesh").rank_len();
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let x = DTensor::distribute(&mesh, &whole, layout.clone())?.requires_grad()?;
        let y = method(&x, &dims)?;
        let bytes =
            |x: &DTensor| Ok::<_, isoshard::Error>(x.full_tensor()?.contiguous()?.as_bytes()?.to_vec());
        if !y.dtype().is_float() {
            return Ok([bytes(&y)?, Vec::new()]);
        }
        let weights = small_ints(y.dtype(), y.shape(), 7);
        let weights = DTensor::distribute(&mesh, &weights, Layout::replicated(mesh.mesh().ndim()))?;
        let grads = y.mul(&weights)?.sum_all()?.backward()?;
        Ok([bytes(&y)?, bytes(grads.get(&x).expect("a leaf"))?])
    };
    spmd(ranks, run).unwrap_or_else(|e| panic!("{mesh}: {e}")).swap_remove(0)
}

#[test]
fn every_mesh_has_the_bits_of_one_rank() {
    for (shape, dims) in
        [(&[7, 70][..], &[1isize][..]), (&[70, 3], &[0]), (&[5, 3, 7], &[0, 2]), (&[37], &[0])]
    {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let whole = ordinary(dtype, &shape.into(), 5);
            for (name, method) in METHODS.into_iter().chain(INDICES) {
                if dims.len() > 1 && (name.starts_with("arg") || name == "max with index") {
                    continue;
                }
                let want = results(method, &whole, dims, "a=1", Layout::replicated(1));
                let mut layouts = vec!["(S0)".to_string(), format!("(RS(0..1; 1, {}, 2))", shape[0] - 3)];
                layouts.extend((shape.len() > 1).then(|| "(S1)".to_string()));
                for layout in layouts {
                    let got = results(method, &whole, dims, "a=3", layout.parse().unwrap());
                    assert!(got == want, "{name} of {dtype}{shape:?} over {dims:?} in {layout}");
                }
                let got = results(method, &whole, dims, "a=2,b=2", "(S0, S0)".parse().unwrap());
                assert!(got == want, "{name} of {dtype}{shape:?} over {dims:?} on two axes");
            }
        }
    }
}

/// Runs `f` on two ranks with this tensor, sharded along dim 0.
fn of(
    dtype: DType,
    values: &[f64],
    f: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static,
) -> Vec<f64> {
    let whole = tensor(dtype, values, &[values.len()].into());
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, "a=2")?;
        let x = DTensor::distribute(&mesh, &whole, "(S0)")?;
        Ok(f(&x)?.full_tensor()?.to_f64_vec())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}")).swap_remove(0)
}

fn gradient(values: &[f64], f: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) -> Vec<f64> {
    of(DType::F32, values, move |x| {
        let x = x.requires_grad()?;
        f(&x)?.backward()?.take(&x).ok_or_else(|| isoshard::Error::other("no gradient"))
    })
}

const INF: f64 = f64::INFINITY;

#[test]
fn sums_and_means_do_not_leave_the_range() {
    assert_eq!(of(DType::F16, &[100.0; 700], |x| x.mean_all()), [100.0]);
    assert_eq!(of(DType::F16, &[100.0; 700], |x| x.mean(&[0], true)), [100.0]);
    assert_eq!(of(DType::U8, &[221.0, 221.0], |x| x.sum_all()), [442.0]);
    assert_eq!(of(DType::I32, &[2147483647.0; 3], |x| x.sum(&[0], false)), [3.0 * 2147483647.0]);
    assert_eq!(of(DType::Bool, &[1.0; 300], |x| x.sum_all()), [300.0]);
    assert_eq!(of(DType::U8, &[100.0, 3.0, 1.0], |x| x.prod(&[0], false)), [300.0]);
}

#[test]
fn variances_of_large_means_and_their_limits() {
    let near = [16_777_216.0, 16_777_218.0].repeat(50);
    assert_eq!(of(DType::F32, &near, |x| x.var(&[0], 0, false)), [1.0]);
    assert_eq!(of(DType::F32, &[0.1; 77], |x| x.std(&[0], 0, false)).len(), 1);
    assert!(of(DType::F32, &[0.1; 77], |x| x.var(&[0], 1, false))[0] < 1e-15);
    assert_eq!(gradient(&[3.0; 4], |x| x.std(&[0], 1, false)), [0.0; 4]);
    assert!(of(DType::F32, &[5.0], |x| x.var(&[0], 1, false))[0].is_nan());
    assert!(of(DType::F32, &[1.0, INF], |x| x.var(&[0], 0, false))[0].is_nan());
}

#[test]
fn logarithms_of_sums_of_exponentials_at_infinity() {
    let of = |values: &[f64]| of(DType::F32, values, |x| x.logsumexp(&[0], false))[0];
    assert_eq!(of(&[-INF, -INF, -INF]), -INF);
    assert_eq!(of(&[1.0, INF, -INF]), INF);
    assert_eq!(of(&[-INF, 2.0]), 2.0);
    assert!(of(&[f64::NAN, 2.0]).is_nan());
    assert_eq!(of(&[-1e4, -1e4]) as f32, (2f64.ln() - 1e4) as f32);
    let softmax = gradient(&[0.0, 0.0, 1e3, 1e3], |x| x.logsumexp(&[0], false));
    assert_eq!(softmax, [0.0, 0.0, 0.5, 0.5]);
}

#[test]
fn norms_at_zero_and_at_the_ends_of_the_range() {
    for p in [0.5, 1.0, 2.0, 3.0] {
        assert_eq!(gradient(&[0.0; 3], move |x| x.norm(p, &[0], false)), [0.0; 3], "{p}");
        let one = gradient(&[0.0, -2.0, 0.0], move |x| x.norm(p, &[0], false));
        assert!((one[1] + 1.0).abs() < 1e-6 && one[0] == 0.0, "{p}: {one:?}");
    }
    assert_eq!(gradient(&[1.0, -3.0, 3.0], |x| x.norm(INF, &[0], false)), [0.0, -0.5, 0.5]);
    let norm = |dtype, values: &[f64], p: f64| of(dtype, values, move |x| x.norm(p, &[0], false))[0];
    for size in [1e200, 1e-200] {
        let got = norm(DType::F64, &[3.0 * size, 4.0 * size], 2.0);
        assert!((got / (5.0 * size) - 1.0).abs() < 4e-16, "{got}");
    }
    assert_eq!(norm(DType::F64, &[5e-324; 4], 2.0), 1e-323);
    let far = norm(DType::F32, &[1e38; 2], 50.0) / (1e38 * 2f64.powf(0.02));
    assert!((far - 1.0).abs() < 1e-7, "{far}");
    assert_eq!(norm(DType::F16, &[200.0; 4], 2.0), 400.0);
    assert_eq!(norm(DType::F32, &[0.0, 5.0, -0.0, f64::NAN], 0.0), 2.0);
    assert_eq!(norm(DType::F32, &[1.0, INF], 2.0), INF);
    assert_eq!(norm(DType::F32, &[2.0, 0.0], -1.0), 0.0);
    assert!(norm(DType::F32, &[1.0, f64::NAN], 2.0).is_nan());
}

/// Negative orders were scaled by the largest element, and orders above 1,024 overflowed. The expected values are
/// mpmath's.
#[test]
fn norms_of_negative_and_of_extreme_orders() {
    let check = |dtype, values: &[f64], p: f64, want: f64| {
        let got = of(dtype, values, move |x| x.norm(p, &[0], false))[0];
        let close = if dtype == DType::F64 { 4e-16 } else { 6e-8 };
        assert!(got == want || (got / want - 1.0).abs() < close, "{dtype}, {p}: {got:e}, not {want:e}");
    };
    check(DType::F64, &[1e200, 1e-200], -2.0, 1e-200);
    check(DType::F64, &[3e-200, 4e-200], -1.0, 12e-200 / 7.0);
    check(DType::F64, &[1e300, 1e300], -3.0, 7.937005259840998e299);
    check(DType::F32, &[1e38, 1e-38, INF], -10.0, f64::from(1e-38f32));
    check(DType::F64, &[3.0, 4.0], 2000.0, 4.0);
    check(DType::F64, &[3.0, 3.0, -3.0], 1e5, 3.000032958549703);
    check(DType::F64, &[-1e-310, 1e-310], 1e20, 1e-310);
    check(DType::F64, &[3.0, 3.0, 4.0], -2000.0, 2.998960459378228);
    check(DType::BF16, &[1e38, 1e38], 1e4, bf16::from_f64(1e38).to_f64());
    for p in [-1.0, -700.0] {
        check(DType::F64, &[0.0, 1e300], p, 0.0);
        check(DType::F64, &[INF, INF], p, INF);
        assert_eq!(gradient(&[0.0, 2.0], move |x| x.norm(p, &[0], false)), [0.0, 0.0], "{p}");
    }
    check(DType::F64, &[0.0, -0.0], 3000.0, 0.0);
    check(DType::F64, &[1.0, -INF], 3000.0, INF);
    assert!(of(DType::F64, &[1.0, f64::NAN], |x| x.norm(3000.0, &[0], false))[0].is_nan());
    let both = |p: f64| gradient(&[2.0, -2.0, 1.0], move |x| x.norm(p, &[0], false));
    let near = |p: f64, want: [f64; 3]| {
        let got = both(p);
        assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() <= 1e-7 * w.abs()), "{p}: {got:?}");
    };
    near(3000.0, [0.5001155378770383, -0.5001155378770383, 0.0]);
    near(-1.0, [0.0625, -0.0625, 0.25]);
    near(-3000.0, [0.0, -0.0, 1.0]);
}

#[test]
fn the_norm_of_gradients_neither_overflows_nor_vanishes() {
    let norm = |dtype, values: &[f64]| of(dtype, values, |x| global_norm([x, x]))[0];
    let root = 2f64.sqrt();
    assert_eq!(norm(DType::F16, &[200.0; 4]), f64::from((400.0 * root) as f32));
    assert_eq!(norm(DType::F32, &[1e-23; 64]), f64::from((8.0 * f64::from(1e-23f32) * root) as f32));
    assert_eq!(norm(DType::BF16, &[2f64.powi(126); 2]), 2f64.powi(127));
    assert!((norm(DType::F64, &[1e200; 4]) / (2e200 * root) - 1.0).abs() < 1e-15);
    assert!((norm(DType::F64, &[1e-200; 4]) / (2e-200 * root) - 1.0).abs() < 1e-15);
    assert_eq!(norm(DType::F64, &[0.0; 3]), 0.0);
    assert_eq!(norm(DType::F32, &[]), 0.0);
    let scale = of(DType::F16, &[200.0; 4], |x| clip_scale(&global_norm([x])?, 100.0));
    assert!((scale[0] - 0.25).abs() < 1e-6);
}

#[test]
fn indices_and_logic_follow_their_rules() {
    let nan = f64::NAN;
    let at = |values: &[f64], method: fn(&DTensor) -> Result<DTensor>| of(DType::F32, values, method)[0];
    assert_eq!(at(&[1.0, nan, 3.0, nan], |x| x.argmax(0)), 1.0);
    assert_eq!(at(&[1.0, nan, -3.0, nan], |x| x.argmin(0)), 1.0);
    assert_eq!(at(&[2.0, 0.0, -0.0, 1.0], |x| x.argmin(0)), 1.0);
    assert_eq!(at(&[-0.0, 0.0, -1.0], |x| x.argmax(0)), 0.0);
    assert_eq!(at(&[0.0, nan], |x| x.any(&[0], false)), 1.0);
    assert_eq!(at(&[1.0, 0.0, 1.0], |x| x.all(&[0], false)), 0.0);
    assert_eq!(at(&[], |x| x.all(&[0], false)), 1.0);
    assert_eq!(at(&[], |x| x.any(&[0], true)), 0.0);
    assert_eq!(gradient(&[0.0, 2.0, 0.0], |x| x.prod(&[0], false)), [0.0; 3]);
    assert_eq!(gradient(&[5.0, 2.0, 0.0], |x| x.prod(&[0], false)), [0.0, 0.0, 10.0]);
}

/// Bools have no `Partial` layout, so `any` and `all` over a sharded dim moved all elements.
#[test]
fn any_and_all_of_a_sharded_dim_reduce_bytes() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, "a=2")?;
        let x = DTensor::distribute(&mesh, &tensor(DType::F32, &[1.0; 64], &[64].into()), "(S0)")?;
        let before = mesh.received_bytes();
        let results = [x.all(&[0], false)?, x.any(&[-1], true)?];
        assert!(mesh.received_bytes() - before <= 2);
        for y in results {
            assert_eq!(y.full_tensor()?.to_f64_vec(), [1.0]);
        }
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}
