//! Random numbers: frozen, cut-invariant, and what their definitions say. (`rng_statistics` says how random they are.)
//!
//! To accept new frozen values (a breaking change): `BLESS=1 cargo test --test suite rng::`.

use std::fmt::Write as _;

use half::{bf16, f16};
use isoshard::ops::cpu::dropout;
use isoshard::ops::{Multinomial, Unkeyed, eval_whole};
use isoshard::rng::{
    Draw, Generator, Init, Permutation, Stream, bernoulli, bernoulli_each, bits32, bits64, exponential,
    exponential_each, gamma, gamma_each, log_normal, normal, philox, poisson, poisson_each, uniform,
    uniform_between, uniform_int,
};
use isoshard::tensor::{Float, Tensor};
use rand_core::Rng;

const DRAW: Draw = Draw { seed: 0x0123_4567_89ab_cdef, number: 5 };

fn vec_of<T: Copy + Default>(len: usize, fill: impl FnOnce(&mut [T])) -> Vec<T> {
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

    text.push_str(&distributions());

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

/// The first values of the distributions with parameters, as lines.
fn distributions() -> String {
    let mut text = String::new();
    let mut line = |name: &str, values: Vec<String>| writeln!(text, "{name}: {}", values.join(" ")).unwrap();
    for (place, start) in [("0", 0u64), ("2^32+7", (1 << 32) + 7)] {
        macro_rules! floats {
            ($t:ty) => {{
                let mut case = |name: &str, fill: &dyn Fn(&mut [$t])| {
                    let width = 2 * size_of::<$t>();
                    let values = vec_of::<$t>(6, fill);
                    let values = values.iter().map(|x| format!("{:0width$x}", x.to_bits()));
                    line(&format!("{name} {} from {place}", stringify!($t)), values.collect());
                };
                case("uniform of [-1, 2)", &|out| uniform_between(DRAW, start, -1.0, 2.0, out).unwrap());
                case("log-normal 0.5, 0.25", &|out| log_normal(DRAW, start, 0.5, 0.25, out).unwrap());
                case("exponential 1.5", &|out| exponential(DRAW, start, 1.5, out).unwrap());
                for (shape, scale) in [(0.5, 1.0), (2.5, 2.0)] {
                    let name = format!("gamma {shape}, {scale}");
                    case(&name, &|out| gamma(DRAW, start, shape, scale, out).unwrap());
                }
                case("poisson 3.5", &|out| poisson(DRAW, start, 3.5, out).unwrap());
                case("poisson 50", &|out| poisson(DRAW, start, 50.0, out).unwrap());
            }};
        }
        floats!(f32);
        floats!(f64);
        floats!(f16);
        floats!(bf16);
        let mut ints = [0i64; 6];
        for (low, high) in [(-5, 10), (0, 3 << 30), (-(1 << 62), 1 << 61)] {
            uniform_int(DRAW, start, low, high, &mut ints).unwrap();
            let name = format!("integers of {low} to below {high} from {place}");
            line(&name, ints.iter().map(i64::to_string).collect());
        }
        poisson(DRAW, start, 1e9, &mut ints).unwrap();
        line(&format!("poisson 10^9 i64 from {place}"), ints.iter().map(i64::to_string).collect());
        let mut kept = [false; 24];
        bernoulli(DRAW, start, 0.3, &mut kept).unwrap();
        line(&format!("bernoulli 0.3 from {place}"), kept.map(|k| u8::from(k).to_string()).to_vec());
    }
    let weights: Vec<f32> = (0..14).map(|i| ((i * 5) % 11) as f32).collect();
    let weights = Tensor::from_vec(weights, [2, 7]).unwrap();
    for replacement in [true, false] {
        let op = Multinomial { samples: 5, replacement, draw: Unkeyed(DRAW) };
        let drawn = eval_whole(&op, std::slice::from_ref(&weights)).unwrap();
        let drawn = drawn[0].to_vec::<i64>().unwrap();
        let name = if replacement { "multinomial" } else { "multinomial without replacement" };
        line(name, drawn.iter().map(i64::to_string).collect());
    }
    text
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
    for high in [10, (1 << 31) + 1, 3 << 61] {
        cuts_agree(|start, out: &mut [i64]| uniform_int(DRAW, start, -3, high, out).unwrap());
    }
    cuts_agree(|start, out: &mut [u8]| uniform_int(DRAW, start, 1, 7, out).unwrap());
    cuts_agree(|start, out: &mut [i32]| uniform_int(DRAW, start, -7, 7, out).unwrap());
    cuts_agree(|start, out: &mut [i64]| poisson(DRAW, start, 20.0, out).unwrap());
    macro_rules! floats {
        ($($t:ty)*) => {$(
            cuts_agree(|start, out: &mut [$t]| uniform(DRAW, start, out));
            cuts_agree(|start, out: &mut [$t]| normal(DRAW, start, out));
            cuts_agree(|start, out: &mut [$t]| {
                let x: Vec<$t> = (0..out.len()).map(|_| Float::narrow(1.5)).collect();
                dropout(DRAW, start, 0.3, &x, out).unwrap();
            });
            cuts_agree(|start, out: &mut [$t]| truncated.fill(DRAW, &shape, start % (1 << 61), out).unwrap());
            cuts_agree(|start, out: &mut [$t]| uniform_between(DRAW, start, -1.0, 3.0, out).unwrap());
            cuts_agree(|start, out: &mut [$t]| log_normal(DRAW, start, 0.1, 0.7, out).unwrap());
            cuts_agree(|start, out: &mut [$t]| exponential(DRAW, start, 3.0, out).unwrap());
            cuts_agree(|start, out: &mut [$t]| gamma(DRAW, start, 0.7, 2.0, out).unwrap());
            cuts_agree(|start, out: &mut [$t]| gamma(DRAW, start, 1.0, 2.0, out).unwrap());
            cuts_agree(|start, out: &mut [$t]| poisson(DRAW, start, 4.0, out).unwrap());
            cuts_agree(|start, out: &mut [$t]| poisson(DRAW, start, 11.0, out).unwrap());
            let params = |start: u64, len: usize| -> Vec<$t> {
                let param = |i: u64| [0.125, 0.5, 1.0, 0.75][(start + i) as usize % 4];
                (0..len as u64).map(|i| Float::narrow(param(i))).collect()
            };
            let large = |start: u64, len: usize| -> Vec<$t> {
                params(start, len).iter().map(|&x| Float::narrow(x.widen() * 16.0)).collect()
            };
            cuts_agree(|start, out: &mut [bool]| {
                bernoulli_each(DRAW, start, &params(start, out.len()), out).unwrap();
            });
            cuts_agree(|start, out: &mut [$t]| {
                exponential_each(DRAW, start, &params(start, out.len()), out).unwrap();
            });
            cuts_agree(|start, out: &mut [$t]| {
                gamma_each(DRAW, start, &params(start, out.len()), out).unwrap();
            });
            cuts_agree(|start, out: &mut [i32]| {
                poisson_each(DRAW, start, &large(start, out.len()), out).unwrap();
            });
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
    exponential::<f32>(DRAW, 9, 1.0, &mut []).unwrap();
    gamma_each::<f64>(DRAW, u64::MAX, &[], &mut []).unwrap();
    let (mut end, mut last) = ([0i64; 9], [0i64; 1]);
    poisson(DRAW, u64::MAX - 8, 12.0, &mut end).unwrap();
    poisson(DRAW, u64::MAX, 12.0, &mut last).unwrap();
    assert_eq!(end[8], last[0]);
}
