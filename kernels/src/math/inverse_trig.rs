//! Inverse sine, cosine and tangent.
//!
//! ```
//! use isoshard_kernels::math::inverse_trig::{acos_f64, asin_f64, atan_f64, atan2_f64};
//! use std::f64::consts::{FRAC_PI_2, PI};
//! assert_eq!((asin_f64(1.0), acos_f64(-1.0), atan_f64(f64::INFINITY)), (FRAC_PI_2, PI, FRAC_PI_2));
//! assert_eq!((atan2_f64(0.0, -0.0), atan2_f64(-0.0, 1.0)), (PI, -0.0));
//! ```
//!
//! Odd polynomials after a reduction of the argument: `asin x = π/2 - 2 asin √((1 - x) / 2)` above 1/2, and
//! `atan x = atan c + atan((x - c) / (1 + c x))` for c = 0, 1/2, 1 as in FDLIBM's `s_atan.c`.

use super::pair::*;

/// Returns the angle in [-π/2, π/2] whose sine is `x`; NaN if |`x`| is above 1.
#[inline(always)]
pub fn asin_f64(x: f64) -> f64 {
    let a = abs(x);
    let big: bool = a > 0.5;
    let z = select(big, (1.0 - a) * 0.5, a * a);
    let s = select(big, sqrt(z), a);
    let p = s * (z * asin_poly(z));
    let (h, l) = fast_two_sum(HALF_PI[0], -2.0 * s);
    let y = select(big, h + (l + fma(-2.0, p, HALF_PI[1])), s + p);
    copysign(y, x)
}

/// Returns the angle in [0, π] whose cosine is `x`; NaN if |`x`| is above 1.
#[inline(always)]
pub fn acos_f64(x: f64) -> f64 {
    let a = abs(x);
    let big: bool = a > 0.5;
    let z = select(big, (1.0 - a) * 0.5, a * a);
    let s = select(big, sqrt(z), a);
    let p = s * (z * asin_poly(z));
    let (h, l) = fast_two_sum(HALF_PI[0], -x);
    let middle = h + (l + (HALF_PI[1] - copysign(p, x)));
    let (g, k) = fast_two_sum(2.0 * HALF_PI[0], -2.0 * s);
    let left = g + (k + fma(-2.0, p, 2.0 * HALF_PI[1]));
    let outer = select(x < 0.0, left, 2.0 * (s + p));
    select(big, outer, middle)
}

/// Returns `(asin s / s - 1) / s²`, with `z = s²` up to 1/4.
#[inline(always)]
fn asin_poly(z: f64) -> f64 {
    polynomial!(
        z,
        0.029_612_011_264_955_12,
        -0.019_241_671_746_743_04,
        0.019_554_513_336_123_378,
        0.003_044_879_909_455_677_3,
        0.009_319_560_794_767_446,
        0.009_621_842_970_100_282,
        0.011_566_459_612_121_669,
        0.013_963_780_012_203_57,
        0.017_352_816_540_325_496,
        0.022_372_157_443_507_22,
        0.030_381_944_475_532_34,
        0.044_642_857_142_551_895,
        0.075_000_000_000_001_18,
        0.166_666_666_666_666_66
    )
}

/// Returns the angle in [-π/2, π/2] whose tangent is `x`.
#[inline(always)]
pub fn atan_f64(x: f64) -> f64 {
    let a = abs(x);
    let steep: bool = a > 1.0;
    let (h, l) = atan_ratio(select(steep, 1.0, a), select(steep, a, 1.0));
    let (top, rest) = fast_two_sum(HALF_PI[0], -h);
    let y = select(steep, top + (rest + (HALF_PI[1] - l)), h + l);
    copysign(y, x)
}

/// Returns the angle in [-π, π] of the point with abscissa `x` and ordinate `y`, with C99's values at zeros and
/// infinities.
#[inline(always)]
pub fn atan2_f64(y: f64, x: f64) -> f64 {
    let a = abs(y);
    let b = abs(x);
    let steep: bool = a > b;
    let low = select(steep, b, a);
    let high = select(steep, a, b);
    let same: bool = a == b;
    // 1 for two infinities, 0 for two zeros. Large numbers are scaled, so that 2 high + low is finite, and small ones, so
    // that fractions of them are exact.
    let scale = select(high > 1e300, 0.0625, select(high < 1e-290, 1.2676506002282294e30, 1.0));
    let zero: bool = high == 0.0;
    let infinite: bool = same && high == f64::INFINITY;
    let n = select(infinite, 1.0, low * scale);
    let d = select(infinite || zero, 1.0, high * scale);
    let (h, l) = atan_ratio(n, d);
    let left: bool = (bits_of(x) >> 63) == 1;
    let turned = select(left, 2.0, 0.0);
    let quarters = select(steep, 1.0, turned);
    let sign = select(steep != left, -1.0, 1.0);
    let (top, rest) = fast_two_sum(quarters * HALF_PI[0], sign * h);
    let angle = top + (rest + fma(sign, l, quarters * HALF_PI[1]));
    copysign(angle, y)
}

/// Returns atan(`n` / `d`) for `n` from 0 to `d`, as a sum of two numbers.
#[inline(always)]
fn atan_ratio(n: f64, d: f64) -> (f64, f64) {
    let low: bool = n < 0.4375 * d;
    let middle: bool = n < 0.6875 * d;
    let numerator = select(low, n, select(middle, fma(2.0, n, -d), n - d));
    let denominator = select(low, d, select(middle, fma(2.0, d, n), n + d));
    let base = select(low, 0.0, select(middle, 4.636476090008061e-1, 7.853981633974483e-1));
    let base_rest = select(low, 0.0, select(middle, 2.2698777452961687e-17, 3.061616997868383e-17));
    let t = numerator / denominator;
    let z = t * t;
    let p = t
        * (z * polynomial!(
            z,
            0.014_766_421_553_794_67,
            -0.033_121_323_310_643_644,
            0.044_919_637_149_159_995,
            -0.052_166_074_167_837_08,
            0.058_769_354_965_303_5,
            -0.066_662_408_593_758_08,
            0.076_922_854_887_649_6,
            -0.090_909_083_530_496_69,
            0.111_111_110_965_877_65,
            -0.142_857_142_855_661_5,
            0.199_999_999_999_994_07,
            -0.333_333_333_333_333_3
        ));
    let (h, l) = fast_two_sum(base, t);
    (h, l + (p + base_rest))
}
