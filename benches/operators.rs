//! Measures operators on one thread, as methods of `DTensor` on one rank: a table, or with `-- --json` one JSON object
//! per line. `benches/torch/operators.py` prints PyTorch's numbers under the same names, and
//! `benches/torch/compare.py` puts both side by side:
//!
//! ```text
//! cargo bench --bench operators -- --json > ours.jsonl; python3 benches/torch/operators.py > theirs.jsonl
//! python3 benches/torch/compare.py ours.jsonl theirs.jsonl
//! ```
//!
//! `-- --isa avx2` measures loops for narrower vectors than the CPU has, `-- --f64` formulas and reductions of f64.
//!
//! A rate counts the bytes of operands and results once, or elements where it says so. Each value is the best of several runs.

use std::time::Instant;

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::Layout;
use isoshard::tensor::cpu::{Isa, with_isa};
use isoshard::tensor::{DType, Tensor};

/// A function of one tensor.
type Unary = fn(&DTensor) -> Result<DTensor>;
/// A function of two tensors.
type Binary = fn(&DTensor, &DTensor) -> Result<DTensor>;

/// Functions of elements, which get numbers in (0, 1).
const POINTWISE: &[(&str, Unary)] = &[
    ("abs", |x| x.abs()),
    ("acos", |x| x.acos()),
    ("add_scalar", |x| x.add_scalar(0.5)),
    ("asin", |x| x.asin()),
    ("asinh", |x| x.asinh()),
    ("atan", |x| x.atan()),
    ("atanh", |x| x.atanh()),
    ("clamp", |x| x.clamp(0.25, 0.75)),
    ("cos", |x| x.cos()),
    ("cosh", |x| x.cosh()),
    ("digamma", |x| x.digamma()),
    ("elu", |x| x.elu(1.0)),
    ("erf", |x| x.erf()),
    ("erfc", |x| x.erfc()),
    ("erfinv", |x| x.erfinv()),
    ("exp", |x| x.exp()),
    ("exp2", |x| x.exp2()),
    ("expm1", |x| x.expm1()),
    ("floor", |x| x.floor()),
    ("frac", |x| x.frac()),
    ("gelu", |x| x.gelu()),
    ("gelu_tanh", |x| x.gelu_tanh()),
    ("gt_scalar", |x| x.gt_scalar(0.5)),
    ("hardsigmoid", |x| x.hardsigmoid()),
    ("hardswish", |x| x.hardswish()),
    ("isfinite", |x| x.isfinite()),
    ("leaky_relu", |x| x.leaky_relu(0.01)),
    ("lgamma", |x| x.lgamma()),
    ("log", |x| x.log()),
    ("log10", |x| x.log10()),
    ("log1p", |x| x.log1p()),
    ("log2", |x| x.log2()),
    ("log_sigmoid", |x| x.log_sigmoid()),
    ("logit", |x| x.logit()),
    ("mish", |x| x.mish()),
    ("neg", |x| x.neg()),
    ("pow_scalar", |x| x.pow_scalar(1.7)),
    ("reciprocal", |x| x.reciprocal()),
    ("relu", |x| x.relu()),
    ("relu6", |x| x.relu6()),
    ("round", |x| x.round()),
    ("rsqrt", |x| x.rsqrt()),
    ("selu", |x| x.selu()),
    ("sigmoid", |x| x.sigmoid()),
    ("sign", |x| x.sign()),
    ("silu", |x| x.silu()),
    ("sin", |x| x.sin()),
    ("sinh", |x| x.sinh()),
    ("softplus", |x| x.softplus()),
    ("softsign", |x| x.softsign()),
    ("sqrt", |x| x.sqrt()),
    ("square", |x| x.square()),
    ("tan", |x| x.tan()),
    ("tanh", |x| x.tanh()),
    ("trunc", |x| x.trunc()),
];

/// Functions of [`POINTWISE`] whose operands have both signs, since some take less work for one of them: from -4 to 4 instead of 0 to 1.
const ACTIVATIONS: &[&str] = &[
    "elu",
    "gelu",
    "gelu_tanh",
    "hardsigmoid",
    "hardswish",
    "leaky_relu",
    "log_sigmoid",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "softsign",
    "tanh",
];

/// Functions of two tensors of one shape.
const POINTWISE_2: &[(&str, Binary)] = &[
    ("add", |x, y| x.add(y)),
    ("atan2", |x, y| x.atan2(y)),
    ("copysign", |x, y| x.copysign(y)),
    ("div", |x, y| x.div(y)),
    ("fmod", |x, y| x.fmod(y)),
    ("hypot", |x, y| x.hypot(y)),
    ("logaddexp", |x, y| x.logaddexp(y)),
    ("maximum", |x, y| x.maximum(y)),
    ("mul", |x, y| x.mul(y)),
    ("pow", |x, y| x.pow(y)),
    ("remainder", |x, y| x.remainder(y)),
    ("sub", |x, y| x.sub(y)),
    ("xlogy", |x, y| x.xlogy(y)),
];

