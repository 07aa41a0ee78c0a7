//! Measures the kernels of one thread: a table, or with `-- --json` one JSON object per line.
//! `cargo bench --bench kernels [-- NAME] [--json] [--isa avx2]`.
//!
//! Rates of elementwise, reducing and row kernels count the bytes that they must read and write once; rates of products
//! count floating-point operations. Each value is the best of several runs.

use std::time::Instant;

use isoshard::Result;
use isoshard::ops::cpu::{self as ops, CpuAttention};
use isoshard::ops::{
    Bits, Clamp, FloatTest, FloatTestKind, Floor, Gelu as GeluOp, GeluGrad, Hardswish, Lerp, Op, Remainder,
    ScoreOperands, ScoreRule, eval_whole,
};
use isoshard::tensor::cpu::{
    self, Constants, Function, Gemm, Isa, Loops, MatMut, MatRef, Num, NumFunction, Real,
};
use isoshard::tensor::{DType, ReduceOp, Tensor};

fn main() -> Result<()> {
    let (mut bench, mut isa) = (Bench { json: false, filter: String::new() }, Isa::current());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => bench.json = true,
            "--isa" => {
                let name = args.next().unwrap_or_default();
                let found =
                    Isa::available().iter().find(|isa| format!("{isa:?}").eq_ignore_ascii_case(&name));
                isa = *found.unwrap_or_else(|| panic!("--isa {name}: this CPU has {:?}", Isa::available()));
            }
            _ if arg.starts_with("--") => {}
            _ => bench.filter = arg,
        }
    }
    cpu::with_isa(isa, || {
        elementwise(&bench)?;
        reductions(&bench)?;
        rows(&bench)?;
        products(&bench)?;
        attention(&bench)
    })
}

/// Runs the cases whose names contain `filter`.
#[derive(Clone)]
struct Bench {
    json: bool,
    filter: String,
}

