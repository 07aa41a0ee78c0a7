//! Methods at the ends of a dtype's range: values and gradients in f32, bf16 and f16 are those of f64, also if a step on the
//! way to them would overflow or underflow.

use isoshard::comm::spmd;
use isoshard::dtensor::{BinaryLossOptions, CrossEntropyOptions, DTensor, DeviceMesh, LossReduction};
use isoshard::placement::Layout;
use isoshard::tensor::{DType, Tensor};
use isoshard::testing::values::epsilon;
use isoshard::{Error, Result};

/// A method of one or two operands.
struct Method {
    name: &'static str,
    arity: usize,
    run: fn(&[DTensor]) -> Result<DTensor>,
}

macro_rules! methods {
    ($($name:ident |$x:pat_param| $call:expr;)*) => {
        &[$(Method { name: stringify!($name), arity: methods!(@arity $x), run: |x| match x { $x => $call, _ => unreachable!() } }),*]
    };
    (@arity [$a:ident]) => { 1 };
    (@arity [$a:ident, $b:ident]) => { 2 };
    (@arity $x:pat_param) => { arity_of(stringify!($x)) };
}

const fn arity_of(pattern: &str) -> usize {
    let bytes = pattern.as_bytes();
    let (mut i, mut n) = (0, 1);
    while i < bytes.len() {
        if bytes[i] == b',' {
            n += 1;
        }
        i += 1;
    }
    n
}

const NONE: LossReduction = LossReduction::None;

/// Methods whose element depends on one element of each operand.
const ELEMENTWISE: &[Method] = methods! {
    add |[x, y]| x.add(y);
    sub |[x, y]| x.sub(y);
    mul |[x, y]| x.mul(y);
    div |[x, y]| x.div(y);
    exp |[x]| x.exp();
    exp2 |[x]| x.exp2();
    expm1 |[x]| x.expm1();
    log |[x]| x.log();
    log1p |[x]| x.log1p();
    log2 |[x]| x.log2();
    log10 |[x]| x.log10();
    sqrt |[x]| x.sqrt();
    rsqrt |[x]| x.rsqrt();
    square |[x]| x.square();
    reciprocal |[x]| x.reciprocal();
    cbrt |[x]| x.cbrt();
    pow |[x, y]| x.pow(y);
    pow_half |[x]| x.pow_scalar(0.5);
    pow_three |[x]| x.pow_scalar(3.0);
    pow_minus_two |[x]| x.pow_scalar(-2.0);
    sigmoid |[x]| x.sigmoid();
    log_sigmoid |[x]| x.log_sigmoid();
    logit |[x]| x.logit();
    softplus |[x]| x.softplus();
    softplus_with |[x]| x.softplus_with(3.0, 20.0);
    tanh |[x]| x.tanh();
    sinh |[x]| x.sinh();
    cosh |[x]| x.cosh();
    asinh |[x]| x.asinh();
    acosh |[x]| x.acosh();
    atanh |[x]| x.atanh();
    asin |[x]| x.asin();
    acos |[x]| x.acos();
    atan |[x]| x.atan();
    atan2 |[x, y]| x.atan2(y);
    tan |[x]| x.tan();
    sinc |[x]| x.sinc();
    erf |[x]| x.erf();
    erfc |[x]| x.erfc();
    erfinv |[x]| x.erfinv();
    lgamma |[x]| x.lgamma();
    digamma |[x]| x.digamma();
    hypot |[x, y]| x.hypot(y);
    logaddexp |[x, y]| x.logaddexp(y);
    xlogy |[x, y]| x.xlogy(y);
    xlog1py |[x, y]| x.xlog1py(y);
    relu |[x]| x.relu();
    gelu |[x]| x.gelu();
    gelu_tanh |[x]| x.gelu_tanh();
    silu |[x]| x.silu();
    mish |[x]| x.mish();
    elu |[x]| x.elu(1.5);
    selu |[x]| x.selu();
    celu |[x]| x.celu(2.0);
    softsign |[x]| x.softsign();
    tanhshrink |[x]| x.tanhshrink();
    hardswish |[x]| x.hardswish();
    hardsigmoid |[x]| x.hardsigmoid();
    leaky_relu |[x]| x.leaky_relu(0.1);
    lerp_scalar |[x, y]| x.lerp_scalar(y, 0.25);
    addcmul |[x, y]| x.addcmul(x, y, 0.5);
    addcdiv |[x, y]| x.addcdiv(x, y, 0.5);
    fmod |[x, y]| x.fmod(y);
    remainder |[x, y]| x.remainder(y);
    copysign |[x, y]| x.copysign(y);
    mse_loss |[x, y]| x.mse_loss(y, NONE);
    l1_loss |[x, y]| x.l1_loss(y, NONE);
    huber_loss |[x, y]| x.huber_loss(y, 1.5, NONE);
    smooth_l1_loss |[x, y]| x.smooth_l1_loss(y, 0.5, NONE);
    kl_div_loss |[x, y]| x.kl_div_loss(y, false, NONE);
    kl_div_loss_of_log_target |[x, y]| x.kl_div_loss(&y.clamp_max(0.0)?, true, NONE);
    bce_with_logits_loss |[x, y]| x.bce_with_logits_loss(&y.clamp(0.0, 1.0)?.detach(), &BinaryLossOptions { reduction: NONE, ..Default::default() });
};

