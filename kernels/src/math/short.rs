//! Functions in f64 for operands and results of f32 and narrower dtypes: polynomials as long as those need.
//!
//! ```
//! use isoshard_kernels::math::short::{acos_short, atan2_short, erfc_short, erfinv_short, pow_abs_short};
//! use std::f64::consts::PI;
//! assert_eq!((acos_short(-1.0) as f32, atan2_short(0.0, -0.0)), (PI as f32, PI));
//! assert_eq!((pow_abs_short(3.0, 7.0) as f32, pow_abs_short(0.0, -1.0) as f32), (2187.0, f32::INFINITY));
//! assert_eq!((erfc_short(0.0) as f32, erfc_short(11.0) as f32, erfinv_short(1.0)), (1.0, 0.0, f64::INFINITY));
//! ```
//!
//! Relative errors are below 2^-34 (`exp`, `ln`, and inverse tangents 2^-39), so that results rounded to f32 are within 0.501 ulp.
//! Operands are numbers of f32 (but for the exponent of a power): no square overflows, and `1 - x²` is exact. Results that f32 rounds to 0
//! or infinity may have a wrong magnitude.
//! Polynomials are minimax fits (Remez' algorithm in 50 digits), evaluated by G. Estrin's scheme (1960): its chains are shorter
//! than Horner's, and a CPU's queue holds more of them.

use super::log::with_limits_f64;
use super::pair::*;

/// Returns e to the power of `x`, or of ±700 beyond these.
#[inline(always)]
pub fn exp_short(x: f64) -> f64 {
    let above = select(x > 700.0, 700.0, x);
    let b = select(above < -700.0, -700.0, above);
    let shifted = fma(b, 1.4426950408889634, ROUND);
    let r = fma(ROUND - shifted, 0.6931471805599453, b);
    let p = estrin!(
        r,
        0.999_999_999_999_762_4,
        0.999_999_999_980_604_5,
        0.500_000_000_061_844_4,
        0.166_666_668_855_987_7,
        0.041_666_664_219_319_63,
        0.008_333_267_002_093_938,
        0.001_388_917_868_413_756_4,
        0.000_199_154_384_163_437_85,
        2.472_722_864_316_772_5e-05
    );
    p * power_of_two(minus(bits_of(shifted), bits_of(ROUND)))
}

/// Returns the natural logarithm, with the special values of [`ln_f64`](super::log::ln_f64).
#[inline(always)]
pub fn ln_short(x: f64) -> f64 {
    // The bits of √(1/2), of the exponent 0, and of 2^52.
    let above = minus(bits_of(x), 0x3fe6_a09e_667f_3bcd);
    let biased = plus(above, 0x3ff0_0000_0000_0000) >> 52;
    let e = f64_of(biased | 0x4330_0000_0000_0000) - 4503599627371519.0;
    let f = f64_of(plus(above & 0x000f_ffff_ffff_ffff, 0x3fe6_a09e_667f_3bcd)) - 1.0;
    let s = f / (2.0 + f);
    let p = estrin!(
        s * s,
        1.999_999_999_999_946_7,
        0.666_666_666_796_576_4,
        0.399_999_948_701_297_24,
        0.285_721_682_429_802_06,
        0.221_741_673_003_019_72,
        0.196_092_338_926_012_97
    );
    with_limits_f64(x, fma(e, 0.6931471805599453, s * p))
}

/// Returns `ln(1 + x)` for `x` from 0 to 1.
#[inline(always)]
pub fn ln_1p_unit_short(x: f64) -> f64 {
    let s = x / (2.0 + x);
    let p = estrin!(
        s * s,
        2.000_000_000_000_003_6,
        0.666_666_666_661_691_7,
        0.400_000_001_183_577_7,
        0.285_714_177_510_424_3,
        0.222_227_162_677_028_97,
        0.181_692_086_605_159_2,
        0.155_720_428_376_472_35,
        0.117_375_681_439_587_14,
        0.187_747_156_151_131_88
    );
    s * p
}

/// Returns `a` to the power of `y`, with the special values of [`pow_abs_f64`](super::power::pow_abs_f64).
#[inline(always)]
pub fn pow_abs_short(a: f64, y: f64) -> f64 {
    let p = y * ln_short(a);
    let above = select(p < -700.0, 0.0, exp_short(p));
    select(y == 0.0, 1.0, select(p > 700.0, f64::INFINITY, above))
}

/// Returns the angle in [-π/2, π/2] whose sine is `x`; NaN if |`x`| is above 1.
#[inline(always)]
pub fn asin_short(x: f64) -> f64 {
    let a = abs(x);
    let y = asin_half(a);
    copysign(select(a > 0.5, fma(-2.0, y, HALF_PI[0]), y), x)
}

/// Returns the angle in [0, π] whose cosine is `x`; NaN if |`x`| is above 1.
#[inline(always)]
pub fn acos_short(x: f64) -> f64 {
    let a = abs(x);
    let y = asin_half(a);
    let outer = select(x < 0.0, fma(-2.0, y, 2.0 * HALF_PI[0]), 2.0 * y);
    select(a > 0.5, outer, HALF_PI[0] - copysign(y, x))
}

