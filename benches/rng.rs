//! Measures random fills on one core, in gigabytes of output per second.
//!
//! `cargo bench --bench rng`, with `-- --json` for one JSON line per case, `-- --cached` for 1 MiB of output, which
//! stays in the cache, instead of 64 MiB, `-- --avx2` for narrower vectors. Each value is the best of several runs. The last lines compare a shard of
//! every row with a whole tensor, per element.

use std::hint::black_box;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use isoshard::ops::cpu::{dropout, dropout_in_place};
use isoshard::ops::{Multinomial, Unkeyed, eval_whole};
use isoshard::placement::Region;
use isoshard::rng::{
    Count, Draw, Generator, IndexRanges, Init, Permutation, RandomFloat, bernoulli, bernoulli_each, bits32,
    exponential, exponential_each, gamma, gamma_each, log_normal, normal, poisson, poisson_each, uniform,
    uniform_between, uniform_int,
};
use isoshard::tensor::cpu::{Isa, with_isa};
use isoshard::tensor::{DType, Dims, Shape, Tensor};

fn main() {
    if std::env::args().any(|a| a == "--avx2") {
        return with_isa(Isa::Avx2, measure);
    }
    measure();
}

fn measure() {
    let flag = |name: &str| std::env::args().any(|a| a == name);
    let bytes = if flag("--cached") { 1 << 20 } else { 64 << 20 };
    let report = Report { json: flag("--json") };
    let draw = Generator::new(1).next_draw();
    report.rate("bits32", bytes, || 0u32, |out| bits32(draw, 0, out));
    floats::<f32>("f32", bytes, &report);
    floats::<f64>("f64", bytes, &report);
    floats::<f16>("f16", bytes, &report);
    floats::<bf16>("bf16", bytes, &report);
    whole_numbers(bytes, &report);
    rejections(bytes, &report);
    parameters(bytes, &report);
    rows_of_weights(&report);
    cut_rows(bytes, &report);
    let order = Permutation::new(draw, 1_000_003);
    let mut indices = vec![0u64; 4096];
    let seconds = best_seconds(&mut || order.fill(500_000, black_box(&mut indices)).expect("inside"));
    report.line("permutation", seconds / indices.len() as f64 * 1e9, "ns/index");
}

struct Report {
    json: bool,
}

impl Report {
    fn line(&self, case: &str, value: f64, unit: &str) {
        if self.json {
            println!("{{\"bench\":\"rng\",\"case\":\"{case}\",\"value\":{value:.3},\"unit\":\"{unit}\"}}");
        } else {
            println!("{case:<40} {value:>8.2} {unit}");
        }
    }

    /// Times a fill of elements of this many bytes.
    fn rate<T: Clone>(
        &self,
        case: &str,
        bytes: usize,
        value: impl Fn() -> T,
        mut fill: impl FnMut(&mut [T]),
    ) {
        let mut out = vec![value(); bytes / size_of::<T>()];
        let seconds = best_seconds(&mut || fill(black_box(&mut out)));
        self.line(case, bytes as f64 / seconds / 1e9, "GB/s");
    }
}

fn floats<T: RandomFloat>(name: &str, bytes: usize, report: &Report) {
    let draw = Generator::new(1).next_draw();
    let rate = |case: &str, fill: &dyn Fn(&mut [T])| {
        report.rate(&format!("{case} {name}"), bytes, T::default, fill);
    };
    let x = vec![T::from_f64(1.5); bytes / size_of::<T>()];
    rate("uniform", &|out| uniform(draw, 0, out));
    rate("uniform_between", &|out| uniform_between(draw, 0, -1.0, 1.0, out).expect("sound"));
    rate("normal", &|out| normal(draw, 0, out));
    rate("log_normal", &|out| log_normal(draw, 0, 0.0, 1.0, out).expect("sound"));
    rate("exponential", &|out| exponential(draw, 0, 2.0, out).expect("sound"));
    rate("dropout, mask and scale", &|out| dropout(draw, 0, 0.1, black_box(&x), out).expect("sound"));
    rate("dropout in place", &|out| dropout_in_place(draw, 0, 0.1, out).expect("sound"));
    let truncated = Init::TruncatedNormal { mean: 0.0, std: 0.02, low: -0.04, high: 0.04 };
    rate("truncated normal, 2 std", &|out| {
        truncated.fill(draw, &[out.len()], 0, out).expect("sound");
    });
}

/// Times masks and integers. A mask has one byte per element; its second rate counts the bytes of the f32 elements that
/// it masks.
fn whole_numbers(bytes: usize, report: &Report) {
    let draw = Generator::new(1).next_draw();
    let mut mask = vec![false; bytes / 4];
    let seconds = best_seconds(&mut || bernoulli(draw, 0, 0.1, black_box(&mut mask)).expect("sound"));
    report.line("bernoulli, bytes of mask", bytes as f64 / 4.0 / seconds / 1e9, "GB/s");
    report.line("bernoulli, as if f32", bytes as f64 / seconds / 1e9, "GB/s");
    let int = "wants a range";
    report.rate("integers i32, 0 to 10", bytes, || 0i32, |out| uniform_int(draw, 0, 0, 10, out).expect(int));
    report.rate("integers i64, 0 to 10", bytes, || 0i64, |out| uniform_int(draw, 0, 0, 10, out).expect(int));
    report.rate("integers u8, 0 to 10", bytes, || 0u8, |out| uniform_int(draw, 0, 0, 10, out).expect(int));
    report.rate(
        "integers i32, 0 to 2^31 - 1",
        bytes,
        || 0i32,
        |out| uniform_int(draw, 0, 0, (1 << 31) - 1, out).expect(int),
    );
    report.rate(
        "integers i64, 0 to 2^60",
        bytes,
        || 0i64,
        |out| uniform_int(draw, 0, 0, 1 << 60, out).expect(int),
    );
}

