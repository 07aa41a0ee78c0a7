//! Random numbers: frozen, cut-invariant, what their definitions say, and as random as they should be.
//!
//! Seeds are fixed, so the statistical tests always give the same verdict; the rates stated are those at which a fresh
//! seed would fail them. To accept new frozen values (a breaking change): `BLESS=1 cargo test --test rng`.

use std::fmt::Write as _;

use half::{bf16, f16};
use isoshard::rng::{
    Draw, Generator, Init, Permutation, Real, Stream, bernoulli, bits32, bits64, dropout, normal, philox,
    uniform,
};
use isoshard::tensor::Float;
use rand_core::Rng;

const DRAW: Draw = Draw { seed: 0x0123_4567_89ab_cdef, number: 5 };

fn vec_of<T: Real>(len: usize, fill: impl FnOnce(&mut [T])) -> Vec<T> {
    let mut out = vec![T::default(); len];
    fill(&mut out);
    out
}

#[test]
fn streams_are_frozen() {
    let mut text =
        String::from("# The first values of each stream, as bits. Changing a line is a breaking change.\n");
    let mut line = |name: &str, values: Vec<String>| writeln!(text, "{name}: {}", values.join(" ")).unwrap();
    for (place, start) in [("0", 0u64), ("2^32+7", (1 << 32) + 7)] {
        let mut words = [0u32; 6];
        bits32(DRAW, start, &mut words);
        line(&format!("bits32 from {place}"), words.iter().map(|w| format!("{w:08x}")).collect());
        let mut pairs = [0u64; 6];
        bits64(DRAW, start, &mut pairs);
        line(&format!("bits64 from {place}"), pairs.iter().map(|w| format!("{w:016x}")).collect());
        macro_rules! floats {
            ($t:ty) => {{
                let mut case = |name: &str, fill: &dyn Fn(&mut [$t])| {
                    let width = 2 * size_of::<$t>();
                    let values = vec_of::<$t>(6, fill);
                    let values = values.iter().map(|x| format!("{:0width$x}", x.to_bits()));
                    line(&format!("{name} {} from {place}", stringify!($t)), values.collect());
                };
                let shape = [1 << 20, 1 << 20];
                let truncated = Init::TruncatedNormal { mean: 0.5, std: 2.0, low: 0.0, high: 1.0 };
                let kaiming = Init::KaimingUniform { gain: 1.0 };
                case("uniform", &|out| uniform(DRAW, start, out));
                case("normal", &|out| normal(DRAW, start, out));
                case("truncated", &|out| truncated.fill(DRAW, &shape, start, out).unwrap());
                case("kaiming", &|out| kaiming.fill(DRAW, &shape, start, out).unwrap());
                case("dropout", &|out| dropout(DRAW, start, 0.4, &[Float::narrow(1.1); 6], out).unwrap());
            }};
        }
        floats!(f32);
        floats!(f64);
        floats!(f16);
        floats!(bf16);
    }
    let seed = |g: Generator| vec![format!("{:016x}", g.seed())];
    line("child seed", seed(Generator::new(DRAW.seed).child("layers.0.weight")));
    let order = Permutation::new(DRAW, 1000);
    line("permutation of 1000", (0..6).map(|i| order.at(i).unwrap().to_string()).collect());

    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/rng.txt");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    let frozen = std::fs::read_to_string(path).unwrap();
    for (now, then) in text.lines().zip(frozen.lines()) {
        assert_eq!(now, then, "a frozen stream changed");
    }
    assert_eq!(text.lines().count(), frozen.lines().count());
}

