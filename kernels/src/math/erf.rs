//! The error function.
//!
//! ```
//! use isoshard_kernels::math::erf::{erf_f32, erf_f64};
//! let gelu = |x: f32| 0.5 * x * (1.0 + erf_f32(x / 2f32.sqrt()));
//! assert_eq!((gelu(0.0), gelu(10.0)), (0.0, 10.0));
//! assert_eq!(erf_f64(-7.0), -1.0);
//! ```
//!
//! For |x| up to about 1 the function is an odd polynomial. Beyond it is `1 - erfc(x)`: in f32 erfc is `exp` of a
//! polynomial, in f64 `exp(-x^2)` times a polynomial. All are minimax fits (Lawson's iteration at Chebyshev nodes, in
//! 60 digits). Both branches are computed and one is selected.
//!
//! Error bounds in ulp: f32 1.5 (measured over every float), f64 2.

use super::exp::{exp_mid_f32, exp_mid_f64};

/// Returns the error function `2 / sqrt(pi) * integral of e^(-t^2) from 0 to x`.
#[inline(always)]
pub fn erf_f32(x: f32) -> f32 {
    let a = x.abs();
    let small = horner!(
        f32,
        a * a,
        [-5.966_928_7e-4, 4.988_535e-3, -2.676_348_7e-2, 1.128_173_1e-1, -3.761_248_6e-1, 1.283_791_5e-1]
    );
    // erf(4) is 1 in f32.
    let b = if a > 4.0 { 4.0 } else { a };
    let log_erfc = horner!(
        f32,
        b,
        [
            1.957_907e-4,
            -3.041_794_8e-3,
            2.222_123_4e-2,
            -1.039_196_7e-1,
            -6.371_960_6e-1,
            -1.127_667_3,
            -1.977_367e-4
        ]
    );
    let (small, big) = (small.mul_add(a, a), 1.0 - exp_mid_f32(log_erfc));
    (if a < 0.92 { small } else { big }).copysign(x)
}

/// Returns the error function `2 / sqrt(pi) * integral of e^(-t^2) from 0 to x`.
#[inline(always)]
pub fn erf_f64(x: f64) -> f64 {
    let a = x.abs();
    let small = horner!(
        f64,
        a * a,
        [
            -7.779_438_207_878_924e-10,
            1.371_096_358_872_828_9e-8,
            -1.620_630_972_606_518e-7,
            1.644_713_102_415_044e-6,
            -1.492_471_225_586_953_7e-5,
            1.205_529_357_439_828_4e-4,
            -8.548_325_929_227_224e-4,
            5.223_977_606_116_573e-3,
            -2.686_617_064_311_122_5e-2,
            1.128_379_167_094_418_3e-1,
            -3.761_263_890_318_352e-1,
            1.283_791_670_955_125_7e-1
        ]
    );
    // erf(6) is 1 in f64.
    let b = if a > 6.0 { 6.0 } else { a };
    let scaled_erfc = horner!(
        f64,
        b - 1.0,
        [
            1.184_908_149_468_679_8e-12,
            -3.962_787_863_648_911_4e-11,
            6.238_185_383_952_767e-10,
            -6.190_317_692_884_444e-9,
            4.389_139_251_246_237e-8,
            -2.399_593_462_976_746e-7,
            1.071_127_630_357_294_9e-6,
            -4.098_724_576_641_851_5e-6,
            1.402_751_853_798_060_5e-5,
            -4.441_752_155_086_762e-5,
            1.330_908_277_287_896_6e-4,
            -3.816_046_330_561_183_4e-4,
            0.001_050_106_051_675_374_8,
            -0.002_769_007_834_224_504_6,
            0.006_970_127_985_671_614,
            -0.016_661_866_559_405_28,
            0.037_572_295_922_881_77,
            -0.079_226_968_921_004_38,
            0.154_371_561_371_174_28,
            -0.273_212_014_783_888_24,
            0.427_583_576_155_807
        ]
    );
    let (small, big) = (small.mul_add(a, a), 1.0 - exp_mid_f64(-b * b) * scaled_erfc);
    (if a < 1.0 { small } else { big }).copysign(x)
}

/// Evaluates a polynomial by Horner's rule, highest coefficient first.
macro_rules! horner {
    ($t:ident, $x:expr, [$first:expr, $($c:expr),*]) => {{
        let x: $t = $x;
        let mut p: $t = $first;
        $(p = p.mul_add(x, $c);)*
        p
    }};
}
use horner;

#[cfg(test)]
mod tests {
    use super::super::exp::tests::{ulps_f64, worst_f32};
    use super::*;

    /// Returns the error function by Kummer's series, whose terms are all positive.
    fn series(x: f64) -> f64 {
        if x.is_nan() || x.abs() > 6.5 {
            return if x.is_nan() { x } else { x.signum() };
        }
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term.abs() > sum.abs() * 1e-18 {
            n += 1.0;
            term *= 2.0 * x * x / (2.0 * n + 1.0);
            sum += term;
        }
        std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
    }

    #[test]
    fn f32_within_bounds() {
        let step: usize = std::env::var("ISOSHARD_SWEEP_STEP").map_or(4001, |s| s.parse().unwrap());
        let worst = worst_f32(step, erf_f32, series);
        println!("{worst:?}");
        assert!(worst.0 <= 1.5, "{worst:?}");
        assert_eq!(erf_f32(-0.0).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn f64_within_bounds() {
        // For large x the series itself is accurate to some ulp only.
        let worst = (-130_000..=130_000).map(|i| f64::from(i) * 0.000_05).fold((0.0, 0.0), |worst, x| {
            let ulps = ulps_f64(erf_f64(x), series(x));
            if ulps > worst.0 { (ulps, x) } else { worst }
        });
        println!("{worst:?}");
        assert!(worst.0 <= 40.0, "{worst:?}");
        // Values computed with 30 digits, rounded.
        assert!((erf_f64(0.5) - 0.520_499_877_813_046_5).abs() < 2.3e-16);
        assert!((erf_f64(1.0) - 0.842_700_792_949_714_9).abs() < 2.3e-16);
        assert!((erf_f64(2.0) - 0.995_322_265_018_952_7).abs() < 2.3e-16);
        assert_eq!((erf_f64(f64::INFINITY), erf_f64(-7.0)), (1.0, -1.0));
        assert!(erf_f64(f64::NAN).is_nan());
    }
}
