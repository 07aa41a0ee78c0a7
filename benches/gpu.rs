//! Measures the kernels and training steps on a CUDA device: a table, or with `-- --json` one JSON object per line.
//! `cargo bench --features cuda --bench gpu [-- --json] [--case=TEXT] [PART ...]`. PART is one of kernels, random, attention,
//! matmul, host and steps; without PART all are measured. TEXT leaves out the cases whose names do not have it.
//!
//! `benches/torch/gpu.py` has the same cases under the same names, and `benches/torch/compare.py` prints both beside
//! the targets. Rates count the bytes that any implementation must read and write once. Times are of batches of calls
//! between two synchronisations, the best of several batches; a step's time is the median. Without a CUDA device the
//! bench prints that it measures nothing.

use std::time::Instant;

use isoshard::Result;
use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::nn::{Forward, Gpt, GptConfig, Params, Plan};
use isoshard::ops::{Attention, LayerNorm, Max, Op, SumExp};
use isoshard::ops::{AttentionGrad, Bits, CrossEntropyGrad, LayerNormGrad, ScoreRule, SoftmaxGrad, Unkeyed};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::placement::{Layout, Placement};
use isoshard::rng::{Distribution, Draw, Generator};
use isoshard::tensor::cuda::{self, Gpu};
use isoshard::tensor::{DType, Device, Tensor};