/// Methods of vectors of four elements, the rows of one matrix per operand.
const VECTORS: &[Method] = methods! {
    std |[x]| x.std(&[1], 1, false);
    std_of_all |[x]| x.std(&[1], 0, true);
    var |[x]| x.var(&[1], 1, false);
    mean |[x]| x.mean(&[1], false);
    sum |[x]| x.sum(&[1], false);
    logsumexp |[x]| x.logsumexp(&[1], false);
    softmax |[x]| x.softmax(1);
    log_softmax |[x]| x.log_softmax(1);
    norm_half |[x]| x.norm(0.5, &[1], false);
    norm_one |[x]| x.norm(1.0, &[1], false);
    norm_two |[x]| x.norm(2.0, &[1], false);
    norm_three |[x]| x.norm(3.0, &[1], false);
    norm_ten |[x]| x.norm(10.0, &[1], false);
    norm_thousand |[x]| x.norm(1000.0, &[1], false);
    norm_minus_one |[x]| x.norm(-1.0, &[1], false);
    norm_inf |[x]| x.norm(f64::INFINITY, &[1], false);
    cosine_similarity |[x, y]| x.cosine_similarity(y, 1, 1e-8);
    cosine_similarity_without_eps |[x, y]| x.cosine_similarity(y, 1, 0.0);
    cosine_embedding_loss |[x, y]| {
        let target = x.sum(&[1], false)?.detach().ones_like()?;
        x.cosine_embedding_loss(y, &target, 0.0, NONE)
    };
    cosine_embedding_loss_apart |[x, y]| {
        let target = x.sum(&[1], false)?.detach().ones_like()?.neg()?;
        x.cosine_embedding_loss(y, &target, -0.5, NONE)
    };
    layer_norm |[x]| x.layer_norm_over(1, None, None, 1e-5);
    layer_norm_without_eps |[x]| x.layer_norm_over(1, None, None, 0.0);
    rms_norm |[x]| {
        let weight = DTensor::full(x.mesh(), x.dtype(), [4], Layout::replicated(1), 1.0)?;
        x.rms_norm(&weight, 1e-6)
    };
    rms_norm_without_eps |[x]| {
        let weight = DTensor::full(x.mesh(), x.dtype(), [4], Layout::replicated(1), 1.0)?;
        x.rms_norm(&weight, 0.0)
    };
    batch_norm |[x]| x.transpose(0, 1)?.batch_norm(None, 0.0)?.0.transpose(0, 1);
    group_norm |[x]| x.unsqueeze(2)?.group_norm(1, None, 0.0);
    weight_norm |[x]| {
        let norms = DTensor::full(x.mesh(), x.dtype(), [x.shape()[0]], Layout::replicated(1), 2.0)?;
        x.weight_norm(&norms, 0)
    };
    prod |[x]| x.prod(&[1], false);
    glu |[x]| x.glu(1);
    swiglu |[x]| x.swiglu(1);
    geglu |[x]| x.geglu(1);
    cross_entropy |[x]| {
        let rows = x.shape()[0];
        let target = DTensor::full(x.mesh(), DType::I64, [rows], Layout::replicated(1), 2.0)?;
        x.cross_entropy_with(&target, &CrossEntropyOptions { reduction: NONE, ..Default::default() })
    };
    cross_entropy_smooth |[x]| {
        let rows = x.shape()[0];
        let target = DTensor::full(x.mesh(), DType::I64, [rows], Layout::replicated(1), 2.0)?;
        x.cross_entropy_with(&target, &CrossEntropyOptions { reduction: NONE, label_smoothing: 0.25, z_loss: 0.0, ..Default::default() })
    };
    soft_cross_entropy |[x, y]| x.cross_entropy_with(&y.softmax(1)?.detach(), &CrossEntropyOptions { reduction: NONE, ..Default::default() });
};

