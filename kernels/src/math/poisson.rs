//! The logarithm of the Poisson distribution's probabilities.
//!
//! ```
//! use isoshard_kernels::math::poisson::ln_poisson_f64;
//! assert_eq!(ln_poisson_f64(0.0, 2.5), -2.5); // e^-rate
//! assert!((ln_poisson_f64(2.0, 2.5) - (2.5f64 * 2.5 / 2.0).ln() + 2.5).abs() < 2e-14);
//! ```
//!
//! It follows C. Loader's saddle-point method ("Fast and accurate computation of binomial probabilities", 2000): ln(k!)
//! is Stirling's formula and a small remainder. The formula's large terms are combined with k ln rate - rate
//! algebraically, so that no two large numbers are subtracted. The error against exact values is below 2e-14 times the
//! larger of 1 and the result (see the tests below).

use super::log::{ln_1p_rest_f64, ln_normal_f64};

/// Returns the logarithm of the probability that a Poisson variable with mean `rate` is `k`. `k` is a whole number from
/// 0 to 2^51; `rate` is positive and finite.
#[inline(always)]
pub fn ln_poisson_f64(k: f64, rate: f64) -> f64 {
    const LN_TAU_HALF: f64 = 0.918_938_533_204_672_7;
    let safe = if k > 0.0 { k } else { 1.0 };
    // k - rate + k ln(rate / k), which is never positive.
    let spread = safe * ln_1p_rest_f64(rate / safe, (rate - safe) / safe);
    let root = 0.5f64.mul_add(ln_normal_f64(safe), LN_TAU_HALF);
    if k > 0.0 { (spread - stirling_rest(safe)) - root } else { -rate }
}

/// Returns ln(k!) - (k + 1/2) ln k + k - ln(2π) / 2 for a whole `k` from 1 to 2^51.
#[inline(always)]
fn stirling_rest(k: f64) -> f64 {
    // Adding 2^52 moves the integer to the low bits.
    let small = SMALL[((k + 4_503_599_627_370_496.0).to_bits() & 15) as usize];
    let r = 1.0 / k;
    let z = r * r;
    let mut p = -1.0_f64 / 1680.0;
    p = p.mul_add(z, 1.0 / 1260.0);
    p = p.mul_add(z, -1.0 / 360.0);
    p = p.mul_add(z, 1.0 / 12.0);
    if k < 16.0 { small } else { p * r }
}

/// The values of `stirling_rest` at 1 to 15, computed with 40 digits.
const SMALL: [f64; 16] = [
    0.0,
    0.081_061_466_795_327_26,
    0.041_340_695_955_409_29,
    0.027_677_925_684_998_34,
    0.020_790_672_103_765_093,
    0.016_644_691_189_821_193,
    0.013_876_128_823_070_748,
    0.011_896_709_945_891_77,
    0.010_411_265_261_972_096,
    0.009_255_462_182_712_733,
    0.008_330_563_433_362_87,
    0.007_573_675_487_951_841,
    0.006_942_840_107_209_53,
    0.006_408_994_188_004_207,
    0.005_951_370_112_758_848,
    0.005_554_733_551_962_801,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_of_small_counts_by_multiplication() {
        let mut worst = 0.0f64;
        for rate in [1e-3, 0.3, 1.0, 7.7, 10.0, 33.3, 100.0, 650.0] {
            // p_0 = e^-rate, p_k = p_{k-1} rate / k; the sum of up to 600 logarithms is accurate enough.
            let mut exact = -rate;
            for k in 0..600 {
                if k > 0 {
                    exact += (rate / f64::from(k)).ln();
                }
                let got = ln_poisson_f64(k.into(), rate);
                // The rounding error of the sum of logarithms.
                let lost = 2.0 * f64::EPSILON * (1.0 + exact.abs() + rate) * (1.0 + f64::from(k).sqrt());
                worst = worst.max((got - exact).abs() / (2e-14 * exact.abs().max(1.0) + lost));
            }
        }
        assert!(worst < 1.0, "{worst}");
    }

    #[test]
    fn nothing_cancels_at_large_rates() {
        // ln p computed with 40 digits, for k near rate: both about 1e6, 1e12 or 2^50.
        for (k, rate, exact) in LARGE {
            let got = ln_poisson_f64(k, rate);
            assert!((got - exact).abs() < 2e-14 * exact.abs(), "{k} {rate}: {got} instead of {exact}");
        }
    }

    const LARGE: [(f64, f64, f64); 7] = [
        (1001234.0, 1000000.5, -8.58775865313407),
        (15.0, 10.25, -3.240105800074634),
        (16.0, 10.25, -3.685416816729998),
        (1000002000000.0, 1000000000000.0, -16.73444875783603),
        (999999000000.0, 1000000000000.0, -15.23444875783553),
        (1125900006842624.0, 1125899906842624.0, -22.688510058636037),
        (1.0, 2000.0, -1992.399097540458),
    ];
}