/// The parts of the bench, by name.
type Part = (&'static str, fn(&Bench) -> Result<()>);

const PARTS: [Part; 6] = [
    ("kernels", kernels),
    ("random", random),
    ("attention", attention),
    ("matmul", matmul),
    ("host", host),
    ("steps", steps),
];

/// The kinds of matrix products: name, dtype, kind of sums, and whether f32 operands may be rounded to tf32.
const KINDS: [(&str, DType, Reduction, bool); 5] = [
    ("f32", DType::F32, Reduction::Fast, false),
    ("tf32", DType::F32, Reduction::Fast, true),
    ("bf16", DType::BF16, Reduction::Fast, false),
    ("f32 exact", DType::F32, Reduction::Exact, false),
    ("bf16 exact", DType::BF16, Reduction::Exact, false),
];
const DTYPES: [(&str, DType); 2] = [("f32", DType::F32), ("bf16", DType::BF16)];
const ROWS: usize = 16384;
const COLS: usize = 4096;
const DRAW: Draw = Draw { seed: 1, number: 0 };
const GPU: Device = Device::Cuda(0);

/// A model to train: its name, sizes, sequences per batch, and the steps of a timed run.
#[derive(Clone, Copy)]
struct Size {
    name: &'static str,
    layers: usize,
    heads: usize,
    width: usize,
    block: usize,
    batch: usize,
    vocabulary: usize,
    steps: usize,
}

const NANO: Size =
    Size { name: "nano", layers: 4, heads: 4, width: 128, block: 64, batch: 12, vocabulary: 65, steps: 20 };
const BABY: Size =
    Size { name: "baby", layers: 6, heads: 6, width: 384, block: 256, batch: 64, vocabulary: 65, steps: 5 };
const GPT2: Size = Size {
    name: "gpt2",
    layers: 12,
    heads: 12,
    width: 768,
    block: 1024,
    batch: 16,
    vocabulary: 50304,
    steps: 3,
};

/// The results of the bench, with this rank's mesh.
#[derive(Clone)]
struct Bench {
    json: bool,
    /// A part of the names of the cases that are measured.
    case: String,
    mesh: DeviceMesh,
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let json = args.iter().any(|a| a == "--json");
    let case = args.iter().find_map(|a| a.strip_prefix("--case=")).unwrap_or_default().to_owned();
    let parts: Vec<&String> = args.iter().filter(|a| !a.starts_with("--")).collect();
    if let Some(reason) = cuda::unavailable_reason() {
        println!("SKIPPED (no CUDA device): {reason}; {} parts", PARTS.len());
        return Ok(());
    }
    cuda::set_checked(false);
    for (name, part) in PARTS {
        if !parts.is_empty() && !parts.iter().any(|p| *p == name) {
            continue;
        }
        let ranks = if name == "random" { 4 } else { 1 };
        let case = case.clone();
        let ran = spmd(ranks, move |rank: Rank| {
            let axes: &[(&str, usize)] = if ranks == 1 { &[] } else { &[("x", ranks)] };
            let rank = rank.on(GPU);
            let mesh = DeviceMesh::new(&rank, axes)?;
            // Random numbers need no communication: one rank is timed while no other rank uses the device.
            if rank.rank() == 0 { part(&Bench { json, case: case.clone(), mesh }) } else { Ok(()) }
        });
        // A part that fails must not cost the numbers of the other parts.
        if let Err(error) = ran {
            println!(
                r#"{{"bench":"gpu","side":"isoshard","failed":"{name}","why":{:?}}}"#,
                error.to_string()
            );
        }
    }
    Ok(())
}

fn kernels(bench: &Bench) -> Result<()> {
    let x = bench.noise(&[ROWS, COLS], DType::F32)?;
    let size = x.local().len_bytes() as f64;
    bench.gigabytes("copy f32", 2.0 * size, || x.local().to_owned_copy())?;
    for (name, dtype) in DTYPES {
        let (x, y) = (bench.noise(&[ROWS, COLS], dtype)?, bench.noise(&[ROWS, COLS], dtype)?);
        let w = bench.noise(&[COLS], dtype)?;
        let size = x.local().len_bytes() as f64;
        let case = |what: &str| format!("{what} {name}");
        bench.gigabytes(&case("add"), 3.0 * size, || x.add(&y))?;
        bench.gigabytes(&case("add row"), 2.0 * size, || x.add(&w))?;
        bench.gigabytes(&case("gelu"), 2.0 * size, || x.gelu())?;
        bench.gigabytes(&case("gelu_tanh"), 2.0 * size, || x.gelu_tanh())?;
        let turned = x.local().transpose(0, 1)?;
        bench.gigabytes(&case("transpose"), 2.0 * size, || turned.contiguous())?;
        bench.gigabytes(&case("softmax"), 2.0 * size, || x.softmax(-1))?;
        let s = x.softmax(-1)?;
        bench
            .gigabytes(&case("softmax backward"), 3.0 * size, || apply(&SoftmaxGrad { dim: 1 }, &[&s, &y]))?;
        bench.gigabytes(&case("layer_norm"), 2.0 * size, || x.layer_norm(&w, None, 1e-5))?;
        let norm = apply(&LayerNorm { eps: Bits(1e-5), weight: true, bias: false }, &[&x, &w])?;
        let backward = || {
            apply(
                &LayerNormGrad { eps: Bits(1e-5), weight: true, bias: false },
                &[&y, &x, &w, &norm[1], &norm[2]],
            )
        };
        bench.gigabytes(&case("layer_norm backward"), 3.0 * size, backward)?;
        bench.gigabytes(&case("rms_norm"), 2.0 * size, || x.rms_norm(&w, 1e-6))?;
        bench.gigabytes(&case("sum all"), size, || x.sum_all())?;
        bench.gigabytes(&case("sum dim 0"), size, || x.sum(&[0], false))?;
        bench.gigabytes(&case("sum dim 1"), size, || x.sum(&[1], false))?;
        losses(bench, name, dtype)?;
        let x = bench.noise(&[8, 32, 2048, 128], dtype)?;
        bench.gigabytes(&case("rotary"), 2.0 * x.local().len_bytes() as f64, || x.rotary(1e4, 0))?;
    }
    adamw(bench)
}

fn losses(bench: &Bench, name: &str, dtype: DType) -> Result<()> {
    let (rows, classes) = (8192, 50304);
    let logits = bench.noise(&[rows, classes], dtype)?;
    let size = logits.local().len_bytes() as f64;
    let target = bench.whole(&Tensor::build([rows], |out: &mut [i64]| {
        out.iter_mut().enumerate().for_each(|(i, t)| *t = (i * 7919 % classes) as i64);
    }))?;
    bench.gigabytes(&format!("cross_entropy {name}"), size, || logits.cross_entropy(&target))?;
    let m = &apply(&Max { dims: [1].into_iter().collect(), keep: true }, &[&logits])?[0];
    let s = &apply(&SumExp, &[&logits, m])?[0];
    let dy = bench.noise(&[rows], DType::F32)?;
    let backward = || apply(&CrossEntropyGrad::default(), &[&logits, &target, m, s, &dy]);
    bench.gigabytes(&format!("cross_entropy backward {name}"), 2.0 * size, backward)
}

/// Times one optimizer step on the parameters of GPT-2, which reads p, g, m, v and writes p, m, v.
fn adamw(bench: &Bench) -> Result<()> {
    let case = "adamw 124M f32";
    if !bench.wants(case) {
        return Ok(());
    }
    let mut params = Params::new(&bench.mesh, Plan::default(), 1)?;
    Gpt::new(&mut params, GPT2.config())?;
    let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1);
    let scale = bench.whole(&Tensor::scalar(1.0f32))?;
    let moved = 28.0 * params.numel() as f64;
    let gpu = Gpu::get(0)?;
    let mut best = f64::INFINITY;
    for _ in 0..6 {
        let ones = params.ids().map(|id| params.value(id).sum_all()).collect::<Result<Vec<_>>>()?;
        let mut sum = ones[1..].iter().try_fold(ones[0].clone(), |a, b| a.add(b))?;
        let mut grads = sum.backward()?;
        gpu.synchronize()?;
        let began = Instant::now();
        optimizer.step(&mut params, &mut grads, &scale, 1e-3)?;
        gpu.synchronize()?;
        best = best.min(began.elapsed().as_secs_f64());
    }
    bench.report(case, moved / best / 1e9, "GB/s");
    Ok(())
}