/// Functions of three tensors of one shape; the third operand is the first once more.
const POINTWISE_3: &[(&str, Binary)] = &[
    ("addcdiv", |x, y| x.addcdiv(x, y, 0.5)),
    ("addcmul", |x, y| x.addcmul(x, y, 0.5)),
    ("lerp", |x, y| x.lerp(y, x)),
];

/// Functions along the last dim of `[4096, 1024]`.
const ALONG: &[(&str, Unary)] = &[
    ("all", |x| x.gt_scalar(-1.0)?.all(&[1], false)),
    ("argmax", |x| x.argmax(1)),
    ("argmin", |x| x.argmin(1)),
    ("argsort", |x| x.argsort(1, false)),
    ("log_softmax", |x| x.log_softmax(1)),
    ("logsumexp", |x| x.logsumexp(&[1], false)),
    ("logsumexp dim 0", |x| x.logsumexp(&[0], false)),
    ("max", |x| x.max(&[1], false)),
    ("max dim 0", |x| x.max(&[0], false)),
    ("mean", |x| x.mean(&[1], false)),
    ("norm 1", |x| x.norm(1.0, &[1], false)),
    ("norm 2", |x| x.norm(2.0, &[1], false)),
    ("norm 2 dim 0", |x| x.norm(2.0, &[0], false)),
    ("norm 3", |x| x.norm(3.0, &[1], false)),
    ("prod", |x| x.prod(&[1], false)),
    ("softmax", |x| x.softmax(1)),
    ("sort", |x| x.sort(1, false).map(|(values, _)| values)),
    ("sum", |x| x.sum(&[1], false)),
    ("sum dim 0", |x| x.sum(&[0], false)),
    ("topk 8", |x| x.topk(8, 1, true).map(|(values, _)| values)),
    ("topk 50", |x| x.topk(50, 1, true).map(|(values, _)| values)),
    ("var", |x| x.var(&[1], 1, false)),
    ("var dim 0", |x| x.var(&[0], 1, false)),
];

fn main() -> Result<()> {
    let mut bench = OperatorBench { json: false, dtype: DType::F32, filter: String::new() };
    let (mut isa, mut args) = (Isa::current(), std::env::args().skip(1));
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => bench.json = true,
            "--f64" => bench.dtype = DType::F64,
            "--isa" => {
                let name = args.next().unwrap_or_default();
                let found = Isa::available().iter().find(|i| format!("{i:?}").eq_ignore_ascii_case(&name));
                isa = *found.unwrap_or_else(|| panic!("--isa {name}: this CPU has {:?}", Isa::available()));
            }
            _ if arg.starts_with("--") => {}
            _ => bench.filter = arg,
        }
    }
    spmd(1, move |rank| {
        let mesh = DeviceMesh::parse(&rank, "1")?;
        let _guard = mesh.no_grad();
        with_isa(isa, || measure(&mesh, &bench))
    })?;
    Ok(())
}

/// Runs the cases whose names contain `filter`.
struct OperatorBench {
    json: bool,
    dtype: DType,
    filter: String,
}

impl OperatorBench {
    /// Reports billions of `work` per second.
    fn case<R>(&self, case: &str, unit: &str, work: f64, f: impl Fn() -> Result<R>) -> Result<()> {
        if !case.contains(&self.filter) {
            return Ok(());
        }
        let (start, mut best, mut runs) = (Instant::now(), f64::INFINITY, 0);
        while runs < 5 || start.elapsed().as_secs_f64() < 0.33 {
            let run = Instant::now();
            std::hint::black_box(f()?);
            best = best.min(run.elapsed().as_secs_f64());
            runs += 1;
        }
        let value = work / best / 1e9;
        if self.json {
            println!(
                r#"{{"bench":"operators","side":"isoshard","case":"{case}","value":{value:.3},"unit":"{unit}"}}"#
            );
        } else {
            println!("{case:<30} {value:>9.3} {unit}");
        }
        Ok(())
    }
}