impl Bench {
    /// Reports billions of `work` per second.
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

struct Add;
impl NumFunction<2> for Add {
    #[inline(always)]
    fn at<A: Num>(_: Constants, [x, y]: [A; 2]) -> A {
        x.add(y)
    }
}
const ADD: Loops = Loops::numbers::<Add, 2>();

struct Relu;
impl NumFunction<1> for Relu {
    #[inline(always)]
    fn at<A: Num>(_: Constants, [x]: [A; 1]) -> A {
        x.max(A::ZERO)
    }
}

struct Exp;
impl Function<1> for Exp {
    #[inline(always)]
    fn at<A: Real>(_: Constants, [x]: [A; 1]) -> A {
        x.exp()
    }
}

struct Gelu;
impl Function<1> for Gelu {
    #[inline(always)]
    fn at<A: Real>(_: Constants, [x]: [A; 1]) -> A {
        let half = A::of(0.5) * x;
        half.mul_add((x * A::of(std::f64::consts::FRAC_1_SQRT_2)).erf(), half)
    }
}

struct TanhGelu;
impl Function<1> for TanhGelu {
    #[inline(always)]
    fn at<A: Real>(_: Constants, [x]: [A; 1]) -> A {
        let inner = x * (x * x).mul_add(A::of(0.035_677_408_136_300_125), A::of(0.797_884_560_802_865_4));
        let half = A::of(0.5) * x;
        half.mul_add(inner.tanh(), half)
    }
}

/// Times a kernel that writes to a fresh tensor.
fn fresh<const N: usize>(verb: &str, loops: &Loops, ins: [&Tensor; N]) -> Result<Tensor> {
    cpu::compute(verb, loops, [0.0; 2], &mut ins.map(Tensor::clone))
}

fn elementwise(bench: &Bench) -> Result<()> {
    let (x, y) = (noise([16384, 1024]), noise([16384, 1024]));
    let bytes = x.len_bytes() as f64;
    let bias = noise([1024]).expand([16384, 1024])?;
    let scalar = Tensor::scalar(2.0f32).expand([16384, 1024])?;
    let column = noise([16384, 1]).expand([16384, 1024])?;
    bench.case("add", "GB/s", 3.0 * bytes, || fresh("add", &ADD, [&x, &y]));
    bench.case("add bias", "GB/s", 2.0 * bytes, || fresh("add", &ADD, [&x, &bias]));
    bench.case("add column", "GB/s", 2.0 * bytes, || fresh("add", &ADD, [&x, &column]));
    bench.case("add scalar", "GB/s", 2.0 * bytes, || fresh("add", &ADD, [&x, &scalar]));
    let mut acc = [y.to_owned_copy().unwrap(), x.clone()];
    bench.case("add in place", "GB/s", 3.0 * bytes, || {
        cpu::compute("add", &ADD, [0.0; 2], &mut acc).map(drop)
    });
    bench.case("add transposed", "GB/s", 3.0 * bytes, || fresh("add", &ADD, [&x, &turned(&y)]));
    bench.case("relu", "GB/s", 2.0 * bytes, || fresh("relu", &Loops::numbers::<Relu, 1>(), [&x]));
    bench.case("exp", "GB/s", 2.0 * bytes, || fresh("exp", &Loops::floats::<Exp, 1>(), [&x]));
    let by_elements = || fresh("gelu", &Loops::floats::<Gelu, 1>(), [&x]);
    bench.case("gelu by elements", "GB/s", 2.0 * bytes, by_elements);
    bench.case("gelu tanh", "GB/s", 2.0 * bytes, || fresh("gelu", &Loops::floats::<TanhGelu, 1>(), [&x]));
    let half = cpu::cast(&x, DType::BF16)?;
    bench.case("gelu bf16", "GB/s", bytes, || fresh("gelu", &Loops::floats::<Gelu, 1>(), [&half]));
    let op = |op: &dyn Op, ins: &[&Tensor]| eval_whole(op, &ins.iter().copied().cloned().collect::<Vec<_>>());
    bench.case("gelu in passes", "GB/s", 2.0 * bytes, || op(&GeluOp, &[&x]));
    bench.case("gelu backward", "GB/s", 3.0 * bytes, || op(&GeluGrad, &[&y, &x]));
    bench.case("floor", "GB/s", 2.0 * bytes, || op(&Floor, &[&x]));
    bench.case("remainder", "GB/s", 3.0 * bytes, || op(&Remainder, &[&x, &y]));
    let clamp = Clamp { min: Bits(-0.5), max: Bits(0.5), open: false };
    bench.case("clamp", "GB/s", 2.0 * bytes, || op(&clamp, &[&x]));
    bench.case("hardswish", "GB/s", 2.0 * bytes, || op(&Hardswish, &[&x]));
    bench.case("lerp scalar", "GB/s", 3.0 * bytes, || op(&Lerp, &[&x, &y, &scalar]));
    bench.case("isfinite", "GB/s", 1.25 * bytes, || op(&FloatTest { kind: FloatTestKind::Finite }, &[&x]));
    bench.case("cast f32 to bf16", "GB/s", 1.5 * bytes, || cpu::cast(&x, DType::BF16));
    let (small_x, small_y) = (noise([64]), noise([64]));
    let thousand = || (0..1000).try_for_each(|_| fresh("add", &ADD, [&small_x, &small_y]).map(drop));
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
    let y = ops::softmax("softmax", &x)?;
    bench.case("softmax", "GB/s", 2.0 * bytes, || ops::softmax("softmax", &x));
    bench.case("softmax backward", "GB/s", 3.0 * bytes, || ops::softmax_backward("softmax", &dy, &y));
    bench.case("log_softmax", "GB/s", 2.0 * bytes, || ops::log_softmax("log_softmax", &x));
    let norm = || ops::layer_norm("layer_norm", &x, Some(&w), Some(&w), 1e-5);
    bench.case("layer_norm", "GB/s", 2.0 * bytes, norm);
    let (_, mean, rstd) = norm()?;
    let backward = || ops::layer_norm_backward("layer_norm", &dy, &x, Some(&w), &mean, &rstd);
    bench.case("layer_norm backward", "GB/s", 3.0 * bytes, backward);
    bench.case("rms_norm", "GB/s", 2.0 * bytes, || ops::rms_norm("rms_norm", &x, Some(&w), 1e-5));
    Ok(())
}

/// A matrix product as operators call it.
struct Product {
    case: String,
    /// The numbers of rows, of summed indices, and of columns.
    shape: [usize; 3],
    a_strides: (usize, usize),
    b_strides: (usize, usize),
    /// The distance between rows of the result, in elements.
    c_step: usize,
}

impl Product {
    /// Makes a product of whole matrices; `kind` says for each whether it is transposed.
    fn of([m, k, n]: [usize; 3], kind: &str) -> Product {
        let a_strides = if kind.starts_with('t') { (1, m) } else { (k, 1) };
        let b_strides = if kind.ends_with('t') { (1, k) } else { (n, 1) };
        Product {
            case: format!("matmul {m}x{k}x{n} {kind}"),
            shape: [m, k, n],
            a_strides,
            b_strides,
            c_step: n,
        }
    }