/// Times the same number of elements on this rank, as a whole tensor or as one shard of four.
fn random(bench: &Bench) -> Result<()> {
    let layouts = [
        ("whole", [ROWS, COLS], Placement::Replicate),
        ("rows of 4 ranks", [4 * ROWS, COLS], Placement::Shard(0)),
        ("columns of 4 ranks", [ROWS, 4 * COLS], Placement::Shard(1)),
    ];
    for (name, dtype) in DTYPES {
        let size = (ROWS * COLS * dtype.size_bytes()) as f64;
        for (place, shape, placement) in &layouts {
            let case = |what: &str| format!("{what} {place} {name}");
            let layout = Layout::new([placement.clone()]);
            let drawn = |of| DTensor::random(&bench.mesh, dtype, *shape, layout.clone(), of, DRAW);
            bench.gigabytes(&case("uniform"), size, || drawn(Distribution::UNIT))?;
            bench.gigabytes(&case("normal"), size, || drawn(Distribution::STANDARD))?;
            let x = drawn(Distribution::STANDARD)?;
            bench.gigabytes(&case("dropout"), 2.0 * size, || x.dropout(0.1, DRAW))?;
        }
    }
    Ok(())
}

fn attention(bench: &Bench) -> Result<()> {
    let cases = [
        ("16x12x1024x64 bf16", [16, 12, 1024, 64], DType::BF16),
        ("4x16x4096x128 bf16", [4, 16, 4096, 128], DType::BF16),
        ("16x12x1024x64 f32", [16, 12, 1024, 64], DType::F32),
    ];
    let rule = ScoreRule::CAUSAL;
    for (name, [b, h, t, d], dtype) in cases {
        let part = || bench.noise(&[b, t, h, d], dtype)?.permute(&[0, 2, 1, 3]);
        let (q, k, v) = (part()?, part()?, part()?);
        let (scale, p, draw) = (Bits(1.0 / (d as f64).sqrt()), Bits(0.0), Unkeyed(DRAW));
        // A causal mask leaves half of two products of t x t x d.
        let flops = 2.0 * (b * h * t * t * d) as f64;
        let op = Attention { scale, p, q_offset: None, draw, rule };
        for (mode, label) in [(Reduction::Fast, ""), (Reduction::Exact, " exact")] {
            bench.mesh.set_reduction(mode);
            bench.teraflops(&format!("attention {name}{label}"), flops, || apply(&op, &[&q, &k, &v]))?;
            let out = apply(&op, &[&q, &k, &v])?;
            let back = AttentionGrad { scale, p, q_offset: None, draw, rule };
            let backward = || apply(&back, &[&q, &k, &v, &out[0], &out[1], &out[0]]);
            bench.teraflops(&format!("attention backward {name}{label}"), 2.5 * flops, backward)?;
        }
    }
    Ok(())
}