const PATTERNS: [[f64; 4]; 5] = [
    [1.0, 2.0, 3.0, 4.0],
    [1.0, -1.0, 0.5, 0.0],
    [1.0, 1.0, 1.0, 1.0],
    [-0.5, 1.0, -0.25, 0.75],
    [1.0, 1e-6, -1e-3, 0.0],
];

/// Methods whose last steps cancel, so that their error is that of terms of size 1.
const CANCELS: [&str; 12] = [
    "sigmoid",
    "tanh",
    "expm1",
    "celu",
    "bce_with_logits_loss",
    "softmax",
    "log_softmax",
    "cross_entropy",
    "cross_entropy_smooth",
    "soft_cross_entropy",
    "kl_div_loss",
    "kl_div_loss_of_log_target",
];

/// Methods with terms of the size of the largest operand.
const CANCELS_OPERANDS: [&str; 5] =
    ["kl_div_loss", "kl_div_loss_of_log_target", "bce_with_logits_loss", "glu", "soft_cross_entropy"];

/// The least and the largest magnitude of elements, in f32 and bf16, with which a method of vectors is right, and the reason.
const RANGES: &[(&str, f64, f64, &str)] = &[
    ("mean", 0.0, 3e37, "the sum is finite"),
    ("var", 0.0, 1e18, "the sum of squared deviations is finite"),
    ("layer_norm_without_eps", 1e-18, 3e38, "the variance is in the range of f32"),
    ("group_norm", 1e-18, 3e38, "the variance is in the range of f32"),
    ("batch_norm", 1e-12, 1e12, "the third power of the deviation is in the range of f32, for the gradient"),
    ("rms_norm_without_eps", 1e-18, 3e38, "the mean square is in the range of f32"),
    ("weight_norm", 1e-37, 5e37, "the norm of a slice is in the range of the dtype"),
    ("prod", 1e-9, 1e9, "the products of the first elements are finite"),
];

fn range(dtype: DType) -> (f64, f64, f64) {
    // The smallest normal number, the largest number, the largest relative error.
    match dtype {
        DType::F16 => (6.1035e-5, 65504.0, 0.02),
        DType::BF16 => (1.1755e-38, 3.3895e38, 0.1),
        DType::F32 => (1.1755e-38, 3.4028e38, 1e-3),
        _ => unreachable!("narrow dtypes"),
    }
}

fn inputs(dtype: DType) -> Vec<f64> {
    let wide = [
        1e-44, 1e-40, 3e-38, 1e-30, 1e-25, 1e-20, 1e-15, 1e-10, 1e-5, 0.01, 0.5, 0.9, 1.0, 1.5, 7.0, 30.0,
        88.0, 100.0, 1e3, 1e5, 1e10, 1e15, 1e20, 1e25, 1e30, 3e38,
    ];
    let half =
        [6e-8, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.5, 0.9, 1.0, 1.5, 7.0, 11.0, 16.0, 100.0, 300.0, 3e3, 6e4];
    let magnitudes = if dtype == DType::F16 { &half[..] } else { &wide[..] };
    magnitudes.iter().flat_map(|&m| [m, -m]).chain([0.0]).collect()
}

fn rounded(values: &[f64], dtype: DType, shape: &[usize]) -> Result<Tensor> {
    Tensor::from_slice(values, shape)?.cast(dtype)
}

