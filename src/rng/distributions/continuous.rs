//! Uniform numbers in a range, log-normal and exponential numbers: one word (or pair) per element, without rejection.

use super::fill::RandomFloat;
use super::sample::{Affine, Computed, MapNumber, Normal, PIECE, PhiloxDistribution, in_pieces};
use crate::error::{Error, Result};
use crate::rng::Draw;
use crate::rng::counter::index_ranges::{IndexRanges, Indices};
use crate::rng::counter::philox::PhiloxBlocks;
use crate::tensor::math::exp::{exp_f32, exp_f64};
use crate::tensor::math::log::{ln_unit_f32, ln_unit_f64};
use crate::tensor::{DType, Element};

/// Writes uniform numbers from `low` to below `high`.
///
/// Each number is fma(u, high - low, low) of the number u of [`uniform`](crate::rng::uniform), with both parameters rounded to f32
/// (f64 for f64), and at most the largest number below `high`. f16 and bf16: the f32 number rounded, so `high` can occur.
/// If `low` equals `high`, all numbers are `low`.
///
/// ```
/// use isoshard::rng::{Generator, uniform_between};
/// let mut x = [0.0f32; 100];
/// uniform_between(Generator::new(7).next_draw(), 0, -1.0, 3.0, &mut x)?;
/// assert!(x.iter().all(|x| (-1.0..3.0).contains(x)));
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses bounds that are not in order, and a width that is not finite, in the type computed in.
pub fn uniform_between<T: RandomFloat>(
    draw: Draw,
    at: impl Indices,
    low: f64,
    high: f64,
    out: &mut [T],
) -> Result<()> {
    let wide = |x: f64| <T::Wide as Element>::from_f64(x).to_f64();
    if low > high || !wide(high - low).is_finite() || !wide(low).is_finite() || !wide(high).is_finite() {
        return Err(Error::invalid(
            "uniform_between",
            "wants low <= high, both and their distance finite",
            format!("{low} to {high}"),
            "",
        ));
    }
    T::sample(draw, 0, at.ranges(), out, super::sample::Uniform(Between { low, high }));
    Ok(())
}

/// Writes log-normal numbers: exp(fma(z, std, mean)) of the number z of [`normal`](crate::rng::normal), with both parameters
/// rounded to f32 (f64 for f64).
///
/// ```
/// use isoshard::rng::{Generator, log_normal};
/// let mut x = [0.0f32; 100];
/// log_normal(Generator::new(7).next_draw(), 0, 0.0, 0.5, &mut x)?;
/// assert!(x.iter().all(|&x| x > 0.0));
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a mean that is not finite and a std that is not finite or negative.
pub fn log_normal<T: RandomFloat>(
    draw: Draw,
    at: impl Indices,
    mean: f64,
    std: f64,
    out: &mut [T],
) -> Result<()> {
    check_log_normal(mean, std)?;
    in_pieces(at.ranges(), out, &mut |at, _, wide| {
        T::Wide::numbers(draw, 0, at, wide, Normal(Affine { scale: std, shift: mean }));
        T::Wide::change(wide, Exp);
    });
    Ok(())
}

/// Writes exponential numbers of mean 1 / `rate`: -ln(u) / rate, by inversion.
///
/// u = (a + 1/2) / 2^32 for the word a of a 32-bit draw (f64: (a's upper 53 bits + 1/2) / 2^53 of a 64-bit one). The
/// logarithm is within 3 ulp at both ends: from 2^-33 to 22.9 (f64: 2^-54 to 37.5), never 0. The division is in f32
/// (f64 for f64), by the rate rounded to that type. f16 and bf16: the f32 number rounded.
///
/// ```
/// use isoshard::rng::{Generator, exponential};
/// let mut x = [0.0f64; 1000];
/// exponential(Generator::new(7).next_draw(), 0, 2.0, &mut x)?;
/// assert!((x.iter().sum::<f64>() / 1000.0 - 0.5).abs() < 0.1);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a rate that is not positive and finite, in the type computed in.
pub fn exponential<T: RandomFloat>(draw: Draw, at: impl Indices, rate: f64, out: &mut [T]) -> Result<()> {
    check_exponential(rate, T::DTYPE)?;
    in_pieces(at.ranges(), out, &mut |at, _, wide| {
        T::Wide::numbers(draw, 0, at, wide, UnitExponential);
        T::Wide::change(wide, DivideBy(rate));
    });
    Ok(())
}