fn rejections(bytes: usize, report: &Report) {
    fn gammas<T: RandomFloat>(draw: Draw, bytes: usize, report: &Report) {
        for shape in [0.5, 1.0, 10.0] {
            let case = format!("gamma {shape} {}", T::DTYPE);
            report.rate(&case, bytes, T::default, |out| gamma(draw, 0, shape, 1.0, out).expect("sound"));
        }
    }
    fn counts<T: Count>(draw: Draw, bytes: usize, report: &Report) {
        for rate in [1.0, 5.0, 20.0, 1000.0] {
            let case = format!("poisson {rate} {}", T::DTYPE);
            report.rate(&case, bytes, T::default, |out| poisson(draw, 0, rate, out).expect("sound"));
        }
    }
    let draw = Generator::new(1).next_draw();
    gammas::<f32>(draw, bytes, report);
    gammas::<f64>(draw, bytes, report);
    counts::<f32>(draw, bytes, report);
    counts::<i64>(draw, bytes, report);
}

fn parameters(bytes: usize, report: &Report) {
    let draw = Generator::new(1).next_draw();
    let params: Vec<f32> = (0..bytes / 4).map(|i| (i % 8) as f32 / 8.0 + 0.125).collect();
    let mut mask = vec![false; bytes / 4];
    let seconds = best_seconds(&mut || {
        bernoulli_each(draw, 0, black_box(&params), black_box(&mut mask)).expect("sound");
    });
    report.line("bernoulli of a tensor, as if f32", bytes as f64 / seconds / 1e9, "GB/s");
    let rate = |case: &str, fill: &dyn Fn(&mut [f32])| report.rate(case, bytes, || 0f32, fill);
    rate("exponential of a tensor f32", &|out| {
        exponential_each(draw, 0, black_box(&params), out).expect("sound");
    });
    rate("gamma of a tensor f32", &|out| gamma_each(draw, 0, black_box(&params), out).expect("sound"));
    rate("poisson of a tensor f32", &|out| poisson_each(draw, 0, black_box(&params), out).expect("sound"));
}

fn rows_of_weights(report: &Report) {
    let draw = Unkeyed(Generator::new(1).next_draw());
    let (rows, k) = (64, 50_000);
    let weights = (0..rows * k).map(|i| ((i * 7919) % 1000) as f32 + 1.0).collect();
    let weights = Tensor::from_vec(weights, [rows, k]).expect("as many");
    assert_eq!(weights.dtype(), DType::F32);
    for (samples, replacement) in [(1, true), (100, true), (1, false), (100, false)] {
        let op = Multinomial { samples, replacement, draw };
        let weights = std::slice::from_ref(&weights);
        let seconds = best_seconds(&mut || drop(black_box(eval_whole(&op, weights).expect("sound"))));
        let how = if replacement { "with" } else { "without" };
        let case = format!("multinomial, {samples} of {k} {how} replacement");
        report.line(&case, seconds / (rows * k) as f64 * 1e9, "ns/weight");
    }
}

/// Compares a shard of every row with a whole tensor: the ratio of the times per element.
fn cut_rows(bytes: usize, report: &Report) {
    let draw = Generator::new(1).next_draw();
    let mut out = vec![0f32; bytes / 4];
    let mut ratio = |case: &str, width: usize, fill: &dyn Fn(IndexRanges<'_>, &mut [f32])| {
        // Half of each row, from an odd index on.
        let rows = out.len() / width;
        let shape = Shape::from([rows, 2 * width]);
        let half = Region::of_box(Dims::from_slice(&[0, width - 1]), [rows, width].into());
        let mut seconds = |region: Region| {
            let out = &mut out[..region.numel()];
            best_seconds(&mut || {
                let out = black_box(&mut *out);
                let filled = IndexRanges::of(&region, &shape, |at, here| {
                    fill(at, &mut out[here]);
                    Ok(())
                });
                filled.expect("sound");
                black_box(out);
            })
        };
        let whole = seconds(Region::of_box(Dims::from_slice(&[0, 0]), [rows / 2, 2 * width].into()));
        let cut = seconds(half);
        report.line(&format!("{case}, {width} of rows of {}", 2 * width), cut / whole, "of the whole's cost");
    };
    for width in [12, 48, 384, 4096] {
        ratio("uniform f32", width, &|at, out| uniform(draw, at, out));
        ratio("normal f32", width, &|at, out| normal(draw, at, out));
        ratio("dropout f32", width, &|at, out| dropout_in_place(draw, at, 0.1, out).expect("sound"));
        ratio("gamma f32", width, &|at, out| gamma(draw, at, 2.0, 1.0, out).expect("sound"));
    }
}

fn best_seconds(run: &mut dyn FnMut()) -> f64 {
    run();
    let began = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while runs < 3 || began.elapsed() < Duration::from_millis(150) {
        let one = Instant::now();
        run();
        best = best.min(one.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}