/// The result and the gradients of a method, for an incoming gradient of ones.
fn run(mesh: &DeviceMesh, method: &Method, ins: &[Tensor], layout: &Layout) -> Result<Vec<Tensor>> {
    let leaf = |x: &Tensor| DTensor::distribute(mesh, x, layout.clone())?.requires_grad();
    let xs = ins.iter().map(leaf).collect::<Result<Vec<_>>>()?;
    let mut y = (method.run)(&xs)?;
    let mut all = vec![y.full_tensor()?];
    // Ones are a direction along which softmaxes and norms do not change.
    let weight = |i: usize| if xs[0].shape().len() > 1 { [1.0, -0.5, 0.25, 2.0, 1.0][i % 5] } else { 1.0 };
    let weights: Vec<f64> = (0..y.shape().numel()).map(weight).collect();
    let dy = Tensor::from_slice(&weights, y.shape().clone())?.cast(y.dtype())?;
    let gradients = y.backward_from(DTensor::distribute(mesh, &dy, layout.clone())?)?;
    for x in &xs {
        all.push(match gradients.get(x) {
            Some(g) => g.full_tensor()?,
            None => Tensor::zeros(x.dtype(), x.shape()),
        });
    }
    Ok(all)
}

fn wrong(got: f64, want: f64, dtype: DType, slack: f64) -> bool {
    let (least, largest, relative) = range(dtype);
    if want.is_nan() {
        return false;
    }
    if want.abs() > largest * (1.0 - relative) {
        return got.is_nan() || got.abs() < largest * (1.0 - 2.0 * relative) || got.signum() != want.signum();
    }
    let allowed = (want.abs() * relative).max(least) + slack;
    got.is_nan() || (got - want).abs() > allowed
}

fn check(
    method: &Method,
    dtype: DType,
    mesh: &DeviceMesh,
    lists: &[Vec<f64>],
    shape: &[usize],
    found: &mut Vec<String>,
) -> Result<()> {
    let layout = Layout::replicated(1);
    let narrow = lists.iter().map(|l| rounded(l, dtype, shape)).collect::<Result<Vec<_>>>()?;
    let wide = narrow.iter().map(|x| x.cast(DType::F64)).collect::<Result<Vec<_>>>()?;
    let got =
        run(mesh, method, &narrow, &layout).map_err(|e| Error::other(format!("{}: {e}", method.name)))?;
    let want = run(mesh, method, &wide, &layout)?;
    let operands: Vec<Vec<f64>> = wide.iter().map(Tensor::to_f64_vec).collect();
    let results = want[0].to_f64_vec();
    let width = shape.get(1).copied().unwrap_or(1);
    for (k, (got, want)) in got.iter().zip(&want).enumerate() {
        let (got, want) = (got.to_f64_vec(), want.to_f64_vec());
        let is_bad = |&i: &usize| {
            let row = i * shape[0] / got.len();
            let at = operands.iter().flat_map(|x| &x[row * width..(row + 1) * width]);
            let most = at.clone().fold(1.0f64, |m, v| m.max(v.abs()));
            let (least, largest, _) = range(dtype);
            // A subnormal operand or result is already rounded, and nothing follows from one that overflows.
            let rounded = |v: f64| v != 0.0 && v.abs() < least || v.abs() > largest;
            let result = results[i * results.len() / got.len()];
            if k > 0 && (result.is_nan() || result.abs() > largest) {
                return false;
            }
            let skips = at.clone().any(|v| rounded(*v)) || k > 0 && rounded(result);
            let slack = |names: &[&str], of: f64| {
                if names.contains(&method.name) { 8.0 * epsilon(dtype) * of } else { 0.0 }
            };
            let slack = slack(&CANCELS, 1.0).max(slack(&CANCELS_OPERANDS, most));
            if skips {
                !got[i].is_finite() && want[i].abs() < 0.1 * largest
            } else {
                wrong(got[i], want[i], dtype, slack)
            }
        };
        let bad: Vec<usize> = (0..got.len()).filter(is_bad).collect();
        if bad.is_empty() {
            continue;
        }
        let part = if k == 0 { "result".to_string() } else { format!("gradient {k}") };
        let show = |i: &usize| {
            let row = *i * shape[0] / got.len();
            let at: Vec<String> = wide
                .iter()
                .map(|x| format!("{:?}", &x.to_f64_vec()[row * width..(row + 1) * width]))
                .collect();
            format!("f({}) = {:.3e} not {:.3e}", at.join(", "), got[*i], want[*i])
        };
        let shown: Vec<String> = bad.iter().take(3).chain(bad.iter().rev().take(2)).map(show).collect();
        found.push(format!(
            "{} {dtype} {part}: {} of {}: {}",
            method.name,
            bad.len(),
            got.len(),
            shown.join("; ")
        ));
    }
    Ok(())
}

