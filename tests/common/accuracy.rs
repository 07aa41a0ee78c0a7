//! The errors of mathematical functions in units in the last place (ulp), against values that
//! `tests/reference/functions.py` computed with mpmath. `tests/suite/functions.rs` and `benches/accuracy.rs` share it.

use std::sync::Arc;

use half::{bf16, f16};
use isoshard::ops::*;
use isoshard::tensor::{DType, Tensor, cpu::cast};

/// Operands of one function and its exact results.
pub struct Reference {
    pub name: String,
    /// One list per operand.
    pub operands: Vec<Vec<f64>>,
    pub nearest: Vec<f64>,
    /// The exact result minus the nearest one, in ulp.
    pub rest: Vec<f64>,
}

/// The largest error of a function in one dtype.
#[derive(Clone, Copy, Default)]
pub struct LargestError {
    pub ulps: f64,
    pub at: [f64; 2],
}

/// Returns the reference values of every function.
pub fn references() -> Vec<Reference> {
    let bytes = include_bytes!("../reference/functions.bin");
    let (mut at, mut all) = (0, Vec::new());
    while at < bytes.len() {
        let name = bytes[at..at + 12].iter().take_while(|&&b| b != 0).map(|&b| char::from(b)).collect();
        let number =
            |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
        let (arity, points) = (number(at + 12), number(at + 16));
        at += 20;
        let float = |at: usize| f64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let mut one = Reference { name, operands: vec![Vec::new(); arity], nearest: vec![], rest: vec![] };
        for _ in 0..points {
            for k in 0..arity {
                one.operands[k].push(float(at + 8 * k));
            }
            one.nearest.push(float(at + 8 * arity));
            one.rest.push(f64::from(bytes[at + 8 * arity + 8] as i8) / 250.0);
            at += 8 * arity + 9;
        }
        all.push(one);
    }
    all
}

/// Returns the operator of a function of the reference.
pub fn operator(name: &str) -> Arc<dyn Op> {
    match name {
        "sin" => Arc::new(Sin),
        "cos" => Arc::new(Cos),
        "tan" => Arc::new(Tan),
        "asin" => Arc::new(Asin),
        "acos" => Arc::new(Acos),
        "atan" => Arc::new(Atan),
        "atan2" => Arc::new(Atan2),
        "sinh" => Arc::new(Sinh),
        "cosh" => Arc::new(Cosh),
        "tanh" => Arc::new(Tanh),
        "asinh" => Arc::new(Asinh),
        "acosh" => Arc::new(Acosh),
        "atanh" => Arc::new(Atanh),
        "exp" => Arc::new(Exp),
        "exp2" => Arc::new(Exp2),
        "expm1" => Arc::new(Expm1),
        "ln" => Arc::new(Log),
        "ln_1p" => Arc::new(Log1p),
        "log2" => Arc::new(Log2),
        "log10" => Arc::new(Log10),
        "sigmoid" => Arc::new(Sigmoid),
        "erf" => Arc::new(Erf),
        "erfc" => Arc::new(Erfc),
        "erfinv" => Arc::new(Erfinv),
        "lgamma" => Arc::new(Lgamma),
        "digamma" => Arc::new(Digamma),
        "cbrt" => Arc::new(Cbrt),
        "pow" => Arc::new(Pow),
        "trigamma" => Arc::new(Trigamma),
        "sinc" => Arc::new(Sinc),
        "rsqrt" => Arc::new(Rsqrt),
        "softplus" => Arc::new(Softplus),
        "log_sigmoid" => Arc::new(LogSigmoid),
        "logit" => Arc::new(Logit),
        "mish" => Arc::new(Mish),
        "elu" => Arc::new(Elu::by(1.0)),
        "tanhshrink" => Arc::new(Tanhshrink),
        "silu" => Arc::new(Silu),
        "hypot" => Arc::new(Hypot),
        "logaddexp" => Arc::new(Logaddexp),
        "xlogy" => Arc::new(Xlogy),
        "xlog1py" => Arc::new(Xlog1py),
        _ => panic!("{name} has no operator"),
    }
}