fn measure(mesh: &DeviceMesh, bench: &OperatorBench) -> Result<()> {
    let put = |t: Tensor| DTensor::distribute(mesh, &t, Layout::replicated(0));
    let x = put(noise([4096, 1024]).cast(bench.dtype)?)?;
    let bytes = x.local().len_bytes() as f64;
    let signed = x.add_scalar(-0.5)?.mul_scalar(8.0)?;
    for (name, f) in POINTWISE {
        let operand = if ACTIVATIONS.contains(name) { &signed } else { &x };
        bench.case(name, "GB/s", 2.0 * bytes, || f(operand))?;
    }
    let y = put(noise([4096, 1024]).cast(bench.dtype)?)?;
    for (name, f) in POINTWISE_2 {
        bench.case(name, "GB/s", 3.0 * bytes, || f(&x, &y))?;
    }
    for (name, f) in POINTWISE_3 {
        bench.case(name, "GB/s", 4.0 * bytes, || f(&x, &y))?;
    }
    if bench.dtype == DType::F64 {
        return ALONG.iter().try_for_each(|(name, f)| bench.case(name, "GB/s", bytes, || f(&x)));
    }
    let (ints, other) = (x.mul_scalar(1e6)?.cast(DType::I32)?, y.mul_scalar(1e3)?.cast(DType::I32)?);
    bench.case("bitwise_xor i32", "GB/s", 3.0 * bytes, || ints.bitwise_xor(&other))?;
    bench.case("floor_div i32", "GB/s", 3.0 * bytes, || ints.floor_div(&other.add_scalar(1.0)?))?;
    let mask = x.gt_scalar(0.5)?;
    bench.case("select", "GB/s", 3.25 * bytes, || mask.select(&x, &y))?;
    bench.case("masked_fill", "GB/s", 2.25 * bytes, || x.masked_fill(&mask, -1.0))?;
    bench.case("logical_not", "GB/s", 0.5 * bytes, || mask.logical_not())?;
    let half = x.cast(DType::BF16)?;
    for (name, f) in
        POINTWISE.iter().filter(|(name, _)| ["exp", "gelu", "relu", "sin", "erfc"].contains(name))
    {
        bench.case(&format!("{name} bf16"), "GB/s", bytes, || f(&half))?;
    }
    foreach(mesh, bench)?;
    for (name, f) in ALONG {
        bench.case(name, "GB/s", bytes, || f(&x))?;
    }
    bench.case("sum all", "GB/s", bytes, || x.sum(&[0, 1], false))?;
    odd_rows(mesh, bench)?;
    ordering(mesh, bench)?;
    by_index(mesh, bench)?;
    for keys in [64, 256, 1024, 4096] {
        let [q, k, v] = [(); 3].map(|()| put(noise([1, 4, keys, 64])));
        let (q, k, v) = (q?, k?, v?);
        // A causal mask leaves half of two products of keys x keys x 64 per head.
        let flops = 2.0 * (4 * keys * keys * 64) as f64;
        bench.case(&format!("attention {keys}"), "GFLOP/s", flops, || q.attention(&k, &v, 0.125))?;
    }
    products(mesh, bench)?;
    bench.case("cast bf16", "GB/s", 1.5 * bytes, || x.cast(DType::BF16))
}

/// Multiplies `[m, k]` by `[k, n]`: general shapes, those of two GPTs forward and backward, thin ones, as decoding steps with and
/// without a batch have. In `tn` and `nt` the first or the second operand is stored transposed.
const PRODUCTS: &[(&str, &[[usize; 3]])] = &[
    ("nn", &[[512, 512, 512], [1024, 1024, 1024], [2048, 2048, 2048]]),
    ("nn", &[[768, 128, 384], [768, 128, 512], [768, 512, 128], [768, 128, 65]]),
    ("nn", &[[1024, 384, 1152], [1024, 384, 1536], [1024, 1536, 384], [1024, 384, 65]]),
    ("tn", &[[128, 768, 512], [512, 768, 128], [384, 1024, 1536], [1536, 1024, 384]]),
    ("nt", &[[768, 512, 128], [768, 128, 512], [1024, 1536, 384], [1024, 384, 1536]]),
    ("nn", &[[1, 2048, 2048], [8, 1024, 1024], [2048, 2048, 1], [2048, 2048, 4], [2048, 2048, 8]]),
    ("nt", &[[1, 2048, 2048], [2, 2048, 2048], [4, 2048, 2048], [8, 2048, 2048], [1, 1000, 3000]]),
    ("nn bf16", &[[512, 512, 512], [1, 2048, 2048], [8, 2048, 2048], [2048, 2048, 1]]),
    ("nt bf16", &[[512, 512, 512], [1, 2048, 2048], [4, 2048, 2048], [8, 2048, 2048]]),
];

fn products(mesh: &DeviceMesh, bench: &OperatorBench) -> Result<()> {
    let cases = PRODUCTS.iter().flat_map(|(kind, shapes)| shapes.iter().map(move |&shape| (*kind, shape)));
    for (kind, [m, k, n]) in cases {
        let dtype = if kind.ends_with("bf16") { DType::BF16 } else { DType::F32 };
        let put = |t: Tensor| DTensor::distribute(mesh, &t.cast(dtype)?, Layout::replicated(0));
        let stored = |shape: [usize; 2], turned: bool| match turned {
            true => put(noise([shape[1], shape[0]]))?.transpose(0, 1),
            false => put(noise(shape)),
        };
        let (a, b) = (stored([m, k], kind.starts_with("tn"))?, stored([k, n], kind.starts_with("nt"))?);
        let flops = 2.0 * (m * k * n) as f64;
        bench.case(&format!("matmul {m}x{k}x{n} {kind}"), "GFLOP/s", flops, || a.matmul(&b))?;
    }
    Ok(())
}

