//! The errors and special values of mathematical functions, and the page that states them.

use std::fmt::Write;

use isoshard::ops::{
    Digamma, Elu, LogSigmoid, Logaddexp, Logit, Mish, Op, PowScalar, Softplus, Xlog1py, Xlogy,
};
use isoshard::tensor::DType;
use isoshard_kernels::math::{erfc, exp, inverse_trig, log, power, short};

#[path = "../common/accuracy.rs"]
mod accuracy;

use accuracy::{LargestError, largest_f64, largest_narrow, operator, references, results, ulps};

/// The largest error in f64 that each function may have, and in f32 for those with a sequence of their own; all others
/// are computed in f64 and rounded, to 0.51 ulp.
const BOUNDS: [(&str, f64, f64); 42] = [
    ("sin", 0.8, 0.8),
    ("cos", 0.8, 0.8),
    ("tan", 1.6, 2.4),
    ("asin", 1.1, 0.51),
    ("acos", 1.1, 0.51),
    ("atan", 0.8, 0.51),
    ("sinh", 0.8, 0.51),
    ("cosh", 0.8, 0.51),
    ("tanh", 2.5, 2.5),
    ("asinh", 0.8, 0.51),
    ("acosh", 0.8, 0.51),
    ("atanh", 1.0, 2.0),
    ("exp", 1.1, 1.1),
    ("exp2", 0.6, 1.0),
    ("expm1", 0.8, 1.7),
    ("ln", 1.0, 1.0),
    ("ln_1p", 0.8, 1.0),
    ("log2", 0.7, 1.0),
    ("log10", 0.7, 1.0),
    ("sigmoid", 2.5, 2.5),
    ("erf", 1.0, 1.5),
    ("erfc", 0.9, 0.51),
    ("erfinv", 1.8, 0.51),
    // Near zeros; `the_gamma_functions_near_their_zeros` has the absolute bounds.
    ("lgamma", 4.0, 0.51),
    ("digamma", 20.0, 0.51),
    ("cbrt", 0.7, 0.51),
    ("atan2", 1.2, 0.51),
    ("pow", 0.6, 0.51),
    ("trigamma", 5.0, 0.51),
    ("sinc", 2.0, 0.51),
    ("rsqrt", 1.5, 1.5),
    ("softplus", 1.1, 1.7),
    ("log_sigmoid", 1.1, 1.7),
    ("logit", 2.8, 2.8),
    // e^x is subnormal where the errors of mish and silu are largest.
    ("mish", 300.0, 0.51),
    ("elu", 1.1, 1.8),
    ("tanhshrink", 5.0, 0.51),
    ("silu", 3.0, 60.0),
    ("hypot", 2.0, 2.0),
    ("logaddexp", 1.5, 0.51),
    ("xlogy", 1.5, 1.6),
    ("xlog1py", 1.5, 0.51),
];

/// One f32 in 4,001 misses the ends of ranges, which are few numbers: those between 255/256 and 1 are all compared.
#[test]
fn short_forms_are_as_near_as_they_state() {
    type Form = fn(f64) -> f64;
    let forms: [(&str, Form, Form, i32); 7] = [
        ("exp", short::exp_short, exp::exp_f64, -39),
        ("ln", short::ln_short, log::ln_f64, -39),
        ("asin", short::asin_short, inverse_trig::asin_f64, -39),
        ("acos", short::acos_short, inverse_trig::acos_f64, -39),
        ("atan", short::atan_short, inverse_trig::atan_f64, -39),
        ("erfc", short::erfc_short, erfc::erfc_f64, -34),
        ("erfinv", short::erfinv_short, erfc::erfinv_f64, -34),
    ];
    let near = |name: &str, x: &[f64], got: f64, want: f64, bound: i32| {
        let normal = f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX);
        let fine = match normal.contains(&want.abs()) {
            true => (got / want - 1.0).abs() < 2f64.powi(bound),
            false => got as f32 == want as f32 || (got.is_nan() && want.is_nan()),
        };
        assert!(fine, "{name} of {x:?} is {got}, not {want} to 2^{bound}");
    };
    let below_one = (1.0f32 - 1.0 / 256.0).to_bits()..=1.0f32.to_bits();
    for bits in (0..=u32::MAX).step_by(4001).chain(below_one.clone()).chain(below_one.map(|b| b | 1 << 31)) {
        let x = f64::from(f32::from_bits(bits));
        for (name, form, whole, bound) in forms {
            near(name, &[x], form(x), whole(x), bound);
        }
        // Exponents up to about 100 and -100 and, for these bases, powers over all of f32's range.
        let y = f64::from((bits % 20_011) as f32 - 10_005.0) / 100.0;
        let a = x.abs();
        near("pow_abs", &[a, y], short::pow_abs_short(a, y), power::pow_abs_f64(a, y), -34);
    }
}

