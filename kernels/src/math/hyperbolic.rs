//! Hyperbolic sine and cosine, and the inverse hyperbolic functions.
//!
//! ```
//! use isoshard_kernels::math::hyperbolic::{acosh_f64, asinh_f64, atanh_f64, cosh_f64, sinh_f64};
//! assert_eq!((sinh_f64(-0.0), cosh_f64(0.0), sinh_f64(711.0)), (-0.0, 1.0, f64::INFINITY));
//! assert_eq!((asinh_f64(1e-20), acosh_f64(1.0), atanh_f64(1.0)), (1e-20, 0.0, f64::INFINITY));
//! ```
//!
//! Odd polynomials near 0. Elsewhere half the sum or difference of `e^x` and `e^-x`, and logarithms of a sum of two
//! numbers: `asinh x = ln(x + √(x² + 1))`, `acosh (1 + t) = ln(1 + t + √(2t + t²))`, `atanh x = ln(1 + 2x / (1 - x)) / 2`.
//! In f32, `atanh` has this formula everywhere and an error of up to 2 ulp.

use super::exponential::{ScaledExp, exp_parts};
use super::logarithm::{ln_1p_f32, ln_1p_sum, ln_sum};
use super::pair::*;

/// Returns the hyperbolic sine.
#[inline(always)]
pub fn sinh_f64(x: f64) -> f64 {
    let a = abs(x);
    let parts = quarter_exp(a);
    let (h, l) = fast_two_sum(parts.high, -(0.0625 / parts.high));
    let large = select(a > 710.4758600739439, f64::INFINITY, 2.0 * (h + (l + parts.low)));
    let z = a * a;
    let small = fma(
        a,
        z * polynomial!(
            z,
            7.746_178_593_018_827e-13,
            1.605_767_962_380_163_8e-10,
            2.505_211_769_590_782_3e-08,
            2.755_731_919_138_181_6e-06,
            0.000_198_412_698_413_241_98,
            0.008_333_333_333_333_299,
            0.166_666_666_666_666_66
        ),
        a,
    );
    copysign(select(a < 1.0, small, large), x)
}

/// Returns the hyperbolic cosine.
#[inline(always)]
pub fn cosh_f64(x: f64) -> f64 {
    let a = abs(x);
    let parts = quarter_exp(a);
    let (h, l) = fast_two_sum(parts.high, 0.0625 / parts.high);
    select(a > 710.4758600739439, f64::INFINITY, 2.0 * (h + (l + parts.low)))
}

/// Returns `e^a / 4` as a sum of two numbers; for large `a` the result is arbitrary.
#[inline(always)]
fn quarter_exp(a: f64) -> ScaledExp {
    let parts = exp_parts(select(a > 711.0, 711.0, a), 0.0);
    let s = power_of_two(minus(parts.n, 2));
    let (high, low) = fast_two_sum(parts.high, parts.low);
    ScaledExp { n: parts.n, high: high * s, low: low * s }
}

/// Returns the inverse hyperbolic sine.
#[inline(always)]
pub fn asinh_f64(x: f64) -> f64 {
    let a = abs(x);
    let huge: bool = a > 268435456.0;
    let b = select(huge, 1.0, a);
    let (p, p_rest) = two_product(b, b);
    let (s, s_rest) = two_sum(1.0, p);
    let root = sqrt(s);
    let root_rest = (fma(-root, root, s) + (s_rest + p_rest)) * (0.5 / root);
    let (w, w_rest) = two_sum(root, b);
    let log = ln_sum(select(huge, a, w), select(huge, 0.0, w_rest + root_rest), select(huge, 1.0, 0.0));
    let large = select(a == f64::INFINITY, a, log);
    let z = b * b;
    let small = fma(
        a,
        z * polynomial!(
            z,
            0.001_885_411_765_503_900_3,
            -0.004_992_717_198_142_511,
            0.007_622_309_427_481_728,
            -0.009_591_452_221_673_173,
            0.011_526_210_169_675_569,
            -0.013_962_235_682_232_349,
            0.017_352_587_715_192_57,
            -0.022_372_151_449_922_602,
            0.030_381_944_248_546_365,
            -0.044_642_857_140_252_436,
            0.074_999_999_999_986_4,
            -0.166_666_666_666_666_66
        ),
        a,
    );
    copysign(select(a < 0.5, small, large), x)
}

/// Returns the inverse hyperbolic cosine, at least 0; NaN if `x` is below 1.
#[inline(always)]
pub fn acosh_f64(x: f64) -> f64 {
    let huge: bool = x > 268435456.0;
    let t = select(huge, 1.0, x - 1.0);
    let (p, p_rest) = two_product(t, t);
    let (s, s_rest) = two_sum(2.0 * t, p);
    let root = sqrt(s);
    let correction = (fma(-root, root, s) + (s_rest + p_rest)) * (0.5 / root);
    let (u, u_rest) = two_sum(root, t);
    let near = ln_1p_sum(u, select(t > 0.0, u_rest + correction, 0.0));
    let far = ln_sum(select(huge, x, 2.0), 0.0, 1.0);
    let y = select(huge, far, near);
    let real = select(x == f64::INFINITY, x, y);
    select(x >= 1.0, real, f64::NAN)
}

/// Returns the inverse hyperbolic tangent; NaN if |`x`| is above 1.
#[inline(always)]
pub fn atanh_f32(x: f32) -> f32 {
    let a = x.abs();
    (0.5 * ln_1p_f32((a + a) / (1.0 - a))).copysign(x)
}

/// Returns the inverse hyperbolic tangent; NaN if |`x`| is above 1.
#[inline(always)]
pub fn atanh_f64(x: f64) -> f64 {
    let a = abs(x);
    let q = 2.0 * a / (1.0 - a);
    let large = 0.5 * ln_1p_sum(q, 0.0);
    let limited = select(a == 1.0, f64::INFINITY, large);
    let z = a * a;
    let small = fma(
        a,
        z * polynomial!(
            z,
            0.210_980_978_859_757_97,
            -0.144_504_911_834_144_68,
            0.135_579_039_136_922_99,
            0.012_292_448_728_540_531,
            0.054_419_154_182_345_87,
            0.051_607_698_811_471_62,
            0.058_930_996_925_900_42,
            0.066_658_863_527_018_84,
            0.076_923_459_402_706_38,
            0.090_909_078_815_091_89,
            0.111_111_111_339_389_68,
            0.142_857_142_854_901_06,
            0.200_000_000_000_008_64,
            0.333_333_333_333_333_3
        ),
        a,
    );
    let y = select(a < 0.5, small, limited);
    copysign(select(a <= 1.0, y, f64::NAN), x)
}
