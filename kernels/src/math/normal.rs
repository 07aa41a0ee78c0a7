//! The normal distribution function, as two factors of its tail.
//!
//! For `a >= 0` the tail `1 - Φ(a)` is [`bell`](bell_f32)`(a) · `[`mills`](mills_f32)`(a)`, with `bell a = e^(-a²/2)` and
//! Mills' ratio divided by `√(2π)` (Mills 1926). So `Φ(x)` is the tail at `|x|` for `x < 0`, and 1 minus the tail else:
//! nothing cancels. The density is `bell(x) / √(2π)`.
//!
//! ```
//! use isoshard_kernels::math::normal::{bell_f64, mills_f64};
//! let tail = |a: f64| bell_f64(a) * mills_f64(a);
//! assert_eq!((tail(0.0), tail(40.0)), (0.5, 0.0));
//! assert!((tail(6.0) / 9.865876450376981e-10 - 1.0).abs() < 1e-15); // 1 - Φ(6) in f64 would have 7 digits.
//! ```
//!
//! The exponent's rounding would be multiplied by a²/2, so it is not rounded: its parts are `x · (-x/2)` in a fused
//! multiply-add and a multiple of an `ln 2` of few bits. Mills' ratio is a quotient of polynomials whose coefficients are all
//! positive (minimax, Lawson's iteration in 50 digits).
//!
//! Error bounds in ulp for results that are normal numbers (f32: measured over every float, f64 over four million):
//!
//! | | bell | mills | bell · mills |
//! |---|---|---|---|
//! | f32 | 1.1 | 5.5 | 6.5 |
//! | f64 | 1.3 | 9 | 10 |

/// The functions of one float type.
macro_rules! normal_family {
    ($t:ident, $mantissa:expr, $shift:expr, $ln2_high:expr, $ln2_low:expr, $end:expr,
     [$first:expr, $($coefficient:expr),*], [$top:expr, $($above:expr),*], [$bottom:expr, $($below:expr),*],
     $bell:ident, $mills:ident) => {
        /// Returns `e^(-x²/2)`: 0 beyond the magnitude at which the tail becomes subnormal.
        #[doc = concat!("That is ", stringify!($end), ".")]
        #[inline(always)]
        pub fn $bell(x: $t) -> $t {
            let half = -0.5 * x;
            let shifted = (half * x).mul_add(std::$t::consts::LOG2_E, $shift);
            let n = shifted - $shift;
            let r = half.mul_add(x, -(n * $ln2_high));
            let r = n.mul_add($ln2_low, r);
            let mut e: $t = $first;
            $(e = e.mul_add(r, $coefficient);)*
            // The shifted number's lowest bits are n, which the exponent is raised by.
            let bits = e.to_bits().wrapping_add(shifted.to_bits() << $mantissa);
            $t::from_bits(if x.abs() > $end { 0 } else { bits })
        }

        /// Returns `(1 - Φ(a)) · e^(a²/2)` for `a >= 0`.
        #[inline(always)]
        pub fn $mills(a: $t) -> $t {
            let (mut above, mut below): ($t, $t) = ($top, $bottom);
            $(above = above.mul_add(a, $above);)*
            $(below = below.mul_add(a, $below);)*
            above / below
        }
    };
}

normal_family!(
    f32,
    23,
    12582912.0,
    0.693_359_375,
    2.121_944_4e-4,
    13.0,
    [1.386_378_9e-3, 8.367_477e-3, 4.166_723_8e-2, 0.166_665_35, 0.5, 1.0, 1.0],
    [4.003_434_4e-3, 3.987_046_7e-2, 0.180_967_88, 0.435_226, 0.5],
    [1.003_497_4e-2, 9.994_8e-2, 0.463_486, 1.193_072, 1.668_336_9, 1.0],
    bell_f32,
    mills_f32
);

normal_family!(
    f64,
    52,
    6755399441055744.0,
    0.693_147_180_369_123_8,
    -1.908_214_929_270_587_7e-10,
    37.5,
    [
        1.0 / 6227020800.0,
        1.0 / 479001600.0,
        1.0 / 39916800.0,
        1.0 / 3628800.0,
        1.0 / 362880.0,
        1.0 / 40320.0,
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0
    ],
    [
        2.234_493_587_709_515e-7,
        6.956_711_183_721_350_5e-6,
        1.063_237_591_743_276_1e-4,
        1.037_669_335_373_816_6e-3,
        7.111_191_232_013_126e-3,
        3.561_991_679_503_44e-2,
        0.131_905_420_234_429_5,
        0.357_057_736_319_686_1,
        0.679_236_717_494_699_6,
        0.827_686_047_928_824,
        0.5
    ],
    [
        5.601_044_806_433_003e-7,
        1.743_788_895_158_845_3e-5,
        2.670_742_454_888_159e-4,
        2.618_489_184_926_318e-3,
        1.809_050_693_130_474_4e-2,
        9.185_206_639_371_965e-2,
        0.347_935_534_373_586_5,
        0.979_269_326_844_417_7,
        2.000_203_058_536_755,
        2.815_889_045_025_671_5,
        2.453_256_656_660_513_6,
        1.0
    ],
    bell_f64,
    mills_f64
);