#[test]
fn errors_are_within_their_bounds_and_the_page_is_up_to_date() {
    let (mut page, mut wrong) = (String::from(HEAD), Vec::new());
    let references = references();
    assert_eq!(references.iter().map(|r| &*r.name).collect::<Vec<_>>(), BOUNDS.map(|b| b.0));
    for (reference, (name, in_f64, in_f32)) in references.iter().zip(BOUNDS) {
        let arity = reference.operands.len();
        let wide = largest_f64(reference);
        let narrow = [DType::F32, DType::F16, DType::BF16].map(|dtype| largest_narrow(name, arity, dtype));
        // Functions with a sequence of their own in f32 are rounded twice.
        let in_half = if in_f32 == 0.51 { 0.5 } else { 0.51 };
        let [narrow_f32, narrow_f16, narrow_bf16] = &narrow;
        let bounds = [
            ("f64", &wide, in_f64),
            ("f32", narrow_f32, in_f32),
            ("f16", narrow_f16, in_half),
            ("bf16", narrow_bf16, in_half),
        ];
        for (dtype, LargestError { ulps, at }, _) in bounds.iter().filter(|b| b.1.ulps > b.2) {
            wrong.push(format!("{name} in {dtype}: {ulps} ulp at {at:?}"));
        }
        let op = operator(name);
        let cell = |e: &LargestError| match arity {
            1 => format!("{:.2} at {:.4e}", e.ulps, e.at[0]),
            _ => format!("{:.2} at {:.4e}, {:.4e}", e.ulps, e.at[0], e.at[1]),
        };
        let specials = match arity {
            1 => results(&*op, DType::F64, &[SPECIALS.to_vec()])
                .iter()
                .map(|&y| short(y))
                .collect::<Vec<_>>()
                .join(", "),
            _ if matches!(name, "atan2" | "pow") => "IEEE 754".into(),
            _ => "its documentation".into(),
        };
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {:.2} | {:.2} | {specials} |",
            op.name(),
            cell(&wide),
            cell(&narrow[0]),
            narrow[1].ulps,
            narrow[2].ulps,
        );
    }
    assert!(wrong.is_empty(), "beyond their bounds:\n{}", wrong.join("\n"));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/functions.md");
    if std::env::var_os("ISOSHARD_BLESS").is_some() {
        std::fs::write(path, &page).expect("the page can be written");
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    let differs = kept.lines().zip(page.lines()).find(|(a, b)| a != b);
    assert!(kept == page, "run with ISOSHARD_BLESS=1; the first line that differs: {differs:?}");
}

const SPECIALS: [f64; 6] = [f64::NEG_INFINITY, -1.0, -0.0, 0.0, 1.0, f64::INFINITY];

const HEAD: &str = "# Errors of mathematical functions\n\n\
*Written by `tests/suite/functions.rs`: `ISOSHARD_BLESS=1 cargo test --test suite functions::` writes it.*\n\n\
The largest errors found, in units in the last place (ulp) of the exact result. f64 is compared with values that\n\
mpmath computed (`tests/reference/functions.py`: 170 to 600 points per function, near critical points and over all\n\
exponents); f32 with one number in 4,001, f16 and bf16 with every number, against the function in f64. Results have the\n\
same bits on every CPU, instruction set and device. The last column has the values at -inf, -1, -0, 0, 1 and inf.\n\n\
The functions with an error of 0.50 ulp in f32 are computed in f64 for every dtype and rounded once, some of them by shorter\n\
polynomials than f64's own results (`isoshard_kernels::math::short`). Near zeros of `lgamma` and `digamma` two terms\n\
cancel; the absolute error there is below 2.5e-16 for positive arguments, and 4e-16 times the cancelled terms for\n\
negative ones. `logaddexp` cancels likewise near its zeros, which the points leave out.\n\
`mish` and `silu` multiply `x` by an exponential, whose error counts `x` times where it is subnormal.\n\n\
| operator | f64: ulp | f32: ulp | f16 | bf16 | special values |\n|---|---|---|---|---|---|\n";