/// Returns the operator's results in this dtype, as f64.
pub fn results(op: &dyn Op, dtype: DType, operands: &[Vec<f64>]) -> Vec<f64> {
    let tensor = |v: &Vec<f64>| {
        cast(&Tensor::from_vec(v.clone(), [v.len()]).expect("as many"), dtype).expect("a float dtype")
    };
    let ins: Vec<Tensor> = operands.iter().map(tensor).collect();
    eval_whole(op, &ins).expect("float operands")[0].to_f64_vec()
}

/// Returns the error in units of the dtype's last place at the exact result, which is `nearest + rest` f64 ulps.
pub fn ulps(dtype: DType, got: f64, nearest: f64, rest: f64) -> f64 {
    let (digits, lowest) = match dtype {
        DType::F64 => (53, -1022),
        DType::F32 => (24, -126),
        DType::F16 => (11, -14),
        _ => (8, -126),
    };
    if got.is_nan() || nearest.is_nan() {
        return if got.is_nan() && nearest.is_nan() { 0.0 } else { f64::INFINITY };
    }
    let rounded = match dtype {
        DType::F64 => nearest,
        DType::F32 => f64::from(nearest as f32),
        DType::F16 => f16::from_f64(nearest).to_f64(),
        _ => bf16::from_f64(nearest).to_f64(),
    };
    if got.is_infinite() || nearest.is_infinite() {
        return if got == rounded { 0.0 } else { f64::INFINITY };
    }
    let exponent = |x: f64, lowest: i32| ((x.abs().to_bits() >> 52) as i32 - 1023).max(lowest);
    let unit = |e: i32| 2f64.powi(e / 2) * 2f64.powi(e - e / 2);
    let f64_rest = rest * unit(exponent(nearest, -1022)) * 2f64.powi(-52);
    let (difference, e) = (got - nearest, exponent(nearest, lowest) - (digits - 1));
    // Differences of subnormal f64 are scaled first.
    if dtype == DType::F64 {
        return (difference / unit(exponent(nearest, -1022)) * 2f64.powi(52) - rest).abs();
    }
    (difference - f64_rest).abs() / unit(e)
}

/// Returns the largest error over the reference's points in f64.
pub fn largest_f64(reference: &Reference) -> LargestError {
    let got = results(&*operator(&reference.name), DType::F64, &reference.operands);
    let mut worst = LargestError::default();
    for (i, &y) in got.iter().enumerate() {
        let error = ulps(DType::F64, y, reference.nearest[i], reference.rest[i]);
        if error > worst.ulps {
            let at = [reference.operands[0][i], reference.operands.last().expect("an operand")[i]];
            worst = LargestError { ulps: error, at };
        }
    }
    worst
}

/// Returns the largest error in a narrower dtype, over all its numbers (f16, bf16) or one in 4,001 (f32). The exact
/// value is that of f64. Functions of two operands pair each number with others.
pub fn largest_narrow(name: &str, arity: usize, dtype: DType) -> LargestError {
    let first: Vec<f64> = match dtype {
        DType::F32 => (0..=u32::MAX).step_by(4001).map(|b| f64::from(f32::from_bits(b))).collect(),
        DType::F16 => (0..=u16::MAX).map(|b| f16::from_bits(b).to_f64()).collect(),
        _ => (0..=u16::MAX).map(|b| bf16::from_bits(b).to_f64()).collect(),
    };
    let n = first.len();
    let second: Vec<f64> = (0..n).map(|i| first[(i * 7919 + 1) % n]).collect();
    let operands = &[first, second][..arity];
    let op = operator(name);
    let (got, exact) = (results(&*op, dtype, operands), results(&*op, DType::F64, operands));
    let mut worst = LargestError::default();
    for (i, (&y, &exact)) in got.iter().zip(&exact).enumerate() {
        let error = ulps(dtype, y, exact, 0.0);
        if error > worst.ulps {
            worst = LargestError { ulps: error, at: [operands[0][i], operands[arity - 1][i]] };
        }
    }
    worst
}