#[test]
fn numbers_are_their_definitions() {
    let words = |block: u64| philox::block(DRAW.key(), DRAW.counter(block, 0));
    let word = |e: u64| words(e / 4)[(e % 4) as usize];
    let pair = |e: u64| {
        let (w, at) = (words(e / 2), 2 * (e % 2) as usize);
        u64::from(w[at]) | u64::from(w[at + 1]) << 32
    };
    for start in [0u64, 1, (1 << 40) + 3] {
        let (len, index) = (301, |i: usize| start + i as u64);
        let u32s = vec_of(len, |out: &mut [f32]| uniform(DRAW, start, out));
        let u64s = vec_of(len, |out: &mut [f64]| uniform(DRAW, start, out));
        let n32s = vec_of(len, |out: &mut [f32]| normal(DRAW, start, out));
        let n64s = vec_of(len, |out: &mut [f64]| normal(DRAW, start, out));
        for i in 0..len {
            let e = index(i);
            assert_eq!(f64::from(u32s[i]), f64::from(word(e) >> 8) / 2f64.powi(24));
            assert_eq!(u64s[i], (pair(e) >> 11) as f64 / 2f64.powi(53));
            let box_muller = |u: f64, v: f64| {
                let (sin, cos) = (std::f64::consts::TAU * v).sin_cos();
                (-2.0 * u.ln()).sqrt() * if e % 2 == 0 { cos } else { sin }
            };
            let (a, b) = (e & !1, e | 1);
            let want = box_muller(
                (f64::from(word(a)) + 0.5) / 2f64.powi(32),
                f64::from(word(b) >> 8) / 2f64.powi(24),
            );
            assert!((f64::from(n32s[i]) - want).abs() < 2e-6, "{} for {want}", n32s[i]);
            let u = ((pair(a) >> 11) as f64 + 0.5) / 2f64.powi(53);
            let want = box_muller(u, (pair(b) >> 11) as f64 / 2f64.powi(53));
            assert!((n64s[i] - want).abs() < 1e-14, "{} for {want}", n64s[i]);
        }
        let rounded = vec_of(len, |out: &mut [f16]| normal(DRAW, start, out));
        assert!(rounded.iter().zip(&n32s).all(|(&h, &x)| h == f16::from_f32(x)));
        let rounded = vec_of(len, |out: &mut [bf16]| uniform(DRAW, start, out));
        assert!(rounded.iter().zip(&u32s).all(|(&h, &x)| h == bf16::from_f32(x)));
    }
}

/// Fills `start..start + len` whole and in random pieces, and compares.
fn cuts_agree<T: Copy + Default + PartialEq + std::fmt::Debug>(fill: impl Fn(u64, &mut [T])) {
    let mut stream = Stream::new(Draw { seed: 77, number: 0 });
    for start in [0u64, 1, 2, 3, (1 << 32) - 100, (1 << 33) + 1, (1 << 62) + 5] {
        let mut whole = vec![T::default(); 700];
        fill(start, &mut whole);
        let mut pieces = vec![T::default(); 700];
        let mut at = 0;
        while at < pieces.len() {
            let longest = [3, 40, 300][stream.next_u32() as usize % 3];
            let end = pieces.len().min(at + stream.next_u32() as usize % longest);
            fill(start + at as u64, &mut pieces[at..end]);
            at = end;
        }
        assert_eq!(pieces, whole, "from {start}");
    }
}

#[test]
fn any_cut_gives_the_whole() {
    let truncated = Init::TruncatedNormal { mean: 0.0, std: 1.0, low: -1.0, high: 1.0 };
    let shape = [1 << 31, 1 << 31, 1];
    cuts_agree(|start, out: &mut [u32]| bits32(DRAW, start, out));
    cuts_agree(|start, out: &mut [u64]| bits64(DRAW, start, out));
    cuts_agree(|start, out: &mut [bool]| bernoulli(DRAW, start, 0.3, out).unwrap());
    macro_rules! floats {
        ($($t:ty)*) => {$(
            cuts_agree(|start, out: &mut [$t]| uniform(DRAW, start, out));
            cuts_agree(|start, out: &mut [$t]| normal(DRAW, start, out));
            cuts_agree(|start, out: &mut [$t]| {
                let x: Vec<$t> = (0..out.len()).map(|_| Float::narrow(1.5)).collect();
                dropout(DRAW, start, 0.3, &x, out).unwrap();
            });
            cuts_agree(|start, out: &mut [$t]| truncated.fill(DRAW, &shape, start % (1 << 61), out).unwrap());
        )*};
    }
    floats!(f32 f64 f16 bf16);
}

#[test]
fn empty_ranges_and_the_last_indices() {
    uniform::<f32>(DRAW, 9, &mut []);
    normal::<f64>(DRAW, u64::MAX, &mut []);
    let mut end = [0u32; 8];
    bits32(DRAW, u64::MAX - 7, &mut end);
    let mut last = [0u32; 1];
    bits32(DRAW, u64::MAX, &mut last);
    assert_eq!(end[7], last[0]);
}

const N: usize = 1 << 20;

/// |mean| in standard errors.
fn z_of_mean(x: impl Iterator<Item = f64>, mean: f64, variance: f64) -> f64 {
    let (sum, n) = x.fold((0.0, 0.0), |(s, n), x| (s + x, n + 1.0));
    ((sum / n - mean) * (n / variance).sqrt()).abs()
}

fn chi_square(counts: &[f64], expected: f64) -> f64 {
    counts.iter().map(|c| (c - expected).powi(2) / expected).sum()
}

