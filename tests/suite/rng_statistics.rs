//! Statistical tests of the random numbers: moments, chi-square and Kolmogorov-Smirnov tests against the exact distributions, and
//! correlations between neighbours, draws, seeds and children.
//!
//! Seeds are fixed, so these tests always give the same verdict; the rates stated are those at which a fresh seed would
//! fail them.

use isoshard::rng::{
    Draw, Generator, GeneratorState, Init, RandomFloat, bernoulli, bernoulli_each, exponential, gamma,
    log_normal, normal, poisson, uniform, uniform_between, uniform_int,
};

fn vec_of<T: Copy + Default>(len: usize, fill: impl FnOnce(&mut [T])) -> Vec<T> {
    let mut out = vec![T::default(); len];
    fill(&mut out);
    out
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

/// Values of a distribution whose cumulative function is continuous, as a function of the draw, and that function.
struct Continuous {
    name: String,
    values: Box<dyn Fn(Draw) -> Vec<f64>>,
    cumulative: Box<dyn Fn(f64) -> f64>,
}

/// Every continuous distribution, in f32 and f64.
fn continuous() -> Vec<Continuous> {
    fn both<T: RandomFloat>(all: &mut Vec<Continuous>) {
        let mut add = |name: &str, fill: fn(Draw, &mut [T]), cumulative: Box<dyn Fn(f64) -> f64>| {
            let values = move |draw| vec_of(SOME, |out| fill(draw, out)).iter().map(|x| x.to_f64()).collect();
            let name = format!("{name} {}", T::DTYPE);
            all.push(Continuous { name, values: Box::new(values), cumulative });
        };
        add(
            "uniform",
            |draw, out| uniform_between(draw, 3, -2.0, 5.0, out).unwrap(),
            Box::new(|x| (x + 2.0) / 7.0),
        );
        add("normal", |draw, out| normal(draw, 3, out), Box::new(normal_cumulative));
        add(
            "truncated normal",
            |draw, out| {
                let init = Init::TruncatedNormal { mean: 1.0, std: 2.0, low: -1.0, high: 4.0 };
                init.fill(draw, &[1 << 40], 3, out).unwrap();
            },
            Box::new(|x| {
                let [low, high] = [-1.0, 1.5].map(normal_cumulative);
                (normal_cumulative((x - 1.0) / 2.0) - low) / (high - low)
            }),
        );
        add(
            "log-normal",
            |draw, out| log_normal(draw, 3, 0.5, 0.75, out).unwrap(),
            Box::new(|x| normal_cumulative((x.ln() - 0.5) / 0.75)),
        );
        add(
            "exponential",
            |draw, out| exponential(draw, 3, 2.5, out).unwrap(),
            Box::new(|x| -(-2.5 * x).exp_m1()),
        );
        let mut gammas = |shape: f64, fill: fn(Draw, &mut [T])| {
            let cumulative = move |x: f64| gamma_cumulative(shape, x / 3.0);
            add(&format!("gamma {shape}"), fill, Box::new(cumulative));
        };
        gammas(0.05, |draw, out| gamma(draw, 3, 0.05, 3.0, out).unwrap());
        gammas(0.5, |draw, out| gamma(draw, 3, 0.5, 3.0, out).unwrap());
        gammas(1.0, |draw, out| gamma(draw, 3, 1.0, 3.0, out).unwrap());
        gammas(1.1, |draw, out| gamma(draw, 3, 1.1, 3.0, out).unwrap());
        gammas(7.0, |draw, out| gamma(draw, 3, 7.0, 3.0, out).unwrap());
        gammas(5e5, |draw, out| gamma(draw, 3, 5e5, 3.0, out).unwrap());
    }
    let mut all = Vec::new();
    both::<f32>(&mut all);
    both::<f64>(&mut all);
    all
}

const SOME: usize = 1 << 17;

#[test]
fn continuous_distributions_have_their_cumulative_function() {
    // Kolmogorov-Smirnov: sqrt(n) D above 2.48 once in 10^5 fresh seeds; correlations above 4.5 sigma once in 10^5. In all
    // 22 distributions with 9 checks each: once in 500.
    for (number, Continuous { name, values, cumulative }) in continuous().into_iter().enumerate() {
        let draw = Draw { seed: 14, number: number as u64 };
        let drawn = |draw| -> Vec<f64> { values(draw).into_iter().map(&cumulative).collect() };
        let u = drawn(draw);
        assert!(u.iter().all(|u| (0.0..=1.0).contains(u)), "{name}");
        let mut sorted = u.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let n = sorted.len() as f64;
        let distance = |(i, u): (usize, &f64)| (u - i as f64 / n).max((i + 1) as f64 / n - u);
        let largest = sorted.iter().enumerate().map(distance).fold(0.0, f64::max);
        assert!(largest * n.sqrt() < 2.48, "{name}: {}", largest * n.sqrt());
        uncorrelated(&name, draw, u.iter().map(|u| (u - 0.5) * 12f64.sqrt()).collect(), |draw| {
            drawn(draw).iter().map(|u| (u - 0.5) * 12f64.sqrt()).collect()
        });
    }
}

#[test]
fn counts_come_as_often_as_they_should() {
    // Chi-square over the counts that are expected 20 times or more, and over the rest, and correlations: each fails a
    // fresh seed once in 10^5; in all 10 rates with 9 checks, once in 1000.
    for (number, rate) in [0.01, 0.5, 3.0, 9.99, 10.0, 12.5, 40.0, 300.0, 1e4, 1e6].into_iter().enumerate() {
        let draw = Draw { seed: 15, number: number as u64 };
        let drawn = |draw| vec_of(SOME, |out: &mut [i64]| poisson(draw, 3, rate, out).unwrap());
        let counts = drawn(draw);
        let (low, high) =
            ((rate - 8.0 * rate.sqrt()).max(0.0) as i64, (rate + 10.0 * rate.sqrt()) as i64 + 10);
        // Classes of neighbouring counts, each expected often enough.
        let width = ((rate.sqrt() / 8.0) as i64).max(1);
        let probability = |k: i64| (k as f64 * rate.ln() - rate - ln_gamma(k as f64 + 1.0)).exp();
        let (mut chi, mut classes, mut rest, mut seen_rest) = (0.0, 0, 1.0, SOME as f64);
        let mut seen = vec![0.0; ((high - low) / width + 1) as usize];
        for &count in &counts {
            assert!((low..=high).contains(&count), "rate {rate}: {count}");
            seen[((count - low) / width) as usize] += 1.0;
        }
        for (class, &seen) in seen.iter().enumerate() {
            let from = low + class as i64 * width;
            let p: f64 = (from..from + width).map(probability).sum();
            if p * SOME as f64 >= 20.0 {
                chi += (seen - p * SOME as f64).powi(2) / (p * SOME as f64);
                (classes, rest, seen_rest) = (classes + 1, rest - p, seen_rest - seen);
            }
        }
        let expected = (rest * SOME as f64).max(1e-3);
        assert!((seen_rest - expected).abs() < 4.5 * expected.sqrt() + 6.0, "{seen_rest} for {expected}");
        assert!(chi < chi_limit(classes), "rate {rate}: {chi} of {classes} classes");
        let scaled = |counts: Vec<i64>| -> Vec<f64> {
            counts.iter().map(|&k| (k as f64 - rate) / rate.sqrt()).collect()
        };
        if rate >= 0.5 {
            uncorrelated(&format!("poisson {rate}"), draw, scaled(counts), |draw| scaled(drawn(draw)));
        }
    }
}

#[test]
fn integers_are_uniform() {
    // Chi-square of 15 ranges, and correlations: each fails a fresh seed once in 10^5.
    for (number, n) in [2i128, 3, 7, 100, 256, 3 << 30, (1 << 32) + 1, 3 << 61].into_iter().enumerate() {
        let draw = Draw { seed: 16, number: number as u64 };
        let drawn = |draw| vec_of(SOME, |out: &mut [i64]| uniform_int(draw, 3, -5, n - 5, out).unwrap());
        let classes = n.min(251);
        let mut counts = vec![0.0; classes as usize];
        // Exact shares of classes that hold unequally many numbers.
        let first = |class: i128| (class * n + classes - 1) / classes;
        let scaled =
            |x: &i64| (*x as f64 + 5.5 - n as f64 / 2.0) / ((n as f64).powi(2) / 12.0 - 1.0 / 12.0).sqrt();
        for x in drawn(draw) {
            counts[((i128::from(x) + 5) * classes / n) as usize] += 1.0;
        }
        let chi: f64 = (0..classes)
            .map(|class| {
                let share = (first(class + 1) - first(class)) as f64 / n as f64 * SOME as f64;
                (counts[class as usize] - share).powi(2) / share
            })
            .sum();
        assert!(chi < chi_limit(classes as usize), "{n}: {chi}");
        let values = |draw| drawn(draw).iter().map(scaled).collect();
        uncorrelated(&format!("integers {n}"), draw, values(draw), values);
    }
}

#[test]
fn probabilities_given_for_each_element_are_met() {
    // 4.5 sigma each, once in 10^5.
    let p = vec_of(N, |out: &mut [f32]| uniform(Draw { seed: 17, number: 0 }, 0, out));
    let drawn =
        vec_of(N, |out: &mut [bool]| bernoulli_each(Draw { seed: 17, number: 1 }, 0, &p, out).unwrap());
    for eighth in 0..8 {
        let inside = |p: f32| (p * 8.0) as usize == eighth;
        let surplus = p.iter().zip(&drawn).filter(|(p, _)| inside(**p)).map(|(&p, &b)| {
            (f64::from(u8::from(b)) - f64::from(p)) / f64::from(p * (1.0 - p)).sqrt().max(1e-3)
        });
        assert!(z_of_mean(surplus, 0.0, 1.0) < 4.5, "{eighth}");
    }
}

/// Numbers of mean 0 and variance 1 do not know their neighbours, nor those of the next draw, of another seed, or of
/// children: 8 checks of 4.5 sigma, each failing a fresh seed once in 10^5.
fn uncorrelated(name: &str, draw: Draw, x: Vec<f64>, drawn: impl Fn(Draw) -> Vec<f64>) {
    for lag in [1, 2, 3, 4] {
        let products = x.iter().zip(&x[lag..]).map(|(a, b)| a * b);
        assert!(z_of_mean(products, 0.0, 1.0) < 4.5, "{name}, lag {lag}");
    }
    let parent = Generator::from_state(GeneratorState { seed: draw.seed, draws: draw.number });
    let children = [parent.child("a").next_draw(), parent.child("b").next_draw()];
    let [a, b] = children.map(&drawn);
    for (what, left, right) in [
        ("next draw", &x, &drawn(Draw { number: draw.number + 1000, ..draw })),
        ("next seed", &x, &drawn(Draw { seed: draw.seed + 1, ..draw })),
        ("child", &x, &a),
        ("children", &a, &b),
    ] {
        let products = left.iter().zip(right).map(|(a, b)| a * b);
        assert!(z_of_mean(products, 0.0, 1.0) < 4.5, "{name}, {what}");
    }
}

/// Returns the value that chi-square of `classes` classes exceeds once in 10^5, by Wilson and Hilferty's approximation.
fn chi_limit(classes: usize) -> f64 {
    let k = (classes.max(2) - 1) as f64;
    k * (1.0 - 2.0 / (9.0 * k) + 4.265 * (2.0 / (9.0 * k)).sqrt()).powi(3)
}

fn normal_cumulative(x: f64) -> f64 {
    // By the gamma distribution of x^2 / 2.
    0.5 * (1.0 + gamma_cumulative(0.5, 0.5 * x * x).copysign(x))
}

/// The regularised lower incomplete gamma function: a series, or a continued fraction (Lentz).
fn gamma_cumulative(a: f64, x: f64) -> f64 {
    if x <= 0.0 {
        return 0.0;
    }
    let scale = (a * x.ln() - x - ln_gamma(a)).exp();
    if x < a + 1.0 {
        let (mut term, mut sum, mut k) = (1.0 / a, 1.0 / a, a);
        while term > sum * 1e-16 {
            k += 1.0;
            term *= x / k;
            sum += term;
        }
        return sum * scale;
    }
    let mut b = x + 1.0 - a;
    let (mut c, mut d) = (1e300, 1.0 / b);
    let mut h = d;
    for i in 1..100_000 {
        let an = -f64::from(i) * (f64::from(i) - a);
        b += 2.0;
        d = 1.0 / (an * d + b);
        c = b + an / c;
        h *= d * c;
        if (d * c - 1.0).abs() < 1e-15 {
            break;
        }
    }
    1.0 - scale * h
}

/// ln of the gamma function by Stirling's series, from 10 on.
fn ln_gamma(x: f64) -> f64 {
    if x < 10.0 {
        return ln_gamma(x + 1.0) - x.ln();
    }
    let z = 1.0 / (x * x);
    let rest = (1.0 / 12.0 - z * (1.0 / 360.0 - z * (1.0 / 1260.0 - z / 1680.0))) / x;
    (x - 0.5) * x.ln() - x + 0.5 * std::f64::consts::TAU.ln() + rest
}
