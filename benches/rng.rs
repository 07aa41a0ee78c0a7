//! Random fills on one core: gigabytes of output a second, from a buffer that stays in the cache.
//!
//! `cargo bench --bench rng`, with `-- --json` for one JSON line a case. Best of many runs of 1 MiB.

use std::hint::black_box;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use isoshard::rng::{
    Generator, Init, Permutation, Real, bits32, dropout, dropout_in_place, keep, normal, uniform,
};

const BYTES: usize = 1 << 20;

fn main() {
    let json = std::env::args().any(|a| a == "--json");
    let draw = Generator::new(1).next_draw();
    let report = |case: &str, value: f64, unit: &str| {
        if json {
            println!("{{\"bench\":\"rng\",\"case\":\"{case}\",\"value\":{value:.3},\"unit\":\"{unit}\"}}");
        } else {
            println!("{case:<36} {value:>8.2} {unit}");
        }
    };
    let rate =
        |case: &str, run: &mut dyn FnMut()| report(case, BYTES as f64 / best_seconds(run) / 1e9, "GB/s");

    let mut words = vec![0u32; BYTES / 4];
    rate("bits32", &mut || bits32(draw, 0, black_box(&mut words)));
    floats::<f32>("f32", &rate);
    floats::<f64>("f64", &rate);
    floats::<f16>("f16", &rate);
    floats::<bf16>("bf16", &rate);
    let mut mask = vec![false; BYTES];
    rate("keep", &mut || keep(draw, 0, 0.1, black_box(&mut mask)).expect("p is a probability"));

    let mut x = vec![0f32; BYTES / 4];
    rate("normal f32, unaligned start", &mut || normal(draw, (1 << 33) + 3, black_box(&mut x)));
    rate("normal f32, rows of 48 of 96", &mut || {
        for (row, x) in x.chunks_mut(48).enumerate() {
            normal(draw, row as u64 * 96 + 48, black_box(x));
        }
    });
    let shape = [x.len()];
    let truncated = Init::TruncatedNormal { mean: 0.0, std: 0.02, low: -0.04, high: 0.04 };
    rate("truncated normal f32, 2 std", &mut || {
        truncated.fill(draw, &shape, 0, black_box(&mut x)).expect("sound");
    });

    let order = Permutation::new(draw, 1_000_003);
    let mut indices = vec![0u64; 4096];
    let seconds = best_seconds(&mut || order.fill(500_000, black_box(&mut indices)).expect("inside"));
    report("permutation", seconds / indices.len() as f64 * 1e9, "ns/index");
}

fn floats<T: Real>(name: &str, rate: &dyn Fn(&str, &mut dyn FnMut())) {
    let draw = Generator::new(1).next_draw();
    let len = BYTES / T::DTYPE.size_bytes();
    let mut out = vec![T::default(); len];
    let x = vec![T::from_f64(1.5); len];
    rate(&format!("uniform {name}"), &mut || uniform(draw, 0, black_box(&mut out)));
    rate(&format!("normal {name}"), &mut || normal(draw, 0, black_box(&mut out)));
    rate(&format!("dropout {name}"), &mut || {
        dropout(draw, 0, 0.1, black_box(&x), black_box(&mut out)).expect("p is a probability");
    });
    rate(&format!("dropout in place {name}"), &mut || {
        dropout_in_place(draw, 0, 0.1, black_box(&mut out)).expect("p is a probability");
    });
}

fn best_seconds(run: &mut dyn FnMut()) -> f64 {
    run();
    let began = Instant::now();
    let mut best = f64::INFINITY;
    while began.elapsed() < Duration::from_millis(150) {
        let one = Instant::now();
        run();
        best = best.min(one.elapsed().as_secs_f64());
    }
    best
}