#[test]
fn methods_of_vectors_give_what_f64_gives() {
    spmd(1, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 1)])?;
        let mut found: Vec<String> = Vec::new();
        for method in VECTORS {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                // Its norms are rounded to the dtype before the division.
                if method.name == "weight_norm" && dtype != DType::F32 {
                    continue;
                }
                let range = RANGES.iter().find(|(name, ..)| *name == method.name);
                let (least, most) = range.map_or((0.0, f64::MAX), |&(_, least, most, _)| (least, most));
                let fits =
                    |m: &f64| dtype == DType::F16 && *m < 1e4 && *m > 1e-4 || (least..=most).contains(m);
                let magnitudes: Vec<f64> = inputs(dtype)
                    .into_iter()
                    .filter(|m| *m > 0.0)
                    .map(|m| {
                        if m > 1e38 {
                            m / 4.5
                        } else if m == 6e4 {
                            1.5e4
                        } else {
                            m
                        }
                    })
                    .filter(fits)
                    .collect();
                let rows: Vec<Vec<f64>> = magnitudes
                    .iter()
                    .flat_map(|m| PATTERNS.iter().map(move |p| p.iter().map(|v| v * m).collect()))
                    .collect();
                let lists: Vec<Vec<f64>> = match method.arity {
                    1 => vec![rows.concat()],
                    _ => {
                        let few: Vec<&Vec<f64>> = rows.iter().step_by(3).collect();
                        let pairs: Vec<(&Vec<f64>, &Vec<f64>)> =
                            few.iter().flat_map(|a| few.iter().map(move |b| (*a, *b))).collect();
                        vec![
                            pairs.iter().flat_map(|p| p.0.clone()).collect(),
                            pairs.iter().flat_map(|p| p.1.clone()).collect(),
                        ]
                    }
                };
                let n = lists[0].len() / 4;
                check(method, dtype, &mesh, &lists, &[n, 4], &mut found)?;
            }
        }
        assert!(found.is_empty(), "\n{}", found.join("\n"));
        Ok(())
    })
    .unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn elementwise_methods_give_what_f64_gives() {
    spmd(1, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 1)])?;
        let mut found: Vec<String> = Vec::new();
        for method in ELEMENTWISE {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let each = inputs(dtype);
                let lists: Vec<Vec<f64>> = match method.arity {
                    1 => vec![each.clone()],
                    _ => {
                        let pairs: Vec<(f64, f64)> =
                            each.iter().flat_map(|&a| each.iter().map(move |&b| (a, b))).collect();
                        vec![pairs.iter().map(|p| p.0).collect(), pairs.iter().map(|p| p.1).collect()]
                    }
                };
                let n = lists[0].len();
                check(method, dtype, &mesh, &lists, &[n], &mut found)?;
            }
        }
        assert!(found.is_empty(), "{}", found.join("\n"));
        Ok(())
    })
    .unwrap_or_else(|e| panic!("{e}"));
}

/// The standard deviation over a sharded dim, and its gradient.
fn deviation(mesh: &DeviceMesh, x: &Tensor, layout: &str) -> Result<[Vec<f64>; 2]> {
    let x = DTensor::distribute(mesh, x, layout)?.requires_grad()?;
    let y = x.std(&[0], 1, false)?;
    let gradient = y.sum_all()?.backward()?.take(&x).expect("x is a leaf");
    Ok([y.full_tensor()?.to_f64_vec(), gradient.full_tensor()?.to_f64_vec()])
}