/// Adds to each of 64 tensors of 4,096 elements, under one dispatch.
fn foreach(mesh: &DeviceMesh, bench: &OperatorBench) -> Result<()> {
    let put = |_| DTensor::distribute(mesh, &noise([4096]), Layout::replicated(0));
    let x: Vec<DTensor> = (0..64).map(put).collect::<Result<_>>()?;
    bench.case("foreach_add", "GB/s", (3 * 64 * 4 * 4096) as f64, || DTensor::foreach_add(x.clone(), &x))
}

/// Reduces rows whose length is no multiple of a vector's; they are larger than most caches.
fn odd_rows(mesh: &DeviceMesh, bench: &OperatorBench) -> Result<()> {
    let x = DTensor::distribute(mesh, &noise([16_777, 1000]), Layout::replicated(0))?;
    let bytes = x.local().len_bytes() as f64;
    let reductions = ["argmax", "max", "mean", "norm 2", "prod", "sum"];
    for (name, f) in ALONG.iter().filter(|(name, _)| reductions.contains(name)) {
        bench.case(&format!("{name} 16777x1000"), "GB/s", bytes, || f(&x))?;
    }
    Ok(())
}

/// Sorts whole rows, few and long or many and short; counts elements.
fn ordering(mesh: &DeviceMesh, bench: &OperatorBench) -> Result<()> {
    let put = |t: Tensor| DTensor::distribute(mesh, &t, Layout::replicated(0));
    for [rows, n] in [[64, 4096], [1, 1 << 20]] {
        let x = put(noise([rows, n]))?;
        bench.case(&format!("sort {rows}x{n}"), "Gelem/s", (rows * n) as f64, || x.sort(1, false))?;
    }
    let x = put(noise([512, 32000]))?;
    for k in [8, 50] {
        bench.case(&format!("topk {k} of 512x32000"), "Gelem/s", 512.0 * 32000.0, || x.topk(k, 1, true))?;
    }
    Ok(())
}

/// Reads and adds by index: whole rows as an embedding does, and single elements; counts elements of the index.
fn by_index(mesh: &DeviceMesh, bench: &OperatorBench) -> Result<()> {
    let put = |t: Tensor| DTensor::distribute(mesh, &t, Layout::replicated(0));
    let entries = |len: usize, n: usize| -> Result<Tensor> {
        let mixed = |e: usize| (e.wrapping_mul(2_654_435_761) >> 7) % n;
        Tensor::from_vec((0..len).map(|e| mixed(e) as i64).collect(), [len])
    };
    for rows in [1000, 32000] {
        let (table, src, all) = (put(noise([rows, 768]))?, put(noise([8192, 768]))?, 8192.0 * 768.0);
        let row = put(entries(8192, rows)?)?;
        let index = put(entries(8192, rows)?.reshape([8192, 1])?)?.expand([8192, 768])?;
        let zeros = put(Tensor::zeros(DType::F32, [rows, 768]))?;
        bench.case(&format!("gather of {rows} rows"), "Gelem/s", all, || table.gather(0, &index))?;
        bench
            .case(&format!("index_select of {rows} rows"), "Gelem/s", all, || table.index_select(0, &row))?;
        bench
            .case(&format!("index_add to {rows} rows"), "Gelem/s", all, || zeros.index_add(0, &row, &src))?;
        bench.case(&format!("scatter_add to {rows} rows"), "Gelem/s", all, || {
            src.scatter_add(0, &index, rows)
        })?;
    }
    let (x, all) = (put(noise([512, 4096]))?, 512.0 * 4096.0);
    let index = put(entries(512 * 4096, 4096)?.reshape([512, 4096])?)?;
    bench.case("gather elements", "Gelem/s", all, || x.gather(1, &index))?;
    bench.case("scatter elements", "Gelem/s", all, || x.scatter(1, &index, &x))?;
    bench.case("scatter_add elements", "Gelem/s", all, || x.scatter_add(1, &index, 4096))
}

/// Returns numbers in (0, 1).
fn noise<const N: usize>(shape: [usize; N]) -> Tensor {
    Tensor::build(shape, |out: &mut [f32]| {
        for (i, x) in out.iter_mut().enumerate() {
            *x = ((i.wrapping_mul(2_654_435_761) >> 7 & 0xffff) as f32 + 0.5) / 65536.0;
        }
    })
}