/// Returns the angle whose sine is `a`, or from 1/2 on that whose sine is `√((1 - a) / 2)`.
#[inline(always)]
fn asin_half(a: f64) -> f64 {
    let big: bool = a > 0.5;
    let z = select(big, (1.0 - a) * 0.5, a * a);
    let s = select(big, sqrt(z), a);
    let p = estrin!(
        z,
        1.000_000_000_000_914_6,
        0.166_666_666_086_425_4,
        0.075_000_060_484_604_92,
        0.044_640_438_212_341_274,
        0.030_430_117_385_843_33,
        0.021_838_612_405_465_32,
        0.020_762_617_881_472_264,
        0.001_714_850_317_978_921_4,
        0.033_158_931_044_348_49
    );
    s * p
}

/// Returns the angle in [-π/2, π/2] whose tangent is `x`.
#[inline(always)]
pub fn atan_short(x: f64) -> f64 {
    let a = abs(x);
    let steep: bool = a > 1.0;
    let y = atan_unit(select(steep, 1.0, a), select(steep, a, 1.0));
    copysign(select(steep, HALF_PI[0] - y, y), x)
}

/// Returns the angle in [-π, π] of the point with abscissa `x` and ordinate `y`, with C99's values at zeros and
/// infinities.
#[inline(always)]
pub fn atan2_short(y: f64, x: f64) -> f64 {
    let a = abs(y);
    let b = abs(x);
    let steep: bool = a > b;
    let low = select(steep, b, a);
    let high = select(steep, a, b);
    // 1 for two infinities, 0 for two zeros.
    let infinite: bool = a == b && high == f64::INFINITY;
    let whole: bool = infinite || high == 0.0;
    let angle = atan_unit(select(infinite, 1.0, low), select(whole, 1.0, high));
    let acute = select(steep, HALF_PI[0] - angle, angle);
    let left: bool = (bits_of(x) >> 63) == 1;
    copysign(select(left, 2.0 * HALF_PI[0] - acute, acute), y)
}

/// Returns atan(`n` / `d`) for `n` from 0 to `d`.
#[inline(always)]
fn atan_unit(n: f64, d: f64) -> f64 {
    let t = n / d;
    let p = estrin!(
        t * t,
        0.999_999_999_998_506_1,
        -0.333_333_332_726_674_8,
        0.199_999_958_987_360_23,
        -0.142_856_044_569_820_54,
        0.111_095_641_051_531_05,
        -0.090_777_096_462_210_62,
        0.076_181_782_833_386_99,
        -0.063_774_565_866_815_26,
        0.050_680_791_424_477_53,
        -0.035_574_312_659_076_32,
        0.020_219_352_870_649_39,
        -0.008_409_190_318_331_946,
        0.002_220_629_015_326_136_6,
        -0.000_275_450_182_032_892_6
    );
    t * p
}

/// Returns `1 - erf x` without cancellation.
#[inline(always)]
pub fn erfc_short(x: f64) -> f64 {
    let whole = abs(x);
    let a = select(whole > 11.0, 11.0, whole);
    // e^(a²) erfc(a) (1 + 2a) is a polynomial in (a - 3) / (a + 3). One division serves both quotients.
    let b = a + 3.0;
    let c = fma(2.0, a, 1.0);
    let inverse = 1.0 / (b * c);
    let p = estrin!(
        (a - 3.0) * (inverse * c),
        1.253_008_058_284_705_6,
        -0.135_621_106_400_779_48,
        -0.047_562_296_952_501_276,
        0.129_645_173_657_333_1,
        -0.119_273_584_128_713_93,
        0.068_307_819_887_869_53,
        -0.023_771_461_823_099_214,
        0.002_530_356_776_692_858_6,
        0.001_894_033_692_117_593_3,
        -0.000_780_185_520_923_176_3,
        -0.000_119_369_362_963_248_04,
        0.000_117_228_120_944_314_06,
        1.905_720_399_660_469_8e-05,
        -4.849_624_400_463_327e-06
    );
    let tail = p * (inverse * b) * exp_short(-(a * a));
    select(x < 0.0, 2.0 - tail, tail)
}

/// Returns the number whose error function is `x`: infinite at ±1, NaN beyond.
#[inline(always)]
pub fn erfinv_short(x: f64) -> f64 {
    // erfinv(x) / x is a polynomial of w, and of √w from 5 on (M. Giles, 2010).
    let w = -ln_short(fma(-x, x, 1.0));
    let near = estrin!(
        w,
        0.886_226_925_439_995_3,
        0.232_013_667_621_713_52,
        0.011_549_326_879_258,
        -0.002_335_019_238_657_313,
        -0.000_128_274_797_538_332_38,
        4.699_711_503_543_513_4e-05,
        1.608_764_635_170_121_8e-06,
        -7.199_010_866_423_899e-07,
        -1.786_165_863_795_475_2e-07,
        6.859_338_366_243_75e-08,
        -8.631_000_790_499_066e-09,
        4.510_320_742_591_049e-10,
        -4.287_985_852_826_654_7e-13,
        -6.207_697_532_001_388e-13
    );
    let far = estrin!(
        sqrt(w) - 3.0,
        2.832_976_798_570_173,
        1.001_675_276_620_923_1,
        0.009_445_540_211_105_614,
        -0.007_643_801_706_222_384,
        0.005_684_840_273_924_027,
        -0.003_558_803_273_270_117_6,
        0.001_486_141_510_270_148_5,
        -0.000_149_246_268_580_631_92,
        -0.000_291_056_159_075_115_86,
        0.000_207_941_041_805_359_93,
        -3.353_048_443_688_845e-05,
        -2.880_403_847_185_441_6e-05,
        1.250_168_132_196_728_5e-05
    );
    select(abs(x) == 1.0, copysign(f64::INFINITY, x), x * select(w < 5.0, near, far))
}
