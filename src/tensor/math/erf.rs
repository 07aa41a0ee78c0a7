//! The error function.
//!
//! Up to about 1 an odd polynomial; beyond, `1 - exp(p(x))` with `p` a polynomial for `ln(erfc(x))`, whose error counts
//! the less the smaller erfc is. Both are minimax fits of our own (Lawson's iteration at Chebyshev nodes in 60
//! digits); both are always computed and one is selected.
//!
//! Error bounds in units in the last place: f32 1.5 (measured over every float), f64 2.

use super::exp::{exp_f32, exp_f64};

macro_rules! erf {
    ($t:ident, $name:ident, $exp:ident, $cut:expr, $saturated:expr, $centre:expr, [$($small:expr),*], [$($big:expr),*]) => {
        /// The error function `2 / sqrt(pi) * integral of e^(-t^2) from 0 to x`.
        #[inline(always)]
        pub fn $name(x: $t) -> $t {
            let a = x.abs();
            let z = a * a;
            let mut small: $t = 0.0;
            $(small = small.mul_add(z, $small);)*
            let small = small.mul_add(a, a);
            let b = (if a > $saturated { $saturated } else { a }) - $centre;
            let mut big: $t = 0.0;
            $(big = big.mul_add(b, $big);)*
            let big = 1.0 - $exp(big);
            (if a < $cut { small } else { big }).copysign(x)
        }
    };
}

erf!(
    f32,
    erf_f32,
    exp_f32,
    0.92,
    4.0,
    0.0,
    [-5.966_928_7e-4, 4.988_535e-3, -2.676_348_7e-2, 1.128_173_1e-1, -3.761_248_6e-1, 1.283_791_5e-1],
    [
        1.957_906_9e-4,
        -3.041_794_8e-3,
        2.222_123_4e-2,
        -1.039_196_7e-1,
        -6.371_960_6e-1,
        -1.127_667_3,
        -1.977_367_0e-4
    ]
);

erf!(
    f64,
    erf_f64,
    exp_f64,
    1.0,
    6.0,
    3.0,
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
    ],
    [
        1.048_776_703_316_388_2e-12,
        8.708_582_021_390_569e-12,
        2.499_792_278_906_539_8e-11,
        2.858_064_146_380_645_4e-11,
        -1.331_598_305_149_378e-10,
        -6.830_898_055_053_42e-11,
        -7.930_608_318_723_036e-10,
        9.163_399_931_076_717e-10,
        1.208_898_090_664_875_7e-8,
        -1.358_694_522_759_756_7e-7,
        1.069_098_064_477_093_5e-6,
        -7.115_880_818_140_405e-6,
        4.308_167_178_980_832_5e-5,
        -2.456_920_572_465_603_6e-4,
        1.353_310_495_862_949_5e-3,
        -7.411_891_787_873_294e-3,
        -9.573_942_188_040_456e-1,
        -6.303_753_689_003_944,
        -10.720_363_041_981_131
    ]
);

#[cfg(test)]
mod tests {
    use super::super::exp::tests::{ulps_f64, worst_f32};
    use super::*;

    /// Kummer's series, all of whose terms are positive.
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
        // The series itself is good to some units only where x is large.
        let worst = (-130_000..=130_000).map(|i| f64::from(i) * 0.000_05).fold((0.0, 0.0), |worst, x| {
            let ulps = ulps_f64(erf_f64(x), series(x));
            if ulps > worst.0 { (ulps, x) } else { worst }
        });
        println!("{worst:?}");
        assert!(worst.0 <= 40.0, "{worst:?}");
        // Abramowitz and Stegun, table 7.1, and 30-digit values.
        assert_eq!(erf_f64(0.5), 0.520_499_877_813_046_5);
        assert!((erf_f64(1.0) - 0.842_700_792_949_714_9).abs() < 3e-16);
        assert!((erf_f64(2.0) - 0.995_322_265_018_952_7).abs() < 3e-16);
        assert_eq!((erf_f64(f64::INFINITY), erf_f64(-7.0)), (1.0, -1.0));
        assert!(erf_f64(f64::NAN).is_nan());
    }
}
