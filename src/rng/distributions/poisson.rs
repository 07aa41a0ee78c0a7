//! Poisson numbers, by inversion or by rejection.

use super::continuous::{expect_all, expect_len};
use super::counts::FromCounts;
use super::fill::{RandomFloat, bits64};
use super::rejection::{ElementLanes, LANES, LaneSetups, PerElement, RejectionMethod, SharedSetup, run};
use super::sample::{PIECE, PhiloxSink, Write, drive, unit_f64};
use crate::error::{Error, Result};
use crate::rng::Draw;
use crate::rng::counter::index_ranges::{IndexRanges, Indices};
use crate::rng::counter::philox::PhiloxBlocks;
use crate::tensor::Element;
use crate::tensor::cpu::{Isa, Kernel, dispatch};
use crate::tensor::math::exp::exp_f64;
use crate::tensor::math::log::ln_normal_f64;
use crate::tensor::math::poisson::ln_poisson_f64;

/// An element type that counts are written in: i64, i32, f64, f32, f16 or bf16. Sealed.
#[expect(private_bounds, reason = "sealed")]
pub trait Count: Element + FromCounts {}

impl<T: Element + FromCounts> Count for T {}

/// Writes Poisson numbers. The rate is their mean and their variance.
///
/// Counts are computed in f64 for every element type. Below a rate of 10, by inversion of a 64-bit draw: the first k whose
/// p_0 + … + p_k is above the pair's upper 53 bits times 2^-53 (or whose p_k is at most 2^-56), where p_0 = exp(-rate)
/// and p_k = p_{k-1} (rate (1 / k)). From 10 on, by the transformed rejection of W. Hörmann, "The transformed rejection
/// method for generating Poisson random variables", 1993 (PTRS): attempt k of element e reads block e of attempt
/// k + 1: U and V are (upper 53 bits + 1/2) / 2^53 of its pairs, and the full test decides alone.
///
/// i32: saturated. f32: rounded. f16 and bf16: the f32 number rounded.
///
/// ```
/// use isoshard::rng::{Generator, poisson};
/// let mut counts = [0i64; 1000];
/// poisson(Generator::new(7).next_draw(), 0, 4.0, &mut counts)?;
/// assert!((counts.iter().sum::<i64>() as f64 / 1000.0 - 4.0).abs() < 0.3);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a rate below 0 or above 2^50, and NaN.
pub fn poisson<T: Count>(draw: Draw, at: impl Indices, rate: f64, out: &mut [T]) -> Result<()> {
    check(rate)?;
    let setup = if rate < LARGE {
        PreparedRate::Few(CumulativeSums::of(rate))
    } else {
        PreparedRate::Many(TransformedRejection.setup(rate))
    };
    in_counts(at.ranges(), out, &mut |at, _, counts| match &setup {
        PreparedRate::Few(sums) => drive(draw, 0, at, counts.len(), Inversion { sums, out: counts }),
        &PreparedRate::Many(setup) => run(TransformedRejection, SharedSetup(setup), draw, at, counts),
    });
    Ok(())
}

/// The setup of one rate, for the method that samples it.
#[expect(clippy::large_enum_variant, reason = "there is one at a time, on the stack")]
enum PreparedRate {
    Few(CumulativeSums),
    Many(PoissonSetup),
}

/// Calls `write` to write counts piece by piece, and converts them to elements.
fn in_counts<T: Count>(mut at: IndexRanges<'_>, out: &mut [T], write: Write<'_, f64>) {
    let mut counts = [0.0; PIECE];
    let mut done = 0;
    while done < out.len() {
        let len = (PIECE - (at.first() % 2) as usize).min(out.len() - done);
        let (here, counts) = (done..done + len, &mut counts[..len]);
        write(at, here.clone(), counts);
        T::put(counts, &mut out[here]);
        at.advance(len);
        done += len;
    }
}

/// Writes Poisson numbers with one rate per element. Equal rates give the numbers of [`poisson`].
///
/// ```
/// use isoshard::rng::{Generator, poisson_each};
/// let mut counts = [0i32; 3];
/// poisson_each(Generator::new(7).next_draw(), 0, &[0.0f32, 4.0, 1e6], &mut counts)?;
/// assert!(counts[0] == 0 && counts[2] > 990_000);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses slices of different lengths, and rates as [`poisson`] does.
pub fn poisson_each<R: RandomFloat, T: Count>(
    draw: Draw,
    at: impl Indices,
    rate: &[R],
    out: &mut [T],
) -> Result<()> {
    let at = at.ranges();
    expect_len("poisson", rate, out)?;
    expect_all("poisson", RATE, at, rate, is_rate)?;
    let mut rates = [0.0; PIECE];
    let mut room = ([0; PIECE], [0.0; PIECE]);
    in_counts(at, out, &mut |at, here, counts| {
        let rates = &mut rates[..counts.len()];
        rates.iter_mut().zip(&rate[here]).for_each(|(wide, rate)| *wide = rate.to_f64());
        each_piece(draw, at, rates, counts, &mut room);
    });
    Ok(())
}

