//! The logarithm of the gamma function (`lgamma`), and its first two derivatives (`digamma`, `trigamma`).
//!
//! ```
//! use isoshard_kernels::math::gamma::{digamma_f64, lgamma_f64};
//! assert_eq!((lgamma_f64(1.0), lgamma_f64(2.0), lgamma_f64(-3.0)), (0.0, 0.0, f64::INFINITY));
//! assert!((lgamma_f64(5.0) - 24f64.ln()).abs() < 5e-16);
//! assert!((digamma_f64(1.0) + 0.5772156649015329).abs() < 2e-16); // Euler's constant
//! ```
//!
//! A polynomial about 2 (for digamma about its zero 1.46), to which smaller and larger arguments are shifted by the
//! recurrence; Stirling's series with fitted coefficients from 4 on; Euler's reflection for negative arguments. The
//! functions `*_near_f64` have no branch, so that loops vectorise, and return NaN for negative arguments.
//!
//! Near zeros of `lgamma` other than 2, and near negative zeros of `digamma`, two terms cancel. The error there is
//! below 4e-16 absolute for arguments above 0, and 4e-16 of the cancelled terms below.

use super::circular::tan_f64;
use super::log::ln_f64;
use super::logarithm::ln_pair;
use super::pair::*;
use super::trig::sin_cos_2pi_f64;

/// Returns the logarithm of the absolute value of the gamma function: infinite at 0 and negative integers.
pub fn lgamma_f64(x: f64) -> f64 {
    if x >= 0.0 || x.is_nan() {
        return lgamma_near_f64(x);
    }
    let a = -x;
    if a < 1e-17 {
        return -ln_f64(a);
    }
    let sine = sin_pi(a);
    if sine == 0.0 || a == f64::INFINITY {
        return f64::INFINITY;
    }
    1.1447298858494002 - ln_f64(a * abs(sine)) - lgamma_near_f64(a)
}

/// Returns the derivative of [`lgamma_f64`]: infinite at zeros, NaN at negative integers.
pub fn digamma_f64(x: f64) -> f64 {
    if x >= 0.0 || x.is_nan() {
        return digamma_near_f64(x);
    }
    let fraction = -x - (-x).floor();
    if fraction == 0.0 {
        return f64::NAN;
    }
    // tan(πx) has period 1; the angle is taken from the nearest integer.
    let angle = if fraction > 0.5 { 1.0 - fraction } else { -fraction };
    digamma_near_f64(1.0 - x) - 3.141592653589793 / tan_f64(3.141592653589793 * angle)
}

/// Returns the derivative of [`digamma_f64`]: infinite at zeros and negative integers.
pub fn trigamma_f64(x: f64) -> f64 {
    if x >= 0.0 || x.is_nan() {
        return trigamma_near_f64(x);
    }
    // Euler's reflection: both terms are positive, and the first is the larger by far.
    let ratio = 3.141592653589793 / sin_pi(-x);
    ratio * ratio - trigamma_near_f64(1.0 - x)
}

/// Returns sin(πa) for `a` of at least 0.
fn sin_pi(a: f64) -> f64 {
    let fraction = a - a.floor();
    let near = if fraction > 0.5 { 1.0 - fraction } else { fraction };
    sin_cos_2pi_f64(0.5 * near).0
}