#[cfg(test)]
mod tests {
    use super::super::exp::tests::{ulps_f32, ulps_f64};
    use super::*;

    /// Arguments, and the bell's and the tail's values that mpmath computed with 40 digits.
    const EXACT: [(f64, f64, f64); 14] = [
        (0.0, 1.0, 0.5),
        (0.125, 0.992_217_938_260_243_512_1, 0.450_261_775_169_887_107),
        (0.5, 0.882_496_902_584_595_402_9, 0.308_537_538_725_986_896_4),
        (1.0, 0.606_530_659_712_633_423_6, 0.158_655_253_931_457_051_4),
        (1.5, 0.324_652_467_358_349_729_8, 6.680_720_126_885_806_6e-2),
        (2.0, 0.135_335_283_236_612_691_9, 2.275_013_194_817_920_72e-2),
        (3.0, 1.110_899_653_824_230_65e-2, 1.349_898_031_630_094_527e-3),
        (4.25, 1.196_128_835_810_243_659e-4, 1.068_852_577_493_442_047e-5),
        (6.0, 1.522_997_974_471_262_844e-8, 9.865_876_450_376_981_407e-10),
        (8.5, 2.046_971_713_164_204_274e-16, 9.479_534_822_203_318_354e-18),
        (12.0, 5.380_186_160_021_138_414e-32, 1.776_482_112_077_678_998e-33),
        (20.0, 1.383_896_526_736_737_531e-87, 2.753_624_118_606_233_695e-89),
        (30.0, 3.693_883_068_487_256_219e-196, 4.906_713_927_148_187_06e-198),
        (37.5, 4.332_039_538_514_401_1e-306, 4.605_353_009_581_954_844e-308),
    ];

    #[test]
    fn f64_within_bounds() {
        for (a, bell, tail) in EXACT {
            let worst = [ulps_f64(bell_f64(a), bell), ulps_f64(bell_f64(a) * mills_f64(a), tail)];
            println!("{a} {worst:?}");
            assert!(worst[0] <= 1.3 && worst[1] <= 6.5, "{a}: {worst:?}");
            assert_eq!(bell_f64(-a).to_bits(), bell_f64(a).to_bits());
        }
        let mut worst = [0.0f64; 2];
        let step: usize = std::env::var("ISOSHARD_SWEEP_STEP").map_or(1009, |s| s.parse().unwrap());
        for i in (0..3_750_000).step_by(step.div_ceil(50)) {
            let a = f64::from(i) * 1e-5;
            // The square's rounding error, and the library's own exponential and our complementary error function,
            // whose errors are below one unit.
            let (square, rest) = (a * a, a.mul_add(a, -(a * a)));
            let bell = (-0.5 * square).exp() * (1.0 - 0.5 * rest);
            worst[0] = worst[0].max(ulps_f64(bell_f64(a), bell));
            let root = a * std::f64::consts::FRAC_1_SQRT_2;
            // √½ as two numbers, for the root's rounding error.
            let rest = a.mul_add(std::f64::consts::FRAC_1_SQRT_2, -root) - a * 4.833_646_656_726_457e-17;
            let slope = -std::f64::consts::FRAC_2_SQRT_PI * (-root * root).exp();
            let tail = 0.5 * slope.mul_add(rest, super::super::erfc::erfc_f64(root));
            worst[1] = worst[1].max(ulps_f64(bell_f64(a) * mills_f64(a), tail));
        }
        println!("{worst:?}");
        assert!(worst[0] <= 2.3 && worst[1] <= 10.0, "{worst:?}");
        assert_eq!((bell_f64(37.6), bell_f64(f64::INFINITY)), (0.0, 0.0));
        assert!(bell_f64(f64::NAN).is_nan() && mills_f64(f64::NAN).is_nan());
    }

    /// The f64 functions are exact beside those of f32.
    #[test]
    fn f32_within_bounds() {
        let step: usize = std::env::var("ISOSHARD_SWEEP_STEP").map_or(1009, |s| s.parse().unwrap());
        let mut worst = [(0.0, 0.0); 3];
        for a in (0..=13.0f32.to_bits()).step_by(step).map(f32::from_bits) {
            let (bell, mills) = (bell_f64(a.into()), mills_f64(a.into()));
            let pairs =
                [(bell_f32(a), bell), (mills_f32(a), mills), (bell_f32(a) * mills_f32(a), bell * mills)];
            for (worst, (got, want)) in worst.iter_mut().zip(pairs) {
                let ulps = ulps_f32(got, want);
                if ulps > worst.0 && want >= f64::from(f32::MIN_POSITIVE) {
                    *worst = (ulps, a);
                }
            }
        }
        println!("{worst:?}");
        assert!(worst[0].0 <= 1.1 && worst[1].0 <= 5.5 && worst[2].0 <= 6.5, "{worst:?}");
        assert_eq!(
            (bell_f32(0.0), bell_f32(13.1), bell_f32(f32::INFINITY), mills_f32(0.0)),
            (1.0, 0.0, 0.0, 0.5)
        );
        assert!(bell_f32(f32::NAN).is_nan() && mills_f32(f32::NAN).is_nan());
    }
}
