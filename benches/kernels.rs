//! How fast one thread's kernels are: a table, or with `-- --json` one JSON object a line.
//!
//! Elementwise, reducing and row kernels count the bytes they must read and write once, products their floating-point
//! operations. Each value is the best of several runs.

use std::time::Instant;

use isoshard::Result;
use isoshard::tensor::cpu::{self, BinaryN, CausalAttention, Num, Real, UnaryF, UnaryN};
use isoshard::tensor::{DType, ReduceOp, Tensor};

fn main() -> Result<()> {
    let json = std::env::args().any(|a| a == "--json");
    let report = |case: &str, value: f64, unit: &str| {
        if json {
            println!(r#"{{"bench":"kernels","case":"{case}","value":{value:.3},"unit":"{unit}"}}"#);
        } else {
            println!("{case:<28} {value:>9.2} {unit}");
        }
    };
    elementwise(&report)?;
    reductions(&report)?;
    rows(&report)?;
    products(&report)?;
    attention(&report)
}

type Report<'a> = &'a dyn Fn(&str, f64, &str);

#[derive(Clone, Copy)]
struct Add;
impl BinaryN for Add {
    #[inline(always)]
    fn apply<A: Num>(self, x: A, y: A) -> A {
        x.add(y)
    }
}

#[derive(Clone, Copy)]
struct Relu;
impl UnaryN for Relu {
    #[inline(always)]
    fn apply<A: Num>(self, x: A) -> A {
        x.max(A::ZERO)
    }
}

#[derive(Clone, Copy)]
struct Exp;
impl UnaryF for Exp {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        x.exp()
    }
}

#[derive(Clone, Copy)]
struct Gelu;
impl UnaryF for Gelu {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        let half = A::of(0.5) * x;
        half.mul_add((x * A::of(std::f64::consts::FRAC_1_SQRT_2)).erf(), half)
    }
}

#[derive(Clone, Copy)]
struct TanhGelu;
impl UnaryF for TanhGelu {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        let inner = x * (x * x).mul_add(A::of(0.035_677_408_136_300_125), A::of(0.797_884_560_802_865_4));
        let half = A::of(0.5) * x;
        half.mul_add(inner.tanh(), half)
    }
}

fn elementwise(report: Report<'_>) -> Result<()> {
    let (x, y) = (noise([16384, 1024]), noise([16384, 1024]));
    let bytes = x.len_bytes() as f64;
    let bias = noise([1024]).expand([16384, 1024])?;
    let scalar = Tensor::scalar(2.0f32).expand([16384, 1024])?;
    let column = noise([16384, 1]).expand([16384, 1024])?;
    report("add", rate(3.0 * bytes, || cpu::num_binary("add", &x, &y, Add)), "GB/s");
    report("add bias", rate(2.0 * bytes, || cpu::num_binary("add", &x, &bias, Add)), "GB/s");
    report("add column", rate(2.0 * bytes, || cpu::num_binary("add", &x, &column, Add)), "GB/s");
    report("add scalar", rate(2.0 * bytes, || cpu::num_binary("add", &x, &scalar, Add)), "GB/s");
    let mut acc = y.to_owned_copy();
    report("add in place", rate(3.0 * bytes, || cpu::num_binary_mut("add", &mut acc, &x, Add)), "GB/s");
    report("add transposed", rate(3.0 * bytes, || cpu::num_binary("add", &x, &turned(&y), Add)), "GB/s");
    report("relu", rate(2.0 * bytes, || cpu::num_unary("relu", &x, Relu)), "GB/s");
    report("exp", rate(2.0 * bytes, || cpu::float_unary("exp", &x, Exp)), "GB/s");
    report("gelu", rate(2.0 * bytes, || cpu::float_unary("gelu", &x, Gelu)), "GB/s");
    report("gelu tanh", rate(2.0 * bytes, || cpu::float_unary("gelu", &x, TanhGelu)), "GB/s");
    let half = cpu::cast(&x, DType::BF16)?;
    report("gelu bf16", rate(bytes, || cpu::float_unary("gelu", &half, Gelu)), "GB/s");
    report("cast f32 to bf16", rate(1.5 * bytes, || cpu::cast(&x, DType::BF16)), "GB/s");
    let (small_x, small_y) = (noise([64]), noise([64]));
    let calls =
        rate(1e9, || (0..1000).try_for_each(|_| cpu::num_binary("add", &small_x, &small_y, Add).map(drop)));
    report("add 64 elements", 1e6 / calls, "ns");
    Ok(())
}