/// Computes one count per rate of a piece.
fn each_piece(
    draw: Draw,
    at: IndexRanges<'_>,
    rates: &[f64],
    counts: &mut [f64],
    (pairs, large): &mut ([u64; PIECE], [f64; PIECE]),
) {
    let len = rates.len();
    if rates.iter().any(|&rate| rate < LARGE) {
        bits64(draw, at, &mut pairs[..len]);
        dispatch(InversionPerElement { rates, pairs: &pairs[..len], counts });
    }
    if rates.iter().any(|&rate| rate >= LARGE) {
        run(TransformedRejection, PerElement(rates), draw, at, &mut large[..len]);
        for ((count, &large), &rate) in counts.iter_mut().zip(&*large).zip(rates) {
            *count = if rate < LARGE { *count } else { large };
        }
    }
}

/// Returns the error of [`poisson`] for this rate, if any.
pub(in crate::rng) fn check(rate: f64) -> Result<()> {
    if is_rate(rate) {
        return Ok(());
    }
    Err(Error::invalid("poisson", RATE, format!("{rate}"), ""))
}

/// From this rate on, counts are sampled by rejection.
pub(in crate::rng) const LARGE: f64 = 10.0;
const RATE: &str = "a rate lies between 0 and 2^50";

/// Smaller probabilities never change a comparison with 53 bits.
const TINY: f64 = 1.0 / 72_057_594_037_927_936.0;

fn is_rate(x: f64) -> bool {
    (0.0..=1_125_899_906_842_624.0).contains(&x)
}

/// p_0, p_0 + p_1, ... while p_k is above [`TINY`].
pub(in crate::rng) struct CumulativeSums {
    pub sums: [f64; 64],
    pub len: usize,
}

impl CumulativeSums {
    pub fn of(rate: f64) -> CumulativeSums {
        let mut all = CumulativeSums { sums: [0.0; 64], len: 0 };
        let mut p = exp_f64(-rate);
        let mut sum = p;
        while p > TINY && all.len < all.sums.len() {
            all.sums[all.len] = sum;
            all.len += 1;
            p *= rate * (1.0 / all.len as f64);
            sum += p;
        }
        all
    }
}

struct Inversion<'a> {
    sums: &'a CumulativeSums,
    out: &'a mut [f64],
}

impl PhiloxSink for Inversion<'_> {
    const WIDEST: Isa = Isa::Avx2;
    const PER_BLOCK: usize = 2;
    #[inline(always)]
    fn take<const N: usize>(&mut self, blocks: PhiloxBlocks<N>, skip: usize, at: usize, len: usize) {
        let (mut u, mut counts) = ([[0.0; 2]; N], [[0.0; 2]; N]);
        let (u, counts) = (u.as_flattened_mut(), counts.as_flattened_mut());
        u.iter_mut().zip(blocks.0.as_flattened()).for_each(|(u, &pair)| *u = unit_f64(pair));
        for &sum in &self.sums.sums[..self.sums.len] {
            let mut more = 0.0;
            for (count, &u) in counts.iter_mut().zip(&*u) {
                let one = if sum <= u { 1.0 } else { 0.0 };
                *count += one;
                more = if one > more { one } else { more };
            }
            if more == 0.0 {
                break;
            }
        }
        self.out[at..at + len].copy_from_slice(&counts[skip..skip + len]);
    }
}

/// Inversion with one rate per element. Counts of large rates are meaningless.
struct InversionPerElement<'a> {
    rates: &'a [f64],
    pairs: &'a [u64],
    counts: &'a mut [f64],
}

impl Kernel for InversionPerElement<'_> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        let all = self.rates.chunks(LANES).zip(self.pairs.chunks(LANES)).zip(self.counts.chunks_mut(LANES));
        for ((rates, pairs), counts) in all {
            let (mut rate, mut u, mut count) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
            for (i, (&r, &pair)) in rates.iter().zip(pairs).enumerate() {
                (rate[i], u[i]) = (if r < LARGE { r } else { 0.0 }, unit_f64(pair));
            }
            // A loop: closures given to the standard library may be compiled without this instruction set.
            let mut p = [0.0; LANES];
            for (p, &rate) in p.iter_mut().zip(&rate) {
                *p = exp_f64(-rate);
            }
            let (mut sum, mut k) = (p, 0.0);
            loop {
                let mut more = 0.0;
                for i in 0..LANES {
                    let one = if (sum[i] <= u[i]) & (p[i] > TINY) { 1.0 } else { 0.0 };
                    count[i] += one;
                    more = if one > more { one } else { more };
                }
                if more == 0.0 {
                    break;
                }
                k += 1.0;
                let r = 1.0 / k;
                for i in 0..LANES {
                    p[i] *= rate[i] * r;
                    sum[i] += p[i];
                }
            }
            counts.copy_from_slice(&count[..counts.len()]);
        }
    }
}