fn short(y: f64) -> String {
    let text = format!("{y:.4}");
    match y {
        _ if y == 0.0 || !y.is_finite() => format!("{y}"),
        _ if y.fract() == 0.0 => format!("{y}"),
        _ => text,
    }
}

#[test]
fn the_gamma_functions_near_their_zeros() {
    for reference in references().iter().filter(|r| matches!(&*r.name, "lgamma" | "digamma")) {
        let op = operator(&reference.name);
        let x = &reference.operands[0];
        let got = results(&*op, DType::F64, &reference.operands);
        let mirrored: Vec<f64> =
            x.iter().map(|x| if reference.name == "lgamma" { -x } else { 1.0 - x }).collect();
        let terms = results(&*op, DType::F64, &[mirrored]);
        for (i, &y) in got.iter().enumerate() {
            let error = ulps(DType::F64, y, reference.nearest[i], reference.rest[i]);
            let absolute = (y - reference.nearest[i]).abs();
            let allowed = if x[i] > 0.0 { 2.5e-16 } else { 4e-16 * (1.0 + terms[i].abs() + y.abs()) };
            assert!(
                error <= 2.0 || absolute <= allowed,
                "{} at {}: {error} ulp, {absolute:e}",
                reference.name,
                x[i]
            );
        }
    }
}

#[test]
fn subnormals_of_f32_are_kept_near_zero() {
    for name in ["expm1", "ln_1p", "sin", "tan", "atanh"] {
        let x: Vec<f64> =
            (1..9).flat_map(|n| [1.0, -1.0].map(|s| s * f64::from(f32::from_bits(n)))).collect();
        assert_eq!(results(&*operator(name), DType::F32, std::slice::from_ref(&x)), x, "{name}");
    }
}

#[test]
fn powers_of_two_and_ten_are_exact_in_f32() {
    let at = |name, x: f64| results(&*operator(name), DType::F32, &[vec![x]])[0];
    for k in -149..128 {
        let power = 2f64.powi(k);
        assert_eq!((at("log2", power), at("exp2", f64::from(k))), (f64::from(k), power));
    }
    for k in 0..=10 {
        assert_eq!(at("log10", 10f64.powi(k)), f64::from(k));
    }
}

/// The C library follows C99's annex F.
#[test]
fn special_values_are_those_of_the_c_library() {
    let x = [
        0.0,
        -0.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        1.0,
        -1.0,
        2.0,
        -2.0,
        5e-324,
        -5e-324,
        1e308,
        -1e308,
    ];
    type Case = (&'static str, fn(f64) -> f64);
    let cases: [Case; 20] = [
        ("sin", f64::sin),
        ("cos", f64::cos),
        ("tan", f64::tan),
        ("asin", f64::asin),
        ("acos", f64::acos),
        ("atan", f64::atan),
        ("sinh", f64::sinh),
        ("cosh", f64::cosh),
        ("tanh", f64::tanh),
        ("asinh", f64::asinh),
        ("acosh", f64::acosh),
        ("atanh", f64::atanh),
        ("exp", f64::exp),
        ("exp2", f64::exp2),
        ("expm1", f64::exp_m1),
        ("ln", f64::ln),
        ("ln_1p", f64::ln_1p),
        ("log2", f64::log2),
        ("log10", f64::log10),
        ("cbrt", f64::cbrt),
    ];
    for (name, library) in cases {
        for (x, y) in x.iter().zip(results(&*operator(name), DType::F64, &[x.to_vec()])) {
            let want = library(*x);
            let near = (y - want).abs() <= 4.0 * f64::EPSILON * want.abs()
                && y.is_sign_negative() == want.is_sign_negative();
            assert!(
                near || y.to_bits() == want.to_bits() || (y.is_nan() && want.is_nan()),
                "{name} {x} is {y}, not {want}"
            );
        }
    }
    for (i, y) in x.iter().enumerate() {
        let got = results(&*operator("atan2"), DType::F64, &[vec![*y; x.len()], x.to_vec()]);
        for (x, z) in x.iter().zip(got) {
            let want = y.atan2(*x);
            let near =
                (z - want).abs() <= 1e-15 * want.abs() && z.is_sign_negative() == want.is_sign_negative();
            assert!(near || (z.is_nan() && want.is_nan()), "{i}: atan2({y}, {x}) is {z}, not {want}");
        }
    }
}

#[test]
fn special_values_that_the_c_library_lacks() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let same = |name: &str, x: &[f64], want: &[f64]| {
        let got = results(&*operator(name), DType::F64, &[x.to_vec()]);
        for ((x, got), want) in x.iter().zip(got).zip(want) {
            assert!(
                got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
                "{name} {x} is {got}"
            );
        }
    };
    same("erfc", &[0.0, -0.0, inf, -inf, nan, 30.0, -7.0], &[1.0, 1.0, 0.0, 2.0, nan, 0.0, 2.0]);
    same("erfinv", &[0.0, -0.0, 1.0, -1.0, 1.5, nan, -inf], &[0.0, -0.0, inf, -inf, nan, nan, nan]);
    same(
        "lgamma",
        &[0.0, -0.0, 1.0, 2.0, -3.0, inf, -inf, nan, 1e306],
        &[inf, inf, 0.0, 0.0, inf, inf, inf, nan, inf],
    );
    same("digamma", &[0.0, -0.0, -2.0, inf, nan], &[-inf, inf, nan, inf, nan]);
}