/// Scaling by a power of two changes no bit of a standard deviation but its exponent, on every mesh, up to both ends of the
/// range. So ordinary inputs keep the bits that they had before extreme ones were scaled.
#[test]
fn a_standard_deviation_is_scaled_by_powers_of_two_alone() {
    const ONES: [f64; 6] = [1.0, 2.25, -3.5, 4.125, 0.875, 1.5];
    let run = |ranks: usize| {
        move |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
            let mut all = Vec::new();
            for (dtype, exponents) in [
                (DType::F64, [-1030, -600, -451, 0, 449, 600, 1020].as_slice()),
                (DType::F32, &[-130, -100, -40, -20, 0, 20, 31, 60, 100, 124]),
                (DType::BF16, &[-120, -100, -40, 0, 31, 60, 100, 124]),
            ] {
                let at = |exponent: i32| {
                    // Two factors: the power itself may be beyond the largest number.
                    let half = 2f64.powi(exponent / 2);
                    let whole: Vec<f64> =
                        ONES.iter().map(|x| x * half * 2f64.powi(exponent - exponent / 2)).collect();
                    deviation(&mesh, &Tensor::from_vec(whole, [6])?.cast(dtype)?, "(S0)")
                };
                let [one, slope] = at(0)?;
                for &exponent in exponents {
                    let [scaled, same] = at(exponent)?;
                    let back = scaled[0] * 2f64.powi(-exponent / 2) * 2f64.powi(exponent / 2 - exponent);
                    let digits =
                        if exponent < -1022 || dtype != DType::F64 && exponent < -126 { 1e-3 } else { 0.0 };
                    assert!(
                        (back - one[0]).abs() <= digits * one[0],
                        "{dtype} 2^{exponent}: {back} for {one:?}"
                    );
                    let is_near = |(a, b): (&f64, &f64)| (a - b).abs() <= digits;
                    assert!(
                        same.iter().zip(&slope).all(is_near),
                        "{dtype} 2^{exponent}: {same:?} for {slope:?}"
                    );
                    all.push((scaled, same));
                }
            }
            Ok(all)
        }
    };
    let one = spmd(1, run(1)).unwrap_or_else(|e| panic!("{e}"));
    for ranks in [2, 3, 4] {
        let many = spmd(ranks, run(ranks)).unwrap_or_else(|e| panic!("{e}"));
        assert!(many.iter().all(|all| *all == one[0]), "{ranks} ranks");
    }
}

#[test]
fn a_standard_deviation_of_huge_and_of_tiny_numbers() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        for scale in [1e20, 1e-25, 1e37, 1e-37] {
            let x = Tensor::from_vec([1.0f32, 2.0, 3.0, 4.0].map(|x| x * scale).to_vec(), [4])?;
            let [y, dx] = deviation(&mesh, &x, "(S0)")?;
            assert!((y[0] / f64::from(scale) - 1.2909944).abs() < 1e-6, "{y:?}");
            let want = [-1.5, -0.5, 0.5, 1.5].map(|d| d / 3.0 / 1.2909944);
            assert!(dx.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6), "{dx:?}");
        }
        // Zero and infinite elements, and no elements at all, as before.
        let of = |x: &[f32]| deviation(&mesh, &Tensor::from_slice(x, [x.len()])?, "(S0)");
        assert_eq!(of(&[0.0, 0.0])?, [vec![0.0], vec![0.0, 0.0]]);
        assert!(of(&[f32::INFINITY, 1.0])?[0][0].is_nan() && of(&[])?[0][0].is_nan());
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

/// The gradient of `bce_loss` by every logit is finite, with weights too, and that of `bce_with_logits_loss` is right.
#[test]
fn binary_losses_have_finite_gradients() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let logits: Vec<f64> =
                (-2200..=2200).map(|i| f64::from(i) / 20.0).chain([-1e4, 1e4, -800.0, 800.0]).collect();
            let n = logits.len();
            let x = DTensor::distribute(&mesh, &Tensor::from_vec(logits, [n])?.cast(dtype)?, "(S0)")?;
            let x = x.requires_grad()?;
            for target in [0.0, 0.25, 1.0] {
                let target = DTensor::full(&mesh, dtype, [n], "(S0)", target)?;
                let weight =
                    DTensor::full(&mesh, dtype, [n], "(S0)", if dtype == DType::F16 { 1.0 } else { 1000.0 })?;
                let options =
                    BinaryLossOptions { reduction: NONE, pos_weight: Some(&weight), ..Default::default() };
                let p = x.sigmoid()?;
                let leaf = p.detach().requires_grad()?;
                for (loss, by) in
                    [(p.bce_loss(&target, &options)?, &x), (leaf.bce_loss(&target, &options)?, &leaf)]
                {
                    let mut loss = loss.cast(DType::F64)?.sum_all()?;
                    let gradient = loss.backward()?.take(by).expect("a leaf").full_tensor()?;
                    let bad = gradient.to_f64_vec().iter().position(|g| !g.is_finite());
                    assert_eq!(bad, None, "{dtype}");
                }
                let exact = x.bce_with_logits_loss(
                    &target,
                    &BinaryLossOptions { reduction: NONE, ..Default::default() },
                )?;
                let gradient =
                    exact.cast(DType::F64)?.sum_all()?.backward()?.take(&x).expect("a leaf").full_tensor()?;
                let (t, tolerance) = (target.full_tensor()?.to_f64_vec()[0], 4.0 * epsilon(dtype));
                for (x, g) in x.full_tensor()?.to_f64_vec().iter().zip(gradient.to_f64_vec()) {
                    let want = 1.0 / (1.0 + (-x).exp()) - t;
                    assert!((g - want).abs() <= tolerance, "{dtype} at {x}: {g} not {want}");
                }
            }
            // The gradient by a logit is right if the bound of the slope is not reached.
            let x = DTensor::full(&mesh, dtype, [1], "(R)", -9.0)?.requires_grad()?;
            let one = DTensor::full(&mesh, dtype, [1], "(R)", 1.0)?;
            let mut loss = x.sigmoid()?.bce_loss(&one, &BinaryLossOptions::default())?;
            let gradient = loss.backward()?.take(&x).expect("a leaf").item()?;
            assert!((gradient + 1.0).abs() < 0.02, "{dtype}: {gradient}");
        }
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