/// Writes exponential numbers with one rate per element. Equal rates give the numbers of [`exponential`].
///
/// ```
/// use isoshard::rng::{Generator, exponential, exponential_each};
/// let draw = Generator::new(7).next_draw();
/// let (mut one, mut each) = ([0.0f32; 3], [0.0f32; 3]);
/// exponential(draw, 0, 2.0, &mut one)?;
/// exponential_each(draw, 0, &[2.0, 5.0, 2.0], &mut each)?;
/// assert_eq!((one[0], one[2]), (each[0], each[2]));
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses slices of different lengths, and a rate that is not positive and finite.
pub fn exponential_each<T: RandomFloat>(
    draw: Draw,
    at: impl Indices,
    rate: &[T],
    out: &mut [T],
) -> Result<()> {
    let at = at.ranges();
    expect_len("exponential", rate, out)?;
    expect_all("exponential", RATE, at, rate, is_rate)?;
    let mut rates = [T::Wide::default(); PIECE];
    in_pieces(at, out, &mut |at, here, wide| {
        T::Wide::numbers(draw, 0, at, wide, UnitExponential);
        let rates = T::load(&rate[here], &mut rates);
        wide.iter_mut().zip(rates).for_each(|(x, &rate)| *x = *x / rate);
    });
    Ok(())
}

/// Returns the error of [`log_normal`] for these parameters, if any.
pub(in crate::rng) fn check_log_normal(mean: f64, std: f64) -> Result<()> {
    if mean.is_finite() && std.is_finite() && std >= 0.0 {
        return Ok(());
    }
    let rule = "a mean is finite, a std finite and not negative";
    Err(Error::invalid("log_normal", rule, format!("mean {mean}, std {std}"), ""))
}

/// Returns the error of [`exponential`] for this rate and floating dtype, if any.
pub(in crate::rng) fn check_exponential(rate: f64, dtype: DType) -> Result<()> {
    if is_rate(wide(rate, dtype)) {
        return Ok(());
    }
    Err(Error::invalid("exponential", RATE, format!("{rate} for {dtype}"), ""))
}

/// Rounds a parameter to the type that numbers of this dtype are computed in.
pub(in crate::rng) fn wide(param: f64, dtype: DType) -> f64 {
    if dtype == DType::F64 { param } else { f64::from(param as f32) }
}

/// Returns an error of `verb` unless there is one parameter per element.
pub(in crate::rng) fn expect_len<P, T>(verb: &str, params: &[P], out: &[T]) -> Result<()> {
    if params.len() == out.len() {
        return Ok(());
    }
    let given = format!("{} and {} elements", params.len(), out.len());
    Err(Error::invalid(verb, "parameters and output differ in length", given, ""))
}

/// Returns an error of `verb` if a parameter breaks `rule`. Names the element by its global index.
pub(in crate::rng) fn expect_all<T: Element>(
    verb: &str,
    rule: &str,
    at: IndexRanges<'_>,
    params: &[T],
    keeps: impl Fn(f64) -> bool,
) -> Result<()> {
    if params.iter().fold(true, |all, x| all & keeps(x.to_f64())) {
        return Ok(());
    }
    let bad = params.iter().position(|x| !keeps(x.to_f64())).unwrap_or(0);
    let given = format!("{} for element {}", params[bad].to_f64(), at.index(bad));
    Err(Error::invalid(verb, rule, given, ""))
}

const RATE: &str = "a rate is positive and finite";

fn is_rate(x: f64) -> bool {
    x > 0.0 && x < f64::INFINITY
}

/// Maps [0, 1) to [low, high).
#[derive(Clone, Copy)]
struct Between {
    low: f64,
    high: f64,
}

/// The exponential function.
#[derive(Clone, Copy)]
struct Exp;

/// Division by a number that is rounded to the type computed in.
#[derive(Clone, Copy)]
struct DivideBy(f64);

/// The exponential distribution of rate 1.
#[derive(Clone, Copy)]
struct UnitExponential;

macro_rules! between {
    ($t:ident, $x:ident, $self:ident) => {{
        let (low, high) = ($self.low as $t, $self.high as $t);
        let below = if high > low { high.next_down() } else { low };
        let y = $x.mul_add(($self.high - $self.low) as $t, low);
        if y < below { y } else { below }
    }};
}

impl MapNumber for Between {
    #[inline(always)]
    fn f32(self, x: f32) -> f32 {
        between!(f32, x, self)
    }
    #[inline(always)]
    fn f64(self, x: f64) -> f64 {
        between!(f64, x, self)
    }
}

impl MapNumber for Exp {
    #[inline(always)]
    fn f32(self, x: f32) -> f32 {
        exp_f32(x)
    }
    #[inline(always)]
    fn f64(self, x: f64) -> f64 {
        exp_f64(x)
    }
}

impl MapNumber for DivideBy {
    #[inline(always)]
    fn f32(self, x: f32) -> f32 {
        x / self.0 as f32
    }
    #[inline(always)]
    fn f64(self, x: f64) -> f64 {
        x / self.0
    }
}