#[test]
fn functions_of_functions_have_their_limits() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let check = |op: &dyn Op, operands: &[&[f64]], want: &[f64]| {
        let operands: Vec<Vec<f64>> = operands.iter().map(|x| x.to_vec()).collect();
        for (i, (got, want)) in results(op, DType::F64, &operands).into_iter().zip(want).enumerate() {
            let near = (got - want).abs() <= 4e-16 * want.abs();
            assert!(
                near || got == *want || (got.is_nan() && want.is_nan()),
                "{op:?}, element {i}: {got}, not {want}"
            );
        }
    };
    let points = [-inf, -1e300, -1.0, 0.0, 1.0, 1e300, inf, nan];
    let (low, high) = (0.31326168751822286, 1.3132616875182228);
    check(&Softplus, &[&points], &[0.0, 0.0, low, 2f64.ln(), high, 1e300, inf, nan]);
    check(&LogSigmoid, &[&points], &[-inf, -1e300, -high, -(2f64.ln()), -low, 0.0, 0.0, nan]);
    check(&Mish, &[&points], &[0.0, 0.0, -0.30340146137410895, 0.0, 0.8650983882673103, 1e300, inf, nan]);
    check(&Elu::by(2.0), &[&points], &[-2.0, -2.0, -1.2642411176571153, 0.0, 1.0, 1e300, inf, nan]);
    check(
        &Logit,
        &[&[0.0, 0.1, 0.5, 0.9, 1.0, -0.1, 1.1, nan]],
        &[-inf, -2.197224577336219, 0.0, 2.1972245773362196, inf, nan, nan, nan],
    );
    check(&Xlogy, &[&[0.0, 0.0, 0.0, 2.0], &[0.0, inf, nan, 0.0]], &[0.0, 0.0, nan, -inf]);
    check(&Xlog1py, &[&[0.0, 0.0, 0.0, 2.0], &[-1.0, inf, nan, 1e-20]], &[0.0, 0.0, nan, 2e-20]);
    check(
        &Logaddexp,
        &[&[inf, -inf, -inf, 1000.0, 0.0], &[inf, -inf, 3.0, 1000.0, nan]],
        &[inf, -inf, 3.0, 1000.0 + 2f64.ln(), nan],
    );
    assert!(Digamma.name() == "digamma");
}

/// The seventh power was off by 51 ulp as `e^(7 ln x)`.
#[test]
fn powers_with_a_constant_exponent_are_within_an_ulp() {
    let references = references();
    let pow = references.iter().find(|r| r.name == "pow").expect("pow has reference values");
    let chosen: Vec<usize> = (0..pow.nearest.len()).filter(|&i| pow.operands[1][i] == 7.0).collect();
    assert!(chosen.len() > 50);
    let x: Vec<f64> = chosen.iter().map(|&i| pow.operands[0][i]).collect();
    for (got, &i) in results(&PowScalar::to(7.0), DType::F64, &[x]).into_iter().zip(&chosen) {
        let error = ulps(DType::F64, got, pow.nearest[i], pow.rest[i]);
        assert!(error <= 0.6, "{}^7: {error} ulp", pow.operands[0][i]);
    }
}