fn matmul(bench: &Bench) -> Result<()> {
    for [m, k, n] in [[4096, 4096, 4096], [16384, 768, 3072], [16384, 768, 50304]] {
        for (name, dtype, mode, tf32) in KINDS {
            let (a, b) = (bench.noise(&[m, k], dtype)?, bench.noise(&[n, k], dtype)?);
            bench.mesh.set_reduction(mode);
            cuda::set_tf32(tf32);
            let product = || a.einsum("m k, n k -> m n", &b);
            bench.teraflops(&format!("matmul {m}x{k}x{n} {name}"), 2.0 * (m * k * n) as f64, product)?;
        }
    }
    Ok(())
}

/// Times the host's part of an operator, in microseconds, on tensors so small that their kernels take almost no time.
fn host(bench: &Bench) -> Result<()> {
    let gpu = Gpu::get(0)?;
    let [x, y, a, b] = [&[64][..], &[64], &[8, 8], &[8, 8]].map(|shape| bench.noise(shape, DType::F32));
    let (x, y, a, b) = (x?, y?, a?, b?);
    let gx = x.requires_grad()?;
    let each = |case: &str, call: &dyn Fn() -> Result<DTensor>| -> Result<()> {
        let case = format!("host {case}");
        if !bench.wants(&case) {
            return Ok(());
        }
        let mut times = Vec::new();
        for _ in 0..25 {
            gpu.synchronize()?;
            let began = Instant::now();
            (0..200).try_for_each(|_| call().map(drop))?;
            times.push(began.elapsed().as_secs_f64() / 200.0);
        }
        bench.report(&case, median(&mut times[5..]) * 1e6, "us/op");
        Ok(())
    };
    each("add", &|| x.add(&y))?;
    each("gelu", &|| x.gelu())?;
    each("matmul", &|| a.matmul(&b))?;
    each("sum", &|| x.sum_all())?;
    each("add with gradient", &|| gx.add(&y))
}

fn steps(bench: &Bench) -> Result<()> {
    for size in [NANO, BABY, GPT2] {
        for (name, dtype, mode, tf32) in KINDS {
            if size.name == "gpt2" && dtype == DType::F32 {
                continue;
            }
            bench.mesh.set_reduction(mode);
            cuda::set_tf32(tf32);
            train(bench, size, name, dtype)?;
        }
    }
    Ok(())
}