impl PhiloxDistribution for UnitExponential {
    #[inline(always)]
    fn numbers_f32<const N: usize>(self, blocks: &PhiloxBlocks<N>, out: &mut [[f32; 4]; N]) {
        let out = out.as_flattened_mut().as_chunks_mut::<2>().0;
        for (out, &pair) in out.iter_mut().zip(blocks.0.as_flattened()) {
            *out = [unit_exponential_f32(pair as u32), unit_exponential_f32((pair >> 32) as u32)];
        }
    }
    #[inline(always)]
    fn numbers_f64<const N: usize>(self, blocks: &PhiloxBlocks<N>, out: &mut [[f64; 2]; N]) {
        for (out, &pair) in out.as_flattened_mut().iter_mut().zip(blocks.0.as_flattened()) {
            *out = unit_exponential_f64(pair);
        }
    }
}

/// -ln((a + 1/2) / 2^32).
#[inline(always)]
pub(in crate::rng) fn unit_exponential_f32(a: u32) -> f32 {
    const STEP: f32 = 1.0 / 4_294_967_296.0;
    -ln_unit_f32((a as f32).mul_add(STEP, 0.5 * STEP), (!a as f32).mul_add(STEP, 0.5 * STEP))
}

/// -ln((floor(a / 2^11) + 1/2) / 2^53).
#[inline(always)]
pub(in crate::rng) fn unit_exponential_f64(a: u64) -> f64 {
    const STEP: f64 = 1.0 / 9_007_199_254_740_992.0;
    let rest = ((!a >> 11) as f64).mul_add(STEP, 0.5 * STEP);
    -ln_unit_f64(((a >> 11) as f64).mul_add(STEP, 0.5 * STEP), rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::distributions::fill::{bits32, uniform};

    const DRAW: Draw = Draw { seed: 41, number: 42 };

    #[test]
    fn exponential_at_the_ends_of_the_words() {
        let ends = [0, 1 << 31, !0].map(unit_exponential_f32);
        assert_eq!(ends[2], 2f32.powi(-33), "the smallest is as exact as the largest");
        assert!((f64::from(ends[0]) - 33.0 * 2f64.ln()).abs() < 1e-6);
        let ends = [0, !0].map(unit_exponential_f64);
        assert_eq!(ends[1], 2f64.powi(-54));
        assert!((ends[0] - 54.0 * 2f64.ln()).abs() < 1e-14);
        for a in (0..=u32::MAX).step_by(0x1_0001).chain(u32::MAX - 99..=u32::MAX) {
            let exact = -(-(f64::from(!a) + 0.5) / 4_294_967_296.0).ln_1p();
            let got = f64::from(unit_exponential_f32(a));
            assert!((got / exact - 1.0).abs() < 3e-7, "{a:#x}: {got} for {exact}");
        }
    }

    #[test]
    fn a_range_without_its_upper_end() {
        // The word of element 4 rounds up to 1 - 2^-24, which this range would round to its end.
        let mut u = vec![0f32; 100_000];
        uniform(DRAW, 0, &mut u);
        let mut x = vec![0f32; u.len()];
        uniform_between(DRAW, 0, 1.0, 1.0 + 1e-6, &mut x).unwrap();
        assert!(x.iter().all(|x| (1.0..1.000_001).contains(x)));
        assert_eq!(x.iter().copied().fold(0.0, f32::max), 1.000_001f32.next_down());
        uniform_between(DRAW, 0, -0.3, 0.4, &mut x).unwrap();
        assert!(x.iter().zip(&u).all(|(&x, &u)| x == u.mul_add(0.7, -0.3)));
        uniform_between(DRAW, 0, 0.5, 0.5, &mut x[..3]).unwrap();
        assert_eq!(x[..3], [0.5; 3]);
    }

    #[test]
    fn equal_rates_give_the_scalars_numbers() {
        let (mut one, mut each) = (vec![half::bf16::ZERO; 1003], vec![half::bf16::ZERO; 1003]);
        exponential(DRAW, 5, 1.5, &mut one).unwrap();
        exponential_each(DRAW, 5, &vec![half::bf16::from_f32(1.5); 1003], &mut each).unwrap();
        assert_eq!(one, each);
        let mut words = [0; 1];
        bits32(DRAW, 5, &mut words);
        assert_eq!(one[0], half::bf16::from_f32(unit_exponential_f32(words[0]) / 1.5));
    }

    #[test]
    fn refusals() {
        let mut out = [0f32; 2];
        let refused = exponential_each(DRAW, 7, &[1.0, -2.0], &mut out).unwrap_err().to_string();
        assert_eq!(refused, "exponential: a rate is positive and finite; got -2 for element 8");
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-60] {
            exponential(DRAW, 0, rate, &mut out).unwrap_err();
        }
        exponential_each(DRAW, 0, &[1.0], &mut out).unwrap_err();
        for (low, high) in [(1.0, 0.0), (0.0, f64::NAN), (-3e38, 3e38), (0.0, 1e39)] {
            uniform_between(DRAW, 0, low, high, &mut out).unwrap_err();
        }
        log_normal(DRAW, 0, 0.0, -1.0, &mut out).unwrap_err();
        log_normal(DRAW, 0, f64::NAN, 1.0, &mut out).unwrap_err();
    }
}