fn reductions(report: Report<'_>) -> Result<()> {
    for (label, shape) in [("", [16384, 1024]), (" 16777 x 1000", [16777, 1000])] {
        let x = noise(shape);
        let bytes = x.len_bytes() as f64;
        for (name, dims) in [("sum all", &[0usize, 1][..]), ("sum dim 0", &[0]), ("sum dim 1", &[1])] {
            let sum = || cpu::reduce("sum", &x, dims, ReduceOp::Sum, false);
            report(&format!("{name}{label}"), rate(bytes, sum), "GB/s");
        }
    }
    let x = noise([16384, 1024]);
    let max = || cpu::reduce("max", &x, &[1], ReduceOp::Max, false);
    report("max dim 1", rate(x.len_bytes() as f64, max), "GB/s");
    Ok(())
}

fn rows(report: Report<'_>) -> Result<()> {
    let (x, dy, w) = (noise([16384, 1024]), noise([16384, 1024]), noise([1024]));
    let bytes = x.len_bytes() as f64;
    let y = cpu::softmax("softmax", &x)?;
    report("softmax", rate(2.0 * bytes, || cpu::softmax("softmax", &x)), "GB/s");
    report("softmax backward", rate(3.0 * bytes, || cpu::softmax_backward("softmax", &dy, &y)), "GB/s");
    report("log_softmax", rate(2.0 * bytes, || cpu::log_softmax("log_softmax", &x)), "GB/s");
    let norm = || cpu::layer_norm("layer_norm", &x, Some(&w), Some(&w), 1e-5);
    report("layer_norm", rate(2.0 * bytes, norm), "GB/s");
    let (_, mean, rstd) = norm()?;
    let backward = || cpu::layer_norm_backward("layer_norm", &dy, &x, Some(&w), &mean, &rstd);
    report("layer_norm backward", rate(3.0 * bytes, backward), "GB/s");
    report("rms_norm", rate(2.0 * bytes, || cpu::rms_norm("rms_norm", &x, Some(&w), 1e-5)), "GB/s");
    Ok(())
}

fn products(report: Report<'_>) -> Result<()> {
    let shapes = [(768, 128, 512), (768, 128, 384), (768, 512, 128), (1024, 384, 1536), (1024, 1024, 1024)];
    for (m, k, n) in shapes {
        let (a, b) = (noise([1, m, k]), noise([1, k, n]));
        let value = rate(2.0 * (m * k * n) as f64, || cpu::gemm("matmul", &a, &b));
        report(&format!("matmul {m}x{k}x{n}"), value, "GFLOP/s");
        let b = noise([1, n, k]).transpose(1, 2)?;
        let value = rate(2.0 * (m * k * n) as f64, || cpu::gemm("matmul", &a, &b));
        report(&format!("matmul {m}x{k}x{n} nt"), value, "GFLOP/s");
    }
    Ok(())
}

fn attention(report: Report<'_>) -> Result<()> {
    for (b, h, t, d) in [(12, 4, 64, 32), (4, 6, 256, 64)] {
        let [q, k, v] = [(); 3].map(|()| noise([b, t, h, d]).transpose(1, 2));
        let (q, k, v) = (q?, k?, v?);
        let attention =
            CausalAttention { verb: "attention", q_start: 0, scale: 1.0 / (d as f64).sqrt(), dropout: None };
        let (o, lse) = attention.forward(&q, &k, &v)?;
        // Half of two products of t x t x d.
        let flops = 2.0 * (b * h * t * t * d) as f64;
        let forward = rate(flops, || attention.forward(&q, &k, &v));
        let backward = rate(2.5 * flops, || attention.backward([&q, &k, &v], (&o, &lse), &o));
        report(&format!("attention {b}x{h}x{t}x{d}"), forward, "GFLOP/s");
        report(&format!("attention {b}x{h}x{t}x{d} back"), backward, "GFLOP/s");
    }
    Ok(())
}

fn turned(x: &Tensor) -> Tensor {
    let (m, n) = (x.shape()[0], x.shape()[1]);
    let turned = x.reshape([n, m]).and_then(|x| x.transpose(0, 1));
    turned.expect("a contiguous tensor reshapes")
}

fn noise<const N: usize>(shape: [usize; N]) -> Tensor {
    Tensor::build(shape, |out: &mut [f32]| {
        for (i, x) in out.iter_mut().enumerate() {
            *x = (i.wrapping_mul(2_654_435_761) >> 7 & 0xffff) as f32 / 8192.0 - 4.0;
        }
    })
}

/// Billions of `work` a second: the best of the runs that fit into a third of a second, five at least.
fn rate<R>(work: f64, mut f: impl FnMut() -> Result<R>) -> f64 {
    let (start, mut best, mut runs) = (Instant::now(), f64::INFINITY, 0);
    while runs < 5 || start.elapsed().as_secs_f64() < 0.33 {
        let run = Instant::now();
        std::hint::black_box(f().expect("the operands fit"));
        best = best.min(run.elapsed().as_secs_f64());
        runs += 1;
    }
    work / best / 1e9
}