/// Returns [`lgamma_f64`] for `x` of at least 0, and NaN for negative numbers.
#[inline(always)]
pub fn lgamma_near_f64(x: f64) -> f64 {
    let big: bool = x >= 4.0;
    let small: bool = x < 1.5;
    // Between 2.5 and 4, one or two factors are split off.
    let first: bool = x > 2.5 && x < 4.0;
    let y = select(first, x - 1.0, x);
    let second: bool = y > 2.5 && x < 4.0;
    // Below 1/2, the factors x and x + 1 are divided off, and below 3/2 the factor x.
    let least: bool = x < 0.5;
    let below = select(least, x, x - 1.0);
    let t = select(small, below, select(second, y - 1.0, y) - 2.0);
    let middle = t * polynomial!(
        t,
        6.379_047_507_619_774e-08,
        -1.341_281_975_851_728_7e-07,
        2.030_480_675_161_522_7e-07,
        -4.303_558_760_359_961e-07,
        9.578_663_334_114_758e-07,
        -2.044_920_146_701_511_5e-06,
        4.374_374_916_915_131e-06,
        -9.438_458_716_242_811e-06,
        2.050_726_741_605_779e-05,
        -4.492_635_110_383_333_4e-05,
        9.945_750_909_889_392e-05,
        -0.000_223_154_750_745_203_67,
        0.000_509_669_524_885_309_6,
        -0.001_192_753_912_001_022_6,
        0.002_890_510_330_738_737,
        -0.007_385_551_028_668_153_5,
        0.020_580_808_427_784_57,
        -0.067_352_301_053_198_14,
        0.322_467_033_424_113_2,
        0.422_784_335_098_467_13
    );
    let (g, g_rest) = two_sum(1.0, x);
    let product = x * g;
    let product_rest = fma(x, g, -product) + x * g_rest;
    let factors = select(least, product, select(first, y, 1.0) * select(second, y - 1.0, 1.0));
    let (h, l) = ln_pair(select(big || (small && !least), x, factors));
    let sign = select(small, -1.0, 1.0);
    let rest = l + select(least && x > 1e-290, product_rest / product, 0.0);
    let (sum, sum_rest) = two_sum(sign * h, middle);
    let shifted = sum + fma(sign, rest, sum_rest);
    let r = 1.0 / x;
    let series = fma(
        r,
        polynomial!(
            r * r,
            -0.173_902_239_784_223_67,
            0.086_008_869_153_620_22,
            -0.024_319_700_815_182_16,
            0.006_210_992_276_421_007,
            -0.001_912_536_810_857_489_7,
            0.000_841_672_148_378_057_9,
            -0.000_595_237_367_260_747_4,
            0.000_793_650_790_180_589_4,
            -0.002_777_777_777_771_288,
            0.083_333_333_333_333_33
        ),
        0.9189385332046728,
    );
    let half = x - 0.5;
    let (p, p_rest) = two_product(half, h);
    let (s, s_rest) = two_sum(p, -x);
    let stirling = s + (s_rest + (p_rest + fma(half, l, series)));
    let limited = select(x > 2.5e305, f64::INFINITY, stirling);
    let positive = select(big, limited, shifted);
    select(x > 0.0, positive, select(x == 0.0, f64::INFINITY, f64::NAN))
}

