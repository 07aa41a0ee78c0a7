//! Measures operators on one thread, as methods of `DTensor` on one rank: a table, or with `-- --json` one JSON object
//! per line. `benches/torch/operators.py` prints PyTorch's numbers under the same names, and
//! `benches/torch/compare.py` puts both side by side:
//!
//! ```text
//! cargo bench --bench operators -- --json > ours.jsonl; python3 benches/torch/operators.py > theirs.jsonl
//! python3 benches/torch/compare.py ours.jsonl theirs.jsonl
//! ```
//!
//! A rate counts the bytes of operands and results once. Each value is the best of several runs.

use std::time::Instant;

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::Layout;
use isoshard::tensor::{DType, Tensor};

/// A function of one tensor.
type Unary = fn(&DTensor) -> Result<DTensor>;

/// Functions of elements, which get numbers in (0, 1).
const POINTWISE: &[(&str, Unary)] = &[
    ("abs", |x| x.abs()),
    ("exp", |x| x.exp()),
    ("gelu", |x| x.gelu()),
    ("gelu_tanh", |x| x.gelu_tanh()),
    ("log", |x| x.log()),
    ("neg", |x| x.neg()),
    ("pow_scalar", |x| x.pow_scalar(1.7)),
    ("relu", |x| x.relu()),
    ("rsqrt", |x| x.rsqrt()),
    ("sigmoid", |x| x.sigmoid()),
    ("silu", |x| x.silu()),
    ("sqrt", |x| x.sqrt()),
    ("tanh", |x| x.tanh()),
];

/// Functions along the last dim of `[4096, 1024]`.
const ALONG: &[(&str, Unary)] = &[
    ("argmax", |x| x.argmax(1)),
    ("log_softmax", |x| x.log_softmax(1)),
    ("max", |x| x.max(&[1], false)),
    ("mean", |x| x.mean(&[1], false)),
    ("softmax", |x| x.softmax(1)),
    ("sort", |x| x.sort(1, false).map(|(values, _)| values)),
    ("sum", |x| x.sum(&[1], false)),
    ("topk 8", |x| x.topk(8, 1, true).map(|(values, _)| values)),
];

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let json = args.iter().any(|a| a == "--json");
    let filter = args.into_iter().find(|a| !a.starts_with("--")).unwrap_or_default();
    spmd(1, move |rank| {
        let mesh = DeviceMesh::parse(&rank, "1")?;
        let _guard = mesh.no_grad();
        measure(&mesh, &OperatorBench { json, filter: filter.clone() })
    })?;
    Ok(())
}

/// Runs the cases whose names contain `filter`.
struct OperatorBench {
    json: bool,
    filter: String,
}

impl OperatorBench {
    /// Reports billions of `work` per second.
    fn case(&self, case: &str, unit: &str, work: f64, f: impl Fn() -> Result<DTensor>) -> Result<()> {
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
    let x = put(noise([4096, 1024]))?;
    let bytes = x.local().len_bytes() as f64;
    for (name, f) in POINTWISE {
        bench.case(name, "GB/s", 2.0 * bytes, || f(&x))?;
    }
    let y = put(noise([4096, 1024]))?;
    for (name, f) in [("add", DTensor::add as fn(&DTensor, &DTensor) -> _), ("mul", DTensor::mul)] {
        bench.case(name, "GB/s", 3.0 * bytes, || f(&x, &y))?;
    }
    for (name, f) in ALONG {
        bench.case(name, "GB/s", bytes, || f(&x))?;
    }
    let index = put(Tensor::build([4096, 256], |out: &mut [i64]| {
        out.iter_mut().enumerate().for_each(|(i, x)| *x = (i.wrapping_mul(2_654_435_761) >> 7 & 1023) as i64);
    }))?;
    let source = put(noise([4096, 256]))?;
    let moved = 2.0 * source.local().len_bytes() as f64;
    bench.case("gather", "GB/s", moved, || x.gather(1, &index))?;
    bench.case("scatter_add", "GB/s", moved, || source.scatter_add(1, &index, 1024))?;
    for keys in [64, 256, 1024, 4096] {
        let [q, k, v] = [(); 3].map(|()| put(noise([1, 4, keys, 64])));
        let (q, k, v) = (q?, k?, v?);
        // A causal mask leaves half of two products of keys x keys x 64 per head.
        let flops = 2.0 * (4 * keys * keys * 64) as f64;
        bench.case(&format!("attention {keys}"), "GFLOP/s", flops, || q.attention(&k, &v, 0.125))?;
    }
    bench.case("cast bf16", "GB/s", 1.5 * bytes, || x.cast(DType::BF16))
}

/// Returns numbers in (0, 1).
fn noise<const N: usize>(shape: [usize; N]) -> Tensor {
    Tensor::build(shape, |out: &mut [f32]| {
        for (i, x) in out.iter_mut().enumerate() {
            *x = ((i.wrapping_mul(2_654_435_761) >> 7 & 0xffff) as f32 + 0.5) / 65536.0;
        }
    })
}