    /// Makes the products of a head's queries, keys and values, whose rows are `step` apart.
    fn attention(t: usize, d: usize, step: usize) -> [Product; 3] {
        let of = |what: &str, shape, a_strides, b_strides, c_step| Product {
            case: format!("{what} {t}x{d} step {step}"),
            shape,
            a_strides,
            b_strides,
            c_step,
        };
        [
            of("q k^T", [t, d, t], (step, 1), (1, step), t),
            of("p v", [t, t, d], (t, 1), (step, 1), step),
            of("p^T grad", [t, t, d], (1, t), (step, 1), step),
        ]
    }

    /// Reports billions of operations per second, and those of `matrixmultiply` in the same run.
    fn measure(&self, bench: &Bench) {
        if !self.case.contains(&bench.filter) {
            return;
        }
        let [m, k, n] = self.shape;
        let (a_len, b_len) = (extent((m, k), self.a_strides), extent((k, n), self.b_strides));
        let (a, b) = (noise([a_len]), noise([b_len]));
        let (a, b) = (a.as_slice::<f32>().expect("f32"), b.as_slice::<f32>().expect("f32"));
        let mut c = vec![0.0f32; m * self.c_step];
        // Short products run many times between two readings of the clock.
        let times = (2e6 / (m * k * n) as f64) as usize + 1;
        let (start, mut best) = (Instant::now(), [f64::INFINITY; 2]);
        while start.elapsed().as_secs_f64() < 0.4 || best[1].is_infinite() {
            for (which, best) in best.iter_mut().enumerate() {
                let run = Instant::now();
                for _ in 0..times {
                    if which == 0 { self.ours(a, b, &mut c) } else { self.theirs(a, b, &mut c) }
                }
                *best = best.min(run.elapsed().as_secs_f64() / times as f64);
            }
        }
        let [ours, theirs] = best.map(|s| 2.0 * (m * k * n) as f64 / s / 1e9);
        let case = &self.case;
        if bench.json {
            println!(
                r#"{{"bench":"kernels","case":"{case}","value":{ours:.3},"unit":"GFLOP/s","matrixmultiply":{theirs:.3}}}"#
            );
        } else {
            let ratio = ours / theirs;
            println!("{case:<30} {ours:>9.2} GFLOP/s   matrixmultiply {theirs:>7.2}   ratio {ratio:.2}");
        }
    }

    fn ours(&self, a: &[f32], b: &[f32], c: &mut [f32]) {
        let [m, k, n] = self.shape;
        let a = MatRef::new(a, (m, k), self.a_strides).expect("room for a");
        let b = MatRef::new(b, (k, n), self.b_strides).expect("room for b");
        let c = MatMut::new(c, (m, n), (self.c_step, 1)).expect("room for c");
        f32::product(1.0, a, b, 0.0, c);
    }