/// Returns [`digamma_f64`] for `x` of at least 0, and NaN for negative numbers.
#[inline(always)]
pub fn digamma_near_f64(x: f64) -> f64 {
    let big: bool = x >= 4.0;
    let small: bool = x < 1.0;
    let first: bool = x > 2.5 && x < 4.0;
    let y = select(first, x - 1.0, x);
    let second: bool = y > 2.5 && x < 4.0;
    let at = select(small, x + 1.0, select(second, y - 1.0, y));
    // Digamma is (at - zero) times a polynomial; the zero is a sum of two numbers.
    let zero_distance =
        select(small, x - 0.46163214496836225, at - 1.4616321449683622) - 9.549995429965697e-17;
    let middle = zero_distance
        * polynomial!(
            at - 1.75,
            2.569_465_264_632_448e-07,
            -4.496_565_498_985_557_3e-07,
            -2.609_607_372_762_59e-07,
            4.566_808_420_711_116_7e-07,
            1.116_428_918_813_740_4e-06,
            -1.953_754_956_956_086e-06,
            1.346_898_949_812_008_4e-06,
            -2.357_105_031_640_297e-06,
            5.599_510_043_782_328_6e-06,
            -9.799_384_565_630_145e-06,
            1.642_386_413_910_749e-05,
            -2.874_359_529_783_872_6e-05,
            5.055_925_908_072_352e-05,
            -8.849_261_403_357_272e-05,
            0.000_154_837_614_900_619_34,
            -0.000_271_071_714_276_538_37,
            0.000_474_679_256_997_828_6,
            -0.000_831_499_489_638_017_3,
            0.001_457_374_860_679_761,
            -0.002_556_686_334_307_968,
            0.004_491_813_698_189_461,
            -0.007_910_468_783_898_505,
            0.013_985_786_184_013_25,
            -0.024_890_048_488_846_822,
            0.044_799_654_452_787_02,
            -0.082_285_586_355_779_37,
            0.157_120_113_352_042_46,
            -0.326_254_627_868_105_7,
            0.858_183_217_126_299_5
        );
    let (r, r_rest) = reciprocal_pair(select(first, y, x));
    let (s, s_rest) = reciprocal_pair(select(second, y - 1.0, 1.0));
    let one = select(small, -r, select(first, r, 0.0));
    let one_rest = select(small, -r_rest, select(first, r_rest, 0.0));
    let other = select(second, s, 0.0);
    let (sum, sum_rest) = two_sum(one, middle);
    let (total, total_rest) = two_sum(sum, other);
    let shifted = total + (total_rest + (sum_rest + (one_rest + select(second, s_rest, 0.0))));
    let (h, l) = ln_pair(x);
    let z = r * r;
    let series = fma(
        z,
        polynomial!(
            z,
            -16.272_492_444_252_475,
            7.874_672_567_242_462,
            -2.000_475_850_397_833_3,
            0.399_295_806_665_556_3,
            -0.082_048_351_564_597_36,
            0.021_067_490_343_790_643,
            -0.007_575_437_694_477_858,
            0.004_166_664_261_695_412,
            -0.003_968_253_958_849_537,
            0.008_333_333_333_318_827,
            -0.083_333_333_333_333_33
        ),
        l,
    );
    let stirling = h + fma(-0.5, r, series);
    let positive = select(big, select(x == f64::INFINITY, x, stirling), shifted);
    // 1/x overflows for the smallest numbers.
    let finite = select(x < 1e-300, -r, positive);
    select(x > 0.0, finite, select(x == 0.0, -1.0 / x, f64::NAN))
}

/// Returns [`trigamma_f64`] for `x` of at least 0, and NaN for negative numbers.
#[inline(always)]
pub fn trigamma_near_f64(x: f64) -> f64 {
    // The recurrence adds eight positive terms to Stirling's series from 8 on.
    let term = |k: f64| {
        let r = 1.0 / (x + k);
        r * r
    };
    let upper = ((term(7.0) + term(6.0)) + term(5.0)) + term(4.0);
    let sum = (((upper + term(3.0)) + term(2.0)) + term(1.0)) + term(0.0);
    let big: bool = x >= 8.0;
    let r = 1.0 / select(big, x, x + 8.0);
    let z = r * r;
    let series = polynomial!(
        z,
        6_192.123_188_405_797,
        -529.124_242_424_242_4,
        54.971_177_944_862_156,
        -7.092_156_862_745_098,
        1.166_666_666_666_666_7,
        -0.253_113_553_113_553_1,
        0.075_757_575_757_575_76,
        -0.033_333_333_333_333_33,
        0.023_809_523_809_523_808,
        -0.033_333_333_333_333_33,
        0.166_666_666_666_666_66
    );
    let stirling = fma(0.5 * r, r, r) + r * (z * series);
    let positive = select(big, 0.0, sum) + stirling;
    select(x >= 0.0, positive, f64::NAN)
}

/// Returns `1 / x` as a sum of two numbers, for `x` that is normal and whose reciprocal is.
#[inline(always)]
fn reciprocal_pair(x: f64) -> (f64, f64) {
    let r = 1.0 / x;
    (r, fma(-r, x, 1.0) * r)
}