/// Hörmann's method.
#[derive(Clone, Copy)]
struct TransformedRejection;

#[derive(Clone, Copy)]
struct PoissonSetup {
    rate: f64,
    a: f64,
    b: f64,
    inverse_alpha: f64,
}

impl RejectionMethod for TransformedRejection {
    type Wide = f64;
    type Setup = PoissonSetup;
    const ATTEMPTS: u16 = u16::MAX;
    /// Counts of every dtype are drawn in f64.
    const WIDEST: Isa = Isa::Avx512;

    /// Small rates, whose numbers are thrown away, as the smallest large one.
    #[inline(always)]
    fn setup(self, rate: f64) -> PoissonSetup {
        let rate = if rate < LARGE { LARGE } else { rate };
        let b = rate.sqrt().mul_add(2.53, 0.931);
        let a = b.mul_add(0.02483, -0.059);
        PoissonSetup { rate, a, b, inverse_alpha: 1.1239 + 1.1328 / (b - 3.4) }
    }

    #[inline(always)]
    fn attempt(
        self,
        k: u16,
        setups: &impl LaneSetups<PoissonSetup>,
        place: &ElementLanes,
        out: &mut [f64; LANES],
        accepted: &mut [bool; LANES],
    ) {
        const STEP: f64 = 1.0 / 9_007_199_254_740_992.0;
        const MOST: f64 = 2_251_799_813_685_248.0;
        let blocks = place.blocks(k + 1);
        let (mut ln_density, mut ln_p) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            let ([a, b], s) = (blocks.0[i], setups.at(i));
            let u = ((a >> 11) as f64).mul_add(STEP, 0.5 * STEP - 0.5);
            let v = ((b >> 11) as f64).mul_add(STEP, 0.5 * STEP);
            let us = 0.5 - u.abs();
            let count = ((2.0 * s.a / us + s.b).mul_add(u, s.rate) + 0.43).floor();
            // Candidates outside are never accepted.
            let above = if count > 0.0 { count } else { 0.0 };
            out[i] = if above < MOST { above } else { MOST };
            let density = ln_normal_f64(v * s.inverse_alpha / (s.a / (us * us) + s.b));
            ln_density[i] = if out[i] == count { density } else { f64::INFINITY };
        }
        for i in 0..LANES {
            ln_p[i] = ln_poisson_f64(out[i], setups.at(i).rate);
        }
        for i in 0..LANES {
            accepted[i] = ln_density[i] <= ln_p[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    const DRAW: Draw = Draw { seed: 61, number: 62 };

    #[test]
    fn equal_rates_give_the_scalars_numbers_in_every_type() {
        const RATES: [f64; 6] = [0.0, 0.25, 1.5, 9.5, 10.0, 300.0];
        let rates: Vec<f32> = (0..603).map(|i| RATES[i % 6] as f32).collect();
        let mut each = vec![0i64; 603];
        poisson_each(DRAW, 9, &rates, &mut each).unwrap();
        let (mut one, mut rounded) = (vec![0f64; 603], vec![bf16::ZERO; 603]);
        for (k, rate) in RATES.into_iter().enumerate() {
            poisson(DRAW, 9, rate, &mut one).unwrap();
            assert!((k..603).step_by(6).all(|i| one[i] == each[i] as f64), "{rate}");
            poisson(DRAW, 9, rate, &mut rounded).unwrap();
            assert!(one.iter().zip(&rounded).all(|(&x, &h)| h == bf16::from_f32(x as f32)));
        }
    }

    #[test]
    fn inversion_by_its_definition() {
        let mut pairs = [0; 300];
        bits64(DRAW, 4, &mut pairs);
        for rate in [0.0, 1e-20, 1e-16, 0.01, 1.0, 4.0, 9.99] {
            let mut got = [0i32; 300];
            poisson(DRAW, 4, rate, &mut got).unwrap();
            for (&x, &pair) in got.iter().zip(&pairs) {
                let u = (pair >> 11) as f64 / 2f64.powi(53);
                let p = |k: i32| (1..=k).fold((-rate).exp(), |p, k| p * rate / f64::from(k));
                let below: f64 = (0..x).map(p).sum();
                assert!(below <= u + 1e-12 && u < below + p(x) + 1e-12, "{rate}: {x} for {u}");
            }
        }
        // The table ends where probabilities do, and never by its length.
        assert!(CumulativeSums::of(LARGE.next_down()).len < 60);
    }

    #[test]
    fn refusals() {
        for rate in [-1.0, f64::NAN, f64::INFINITY, 2e15] {
            poisson(DRAW, 0, rate, &mut [0i64; 1]).unwrap_err();
        }
        poisson(DRAW, 0, 1.1e15, &mut [0i64; 9]).unwrap();
        let refused = poisson_each(DRAW, 0, &[1f32, -0.5], &mut [0f32; 2]).unwrap_err().to_string();
        assert_eq!(refused, "poisson: a rate lies between 0 and 2^50; got -0.5 for element 1");
    }
}