fn train(bench: &Bench, size: Size, kind: &str, dtype: DType) -> Result<()> {
    let case = format!("step {} {kind}", size.name);
    if !bench.wants(&case) {
        return Ok(());
    }
    let (mesh, gpu) = (&bench.mesh, Gpu::get(0)?);
    cuda::reset_memory_peaks(0)?;
    let mut params = Params::new(mesh, Plan::default(), 1)?;
    params.compute_in(dtype)?;
    let model = Gpt::new(&mut params, size.config())?;
    let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1);
    let mut generator = Generator::new(1);
    let text = |from: usize| {
        let tokens = (from..from + size.batch * size.block).map(|i| (i * i % size.vocabulary.min(65)) as i64);
        bench.whole(&Tensor::from_vec(tokens.collect(), [size.batch, size.block])?)
    };
    let (tokens, targets) = (text(0)?, text(1)?);
    let mut step = || -> Result<()> {
        let mut loss = model.loss(&Forward::train(&params, &mut generator), &tokens, &targets)?;
        let mut grads = loss.backward()?;
        let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
        optimizer.step(&mut params, &mut grads, &clip_scale(&norm, 1.0)?, 1e-3)
    };
    (0..5).try_for_each(|_| step())?;
    let mut times = Vec::new();
    for _ in 0..5 {
        gpu.synchronize()?;
        let began = Instant::now();
        (0..size.steps).try_for_each(|_| step())?;
        gpu.synchronize()?;
        times.push(began.elapsed().as_secs_f64() / size.steps as f64);
    }
    let rate = (size.batch * size.block) as f64 / median(&mut times);
    bench.report(&case, rate, "tokens/s");
    let peak = cuda::memory_stats(0)?.peak_live_bytes;
    bench.report(&format!("{case} memory"), peak as f64 / f64::from(1 << 20), "MiB");
    Ok(())
}

impl Size {
    fn config(self) -> GptConfig {
        let Size { layers, heads, width, block, vocabulary, .. } = self;
        GptConfig { vocabulary, block, layers, heads, width, dropout: 0.0, bias: false }
    }
}

impl Bench {
    /// Returns true if the case is measured.
    fn wants(&self, case: &str) -> bool {
        case.contains(&self.case)
    }

    fn gigabytes<R>(&self, case: &str, bytes: f64, call: impl FnMut() -> Result<R>) -> Result<()> {
        if !self.wants(case) {
            return Ok(());
        }
        self.report(case, bytes / best_s(call)? / 1e9, "GB/s");
        Ok(())
    }

    fn teraflops<R>(&self, case: &str, flops: f64, call: impl FnMut() -> Result<R>) -> Result<()> {
        if !self.wants(case) {
            return Ok(());
        }
        self.report(case, flops / best_s(call)? / 1e12, "TFLOP/s");
        Ok(())
    }

    fn report(&self, case: &str, value: f64, unit: &str) {
        if self.json {
            println!(
                r#"{{"bench":"gpu","side":"isoshard","case":"{case}","value":{value:.4},"unit":"{unit}"}}"#
            );
        } else {
            println!("{case:<44}{value:>14.2} {unit}");
        }
    }

    /// Returns standard normal numbers.
    fn noise(&self, shape: &[usize], dtype: DType) -> Result<DTensor> {
        DTensor::randn(&self.mesh, dtype, shape, Layout::replicated(self.mesh.mesh().ndim()), DRAW)
    }

    fn whole(&self, x: &Tensor) -> Result<DTensor> {
        DTensor::distribute(&self.mesh, x, Layout::replicated(self.mesh.mesh().ndim()))
    }
}

fn apply(op: &dyn Op, ins: &[&DTensor]) -> Result<Vec<DTensor>> {
    Ok(DTensor::apply(op, ins)?.into_iter().collect())
}

/// Returns the shortest time per call, over five batches that are synchronised once each.
fn best_s<R>(mut call: impl FnMut() -> Result<R>) -> Result<f64> {
    let gpu = Gpu::get(0)?;
    call()?;
    gpu.synchronize()?;
    let once = Instant::now();
    call()?;
    gpu.synchronize()?;
    let calls = (0.03 / once.elapsed().as_secs_f64().max(1e-6)) as usize;
    let calls = calls.clamp(1, 50);
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let began = Instant::now();
        (0..calls).try_for_each(|_| call().map(drop))?;
        gpu.synchronize()?;
        best = best.min(began.elapsed().as_secs_f64() / calls as f64);
    }
    Ok(best)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