/// Losses of a router that no token has reached are 0, with zero gradients.
#[test]
fn losses_of_no_tokens_are_zero() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let none = DTensor::zeros(&mesh, DType::F32, [0, 4], "(S0)")?.requires_grad()?;
        let some = DTensor::full(&mesh, DType::F32, [3, 4], "(S0)", 0.25)?.requires_grad()?;
        let counts = DTensor::zeros(&mesh, DType::I64, [4], "(R)")?;
        for x in [&none, &some] {
            let mut loss = x.load_balancing_loss(&counts)?;
            assert_eq!(loss.item()?, 0.0);
            let gradient = loss.backward()?.take(x).expect("a leaf").full_tensor()?;
            assert!(gradient.to_f64_vec().iter().all(|g| *g == 0.0));
        }
        assert_eq!(none.router_z_loss()?.item()?, 0.0);
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

/// Writes `docs/ranges.md` if `ISOSHARD_BLESS` is set, and compares it otherwise.
#[test]
fn the_page_of_ranges_is_up_to_date() {
    let names = |methods: &[Method]| {
        let all: Vec<String> = methods.iter().map(|m| format!("`{}`", m.name)).collect();
        all.join(", ")
    };
    let row = |(name, least, most, why): &(&str, f64, f64, &str)| {
        format!("| `{name}` | {least:e} | {most:e} | {why} |\n")
    };
    let rows: String = RANGES.iter().map(row).collect();
    let page = PAGE
        .replace("{elementwise}", &names(ELEMENTWISE))
        .replace("{vectors}", &names(VECTORS))
        .replace("{rows}", &rows);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/ranges.md");
    if std::env::var_os("ISOSHARD_BLESS").is_some() {
        std::fs::write(path, &page).expect("the page can be written");
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    assert!(kept == page, "run with ISOSHARD_BLESS=1");
}

const PAGE: &str = "\
# Ranges of methods

*Written by `tests/suite/extremes.rs`: `ISOSHARD_BLESS=1 cargo test --test suite extremes::` writes it.*

A formula may overflow or underflow on the way to a result that does not. The test runs each method below in f32, bf16 and f16 on
numbers up to both ends of the dtype, and compares results and gradients with the same method in f64: within a relative error of
1e-3 in f32, 0.1 in bf16 and 0.02 in f16, or as far as the last step cancels. It leaves out subnormal operands and results, which
are rounded already (they must not become infinite or NaN), and gradients of results that overflow.

Right for all normal numbers, element by element: {elementwise}.

Right for vectors of all normal numbers, but for the rows of the table: {vectors}.

In f32 and bf16 these methods are right if the magnitudes of elements lie between two numbers (for vectors of four elements; f64 has
about the square of these ranges, f16 computes in f32 and is in range):

| method | least | largest | reason |
|---|---|---|---|
{rows}
Beyond them a variance is infinite, a norm's results are 0, infinite or NaN, as in PyTorch. `std` and `norm` have no such range:
they scale extreme elements by a power of two. Layer norm and RMS norm with an epsilon are right for small elements too.

`bce_loss` of a probability `p` has the slope `1 / max(p, e)`, with `e = 2^-100` in f32 and bf16 and `2^-14` in f16, so that its
gradient is finite for every `p`. Losses of logits (`bce_with_logits_loss`, `cross_entropy`) need no such bound. The gradient of
`log10` in f16 is infinite below 1.5e-5, where the first of its two steps overflows.
";
