//! How fast one thread's kernels are: a table, or with `-- --json` one JSON object a line.
//!
//! Elementwise, reducing and row kernels count the bytes they must read and write once, products their floating-point
//! operations. Each value is the best of several runs.

use std::time::Instant;

use isoshard::Result;
use isoshard::tensor::cpu::{self, BinaryN, CausalAttention, Num, Real, UnaryF, UnaryN};
use isoshard::tensor::{DType, ReduceOp, Tensor};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let json = args.iter().any(|a| a == "--json");
    let bench = Bench { json, filter: args.into_iter().find(|a| !a.starts_with("--")).unwrap_or_default() };
    elementwise(&bench)?;
    reductions(&bench)?;
    rows(&bench)?;
    products(&bench)?;
    attention(&bench)
}

/// Runs the cases whose names hold `filter`.
struct Bench {
    json: bool,
    filter: String,
}

impl Bench {
    /// Reports billions of `work` a second.
    fn case<R>(&self, case: &str, unit: &str, work: f64, f: impl FnMut() -> Result<R>) {
        if case.contains(&self.filter) {
            self.report(case, work / best_s(f) / 1e9, unit);
        }
    }

    fn report(&self, case: &str, value: f64, unit: &str) {
        if self.json {
            println!(r#"{{"bench":"kernels","case":"{case}","value":{value:.3},"unit":"{unit}"}}"#);
        } else {
            println!("{case:<30} {value:>9.2} {unit}");
        }
    }
}

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

fn elementwise(bench: &Bench) -> Result<()> {
    let (x, y) = (noise([16384, 1024]), noise([16384, 1024]));
    let bytes = x.len_bytes() as f64;
    let bias = noise([1024]).expand([16384, 1024])?;
    let scalar = Tensor::scalar(2.0f32).expand([16384, 1024])?;
    let column = noise([16384, 1]).expand([16384, 1024])?;
    bench.case("add", "GB/s", 3.0 * bytes, || cpu::num_binary("add", &x, &y, Add));
    bench.case("add bias", "GB/s", 2.0 * bytes, || cpu::num_binary("add", &x, &bias, Add));
    bench.case("add column", "GB/s", 2.0 * bytes, || cpu::num_binary("add", &x, &column, Add));
    bench.case("add scalar", "GB/s", 2.0 * bytes, || cpu::num_binary("add", &x, &scalar, Add));
    let mut acc = y.to_owned_copy();
    bench.case("add in place", "GB/s", 3.0 * bytes, || cpu::num_binary_mut("add", &mut acc, &x, Add));
    bench.case("add transposed", "GB/s", 3.0 * bytes, || cpu::num_binary("add", &x, &turned(&y), Add));
    bench.case("relu", "GB/s", 2.0 * bytes, || cpu::num_unary("relu", &x, Relu));
    bench.case("exp", "GB/s", 2.0 * bytes, || cpu::float_unary("exp", &x, Exp));
    bench.case("gelu", "GB/s", 2.0 * bytes, || cpu::float_unary("gelu", &x, Gelu));
    bench.case("gelu tanh", "GB/s", 2.0 * bytes, || cpu::float_unary("gelu", &x, TanhGelu));
    let half = cpu::cast(&x, DType::BF16)?;
    bench.case("gelu bf16", "GB/s", bytes, || cpu::float_unary("gelu", &half, Gelu));
    bench.case("cast f32 to bf16", "GB/s", 1.5 * bytes, || cpu::cast(&x, DType::BF16));
    let (small_x, small_y) = (noise([64]), noise([64]));
    let thousand = || (0..1000).try_for_each(|_| cpu::num_binary("add", &small_x, &small_y, Add).map(drop));
    bench.case("add 64 elements", "million calls/s", 1e6, thousand);
    Ok(())
}

fn reductions(bench: &Bench) -> Result<()> {
    for (label, shape) in [("", [16384, 1024]), (" 16777 x 1000", [16777, 1000])] {
        let x = noise(shape);
        let bytes = x.len_bytes() as f64;
        for (name, dims) in [("sum all", &[0usize, 1][..]), ("sum dim 0", &[0]), ("sum dim 1", &[1])] {
            let sum = || cpu::reduce("sum", &x, dims, ReduceOp::Sum, false);
            bench.case(&format!("{name}{label}"), "GB/s", bytes, sum);
        }
    }
    let x = noise([16384, 1024]);
    let max = || cpu::reduce("max", &x, &[1], ReduceOp::Max, false);
    bench.case("max dim 1", "GB/s", x.len_bytes() as f64, max);
    Ok(())
}

fn rows(bench: &Bench) -> Result<()> {
    let (x, dy, w) = (noise([16384, 1024]), noise([16384, 1024]), noise([1024]));
    let bytes = x.len_bytes() as f64;
    let y = cpu::softmax("softmax", &x)?;
    bench.case("softmax", "GB/s", 2.0 * bytes, || cpu::softmax("softmax", &x));
    bench.case("softmax backward", "GB/s", 3.0 * bytes, || cpu::softmax_backward("softmax", &dy, &y));
    bench.case("log_softmax", "GB/s", 2.0 * bytes, || cpu::log_softmax("log_softmax", &x));
    let norm = || cpu::layer_norm("layer_norm", &x, Some(&w), Some(&w), 1e-5);
    bench.case("layer_norm", "GB/s", 2.0 * bytes, norm);
    let (_, mean, rstd) = norm()?;
    let backward = || cpu::layer_norm_backward("layer_norm", &dy, &x, Some(&w), &mean, &rstd);
    bench.case("layer_norm backward", "GB/s", 3.0 * bytes, backward);
    bench.case("rms_norm", "GB/s", 2.0 * bytes, || cpu::rms_norm("rms_norm", &x, Some(&w), 1e-5));
    Ok(())
}

fn products(bench: &Bench) -> Result<()> {
    let shapes = [(768, 128, 512), (768, 128, 384), (768, 512, 128), (1024, 384, 1536), (1024, 1024, 1024)];
    for (m, k, n) in shapes {
        let (a, b) = (noise([1, m, k]), noise([1, k, n]));
        let flops = 2.0 * (m * k * n) as f64;
        bench.case(&format!("matmul {m}x{k}x{n}"), "GFLOP/s", flops, || cpu::gemm("matmul", &a, &b, &[k]));
        let b = noise([1, n, k]).transpose(1, 2)?;
        bench.case(&format!("matmul {m}x{k}x{n} nt"), "GFLOP/s", flops, || cpu::gemm("matmul", &a, &b, &[k]));
    }
    Ok(())
}

fn attention(bench: &Bench) -> Result<()> {
    for (b, h, t, d) in [(12, 4, 64, 32), (4, 6, 256, 64)] {
        let [q, k, v] = [(); 3].map(|()| noise([b, t, h, d]).transpose(1, 2));
        let (q, k, v) = (q?, k?, v?);
        let attention =
            CausalAttention { verb: "attention", q_start: 0, scale: 1.0 / (d as f64).sqrt(), dropout: None };
        let (o, lse) = attention.forward(&q, &k, &v)?;
        // Half of two products of t x t x d.
        let flops = 2.0 * (b * h * t * t * d) as f64;
        let forward = || attention.forward(&q, &k, &v);
        bench.case(&format!("attention {b}x{h}x{t}x{d}"), "GFLOP/s", flops, forward);
        let backward = || attention.backward([&q, &k, &v], (&o, &lse), &o);
        bench.case(&format!("attention {b}x{h}x{t}x{d} back"), "GFLOP/s", 2.5 * flops, backward);
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

/// The shortest of the runs that fit into a third of a second, five at least.
fn best_s<R>(mut f: impl FnMut() -> Result<R>) -> f64 {
    let (start, mut best, mut runs) = (Instant::now(), f64::INFINITY, 0);
    while runs < 5 || start.elapsed().as_secs_f64() < 0.33 {
        let run = Instant::now();
        std::hint::black_box(f().expect("the operands fit"));
        best = best.min(run.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}