    fn theirs(&self, a: &[f32], b: &[f32], c: &mut [f32]) {
        let [m, k, n] = self.shape;
        let ((ar, ac), (br, bc)) = (self.a_strides, self.b_strides);
        let step = |s: usize| s as isize;
        assert!(a.len() >= extent((m, k), (ar, ac)) && b.len() >= extent((k, n), (br, bc)));
        assert!(c.len() >= m * self.c_step && self.c_step >= n);
        // SAFETY: all three matrices lie inside their buffers, as just asserted, and `c` is borrowed exclusively.
        unsafe {
            matrixmultiply::sgemm(
                m,
                k,
                n,
                1.0,
                a.as_ptr(),
                step(ar),
                step(ac),
                b.as_ptr(),
                step(br),
                step(bc),
                0.0,
                c.as_mut_ptr(),
                step(self.c_step),
                1,
            );
        }
    }
}

/// Returns the distance from a matrix's first element to its last, both counted.
fn extent((m, n): (usize, usize), (rs, cs): (usize, usize)) -> usize {
    (m - 1) * rs + (n - 1) * cs + 1
}

fn products(bench: &Bench) -> Result<()> {
    // Line by line: general shapes, two GPTs forward, their gradients of weights and of inputs, thin matrices.
    let cases: [(&str, &[[usize; 3]]); 8] = [
        ("nn", &[[768, 128, 512], [1024, 1536, 384], [1024, 1024, 1024], [2048, 2048, 2048]]),
        ("tn", &[[384, 1024, 1536], [128, 768, 512]]),
        ("nn", &[[768, 128, 384], [768, 128, 128], [768, 512, 128], [768, 128, 65]]),
        ("nn", &[[4096, 384, 1152], [4096, 384, 384], [4096, 384, 1536], [4096, 1536, 384], [4096, 384, 65]]),
        ("tn", &[[128, 768, 384], [512, 768, 128], [65, 768, 128], [384, 4096, 1536], [1536, 4096, 384]]),
        ("nt", &[[768, 384, 128], [768, 512, 128], [768, 128, 512], [768, 65, 128], [4096, 1536, 384]]),
        ("nn", &[[1, 2048, 2048], [3, 1024, 1024], [8, 1024, 1024], [1024, 1024, 3], [2048, 2048, 1]]),
        (
            "nt",
            &[
                [1, 2048, 2048],
                [2, 2048, 2048],
                [4, 2048, 2048],
                [8, 2048, 2048],
                [17, 512, 512],
                [1, 1000, 3000],
            ],
        ),
    ];
    for (kind, shapes) in cases {
        shapes.iter().for_each(|&shape| Product::of(shape, kind).measure(bench));
    }
    for (t, d, step) in [(64, 32, 128), (64, 32, 384), (256, 64, 384), (256, 64, 1152)] {
        Product::attention(t, d, step).iter().for_each(|p| p.measure(bench));
    }
    let (a, b) = (noise([1, 768, 512]), noise([1, 512, 512]));
    let flops = 2.0 * 768.0 * 512.0 * 512.0;
    for dtype in [DType::F64, DType::BF16, DType::F16] {
        let (a, b) = (cpu::cast(&a, dtype)?, cpu::cast(&b, dtype)?);
        let product = || cpu::gemm("matmul", &a, &b, &[512]);
        bench.case(&format!("matmul 768x512x512 {dtype}"), "GFLOP/s", flops, product);
    }
    // One row, or eight, by a matrix of 16-bit elements.
    for (dtype, m) in [DType::BF16, DType::F16].into_iter().flat_map(|dtype| [(dtype, 1), (dtype, 8)]) {
        let (x, w) = (noise([1, m, 2048]), noise([1, 2048, 2048]));
        let (x, w) = (cpu::cast(&x, dtype)?, cpu::cast(&w, dtype)?);
        let flops = 2.0 * (m * 2048 * 2048) as f64;
        for (kind, w) in [("nn", w.clone()), ("nt", w.transpose(1, 2)?)] {
            let product = || cpu::gemm("matmul", &x, &w, &[2048]);
            bench.case(&format!("matmul {m}x2048x2048 {kind} {dtype}"), "GFLOP/s", flops, product);
        }
    }
    let (x, w, bias) = (a.reshape([768, 512])?, b.reshape([512, 512])?.transpose(0, 1)?, noise([512]));
    const GELU: Loops = Loops::floats::<TanhGelu, 1>();
    let fused = || cpu::linear("linear", &x, &w, Some(&bias), Some(&GELU));
    bench.case("linear and gelu 768x512x512", "GFLOP/s", flops, fused);
    let separate = || {
        let product = cpu::gemm("matmul", &a, &b, &[512])?;
        let sum = fresh("add", &ADD, [&product, &bias.expand([1, 768, 512])?])?;
        fresh("gelu", &GELU, [&sum])
    };
    bench.case("the same, separate", "GFLOP/s", flops, separate);
    for &isa in Isa::available() {
        let product = || cpu::with_isa(isa, || cpu::gemm("matmul", &a, &b, &[512]));
        bench.case(&format!("matmul 768x512x512 {isa:?}"), "GFLOP/s", flops, product);
    }
    let two = || cpu::with_threads(2, || cpu::gemm("matmul", &a, &b, &[512]));
    bench.case("matmul 768x512x512 2 threads", "GFLOP/s", flops, two);
    let (x, w) = (noise([1, 1, 2048]), noise([1, 2048, 2048]).transpose(1, 2)?);
    let two = || cpu::with_threads(2, || cpu::gemm("matmul", &x, &w, &[2048]));
    bench.case("matmul 1x2048x2048 nt 2 threads", "GFLOP/s", 2.0 * 2048.0 * 2048.0, two);
    Ok(())
}

fn attention(bench: &Bench) -> Result<()> {
    for (b, h, t, d) in [(12, 4, 64, 32), (4, 6, 256, 64), (1, 8, 1024, 64), (1, 2, 4096, 64)] {
        let [q, k, v] = [(); 3].map(|()| noise([b, t, h, d]).transpose(1, 2));
        let (q, k, v) = (q?, k?, v?);
        let causal = CpuAttention::causal("attention", 0, 1.0 / (d as f64).sqrt());
        // Every third of the last eighth of the keys is padding.
        let mask = (0..b * t).map(|i| i % t < t - t / 8 || i % 3 > 0).collect();
        let mask = Tensor::from_vec::<bool>(mask, [b, 1, 1, t])?;
        let bias = noise([1, h, t, t]);
        let all = ScoreRule::BIDIRECTIONAL;
        let of = |name: &str, rule: ScoreRule, pairs: f64| -> Result<()> {
            let operands = ScoreOperands {
                mask: rule.mask.then_some(&mask),
                bias: rule.bias.then_some(&bias),
                documents: None,
            };
            let attention = CpuAttention { rule, operands, ..causal };
            let (o, lse) = attention.forward(&q, &k, &v)?;
            let flops = 4.0 * (b * h * d) as f64 * pairs;
            let forward = || attention.forward(&q, &k, &v);
            bench.case(&format!("attention {b}x{h}x{t}x{d}{name}"), "GFLOP/s", flops, forward);
            let backward = || attention.backward([&q, &k, &v], (&o, &lse), &o);
            bench.case(&format!("attention {b}x{h}x{t}x{d}{name} back"), "GFLOP/s", 2.5 * flops, backward);
            Ok(())
        };
        let square = (t * t) as f64;
        // A causal mask leaves half of two products of t x t x d.
        of("", ScoreRule::CAUSAL, square / 2.0)?;
        of(" all", all, square)?;
        of(" mask", ScoreRule { mask: true, ..all }, square)?;
        of(" bias", ScoreRule { bias: true, ..all }, square)?;
        let window = ScoreRule { before: Some(t / 8 - 1), ..ScoreRule::CAUSAL };
        of(" window", window, square / 8.0)?;
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

/// Returns the shortest of the runs that fit into a third of a second, of at least five.
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