#[test]
fn uniform_is_uniform() {
    // 13 checks, each failing a fresh seed once in 10^5 or less (4.5 sigma; chi-square of 255 above 361).
    for number in [0, 1] {
        let draw = Draw { seed: 11, number };
        let x = vec_of(N, |out: &mut [f32]| uniform(draw, 0, out));
        assert!(x.iter().all(|x| (0.0..1.0).contains(x)));
        let wide = || x.iter().map(|&x| f64::from(x));
        assert!(z_of_mean(wide(), 0.5, 1.0 / 12.0) < 4.5);
        assert!(z_of_mean(wide().map(|x| x * x), 1.0 / 3.0, 4.0 / 45.0) < 4.5);
        let mut counts = [0.0; 256];
        wide().for_each(|x| counts[(x * 256.0) as usize] += 1.0);
        assert!(chi_square(&counts, N as f64 / 256.0) < 361.0);
        for lag in [1, 2, 4] {
            let products = wide().zip(wide().skip(lag)).map(|(a, b)| (a - 0.5) * (b - 0.5));
            assert!(z_of_mean(products, 0.0, 1.0 / 144.0) < 4.5, "lag {lag}");
        }
    }
    let x = vec_of(N, |out: &mut [f64]| uniform(Draw { seed: 11, number: 2 }, 0, out));
    assert!(z_of_mean(x.iter().copied(), 0.5, 1.0 / 12.0) < 4.5);
}

#[test]
fn normal_is_normal() {
    /// Quantiles of the half-normal distribution at 1/8, …, 7/8.
    const EIGHTHS: [f64; 7] = [
        0.157_310_685,
        0.318_639_364,
        0.488_776_411,
        0.674_489_75,
        0.887_146_559,
        1.150_349_38,
        1.534_120_544,
    ];
    // Each check fails a fresh seed once in 10^5 or less (4.5 sigma; chi-square of 15 above 50).
    let check = |x: &[f64]| {
        assert!(x.iter().all(|x| x.is_finite()));
        let moment = |k: i32| x.iter().map(move |x| x.powi(k));
        assert!(z_of_mean(moment(1), 0.0, 1.0) < 4.5);
        assert!(z_of_mean(moment(2), 1.0, 2.0) < 4.5);
        assert!(z_of_mean(moment(3), 0.0, 15.0) < 4.5);
        assert!(z_of_mean(moment(4), 3.0, 96.0) < 4.5);
        let mut counts = [0.0; 16];
        for x in x {
            let eighth = EIGHTHS.iter().filter(|&&q| x.abs() >= q).count();
            counts[eighth + if *x < 0.0 { 8 } else { 0 }] += 1.0;
        }
        assert!(chi_square(&counts, x.len() as f64 / 16.0) < 50.0);
        // Two numbers of a pair, and neighbouring pairs.
        for lag in [1, 2, 3] {
            let products = x.iter().zip(&x[lag..]).map(|(a, b)| a * b);
            assert!(z_of_mean(products, 0.0, 1.0) < 4.5, "lag {lag}");
            let squares = x.iter().zip(&x[lag..]).map(|(a, b)| (a * a - 1.0) * (b * b - 1.0));
            assert!(z_of_mean(squares, 0.0, 4.0) < 4.5, "squares, lag {lag}");
        }
        // P(|x| > 4) = 6.3342e-5: 66.4 of 2^20, of standard deviation 8.15.
        let far = x.iter().filter(|x| x.abs() > 4.0).count();
        assert!((30..=103).contains(&far), "{far} beyond 4 sigma");
    };
    let draw = Draw { seed: 12, number: 0 };
    check(
        &vec_of(N, |out: &mut [f32]| normal(draw, 0, out)).iter().map(|&x| f64::from(x)).collect::<Vec<_>>(),
    );
    check(&vec_of(N, |out: &mut [f64]| normal(draw, 0, out)));
}

#[test]
fn draws_seeds_and_children_are_unrelated() {
    // Five correlations, each above 4.5 sigma once in 10^5 fresh seeds.
    let root = Generator::new(1);
    let numbers = |draw| vec_of(N / 4, |out: &mut [f32]| normal(draw, 0, out));
    let base = numbers(Draw { seed: 1, number: 0 });
    for other in [
        Draw { seed: 1, number: 1 },
        Draw { seed: 2, number: 0 },
        Draw { seed: 1 << 63 | 1, number: 0 },
        Draw { seed: 1, number: 1 << 48 },
        root.child("dropout").next_draw(),
    ] {
        let products = base.iter().zip(numbers(other)).map(|(&a, b)| f64::from(a) * f64::from(b));
        assert!(z_of_mean(products, 0.0, 1.0) < 4.5, "{other:?}");
    }
}

#[test]
fn probabilities_are_met() {
    for p in [0.001, 0.1, 0.5, 0.9] {
        let mut out = vec![false; N];
        bernoulli(Draw { seed: 13, number: 0 }, 0, p, &mut out).unwrap();
        // 4.5 sigma: once in 10^5 fresh seeds.
        assert!(z_of_mean(out.iter().map(|&b| f64::from(u8::from(b))), p, p * (1.0 - p)) < 4.5, "{p}");
    }
}
