//! Powers of two, and `e^x - 1`.
//!
//! ```
//! use isoshard_kernels::math::exponential::{exp2_f64, expm1_f64};
//! assert_eq!((exp2_f64(-1074.0), exp2_f64(0.5)), (5e-324, std::f64::consts::SQRT_2));
//! assert_eq!((expm1_f64(1e-20), expm1_f64(-50.0)), (1e-20, -1.0));
//! ```
//!
//! As for [`exp_f64`](super::exp::exp_f64) the argument is split into an integer power of two and a remainder. In f64 the
//! remainder is a sum of two numbers, so that about 64 bits of the result are known before it is rounded. The f32 functions have
//! errors of up to 1 and 1.7 ulp.

use super::exp::split_f32;
use super::pair::*;

/// An integer `n`, and `x - n ln 2` as a sum of two numbers.
#[derive(Clone, Copy)]
pub(crate) struct ReducedExponent {
    pub n: u64,
    pub r: f64,
    pub rest: f64,
}

/// The exponential `e^x` divided by `2^n`, as a sum of two numbers.
#[derive(Clone, Copy)]
pub(crate) struct ScaledExp {
    pub n: u64,
    pub high: f64,
    pub low: f64,
}

/// Returns 2 to the power of `x`; exact for integers.
#[inline(always)]
pub fn exp2_f64(x: f64) -> f64 {
    let above = select(x > 1030.0, 1030.0, x);
    let b = select(above < -1080.0, -1080.0, above);
    let shifted = b + ROUND;
    let r = b - (shifted - ROUND);
    let (h, l) = two_product(r, 0.6931471805599453);
    let tail = fma(
        r * r,
        polynomial!(
            r,
            2.572_508_057_683_636e-11,
            4.454_960_598_186_518_6e-10,
            7.054_899_956_372_649e-09,
            1.017_806_244_584_577_4e-07,
            1.321_548_680_290_393_1e-06,
            1.525_273_382_983_612e-05,
            0.000_154_035_303_933_759_14,
            0.001_333_355_814_641_693_6,
            0.009_618_129_107_628_479,
            0.055_504_108_664_821_6,
            0.240_226_506_959_100_72
        ),
        fma(r, 2.3190468138462996e-17, l),
    );
    let (high, low) = fast_two_sum(1.0, h);
    scaled(ScaledExp { n: minus(bits_of(shifted), bits_of(ROUND)), high, low: low + tail })
}

/// Returns 2 to the power of `x`; exact for integers.
#[inline(always)]
pub fn exp2_f32(x: f32) -> f32 {
    // 1.5 · 2^23, which rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let x = if x > 129.0 { 129.0 } else { x };
    let x = if x < -151.0 { -151.0 } else { x };
    let shifted = x + ROUND;
    let r = x - (shifted - ROUND);
    let mut p = 1.525_273_4e-5_f32;
    p = p.mul_add(r, 1.540_353_1e-4);
    p = p.mul_add(r, 1.333_355_8e-3);
    p = p.mul_add(r, 9.618_129e-3);
    p = p.mul_add(r, 5.550_411e-2);
    p = p.mul_add(r, 2.402_265_1e-1);
    // ln 2 is a sum of two numbers.
    let em1 = r.mul_add(6.931_472e-1, r.mul_add(-1.904_654_3e-9, r * r * p));
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1; // Each of the two factors is a normal number.
    let scale = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    (1.0 + em1) * scale(half) * scale(n.wrapping_sub(half))
}

/// Returns `e^x - 1` without cancellation near 0.
#[inline(always)]
pub fn expm1_f32(x: f32) -> f32 {
    let b = if x > 89.0 { 89.0 } else { x };
    let b = if b < -20.0 { -20.0 } else { b };
    let (n, em1) = split_f32(b);
    // Half of the power of two, which stays finite.
    let s = f32::from_bits((n.wrapping_add(126) << 23) as u32);
    let y = 2.0 * s.mul_add(em1, s - 0.5);
    // Halves of subnormals would be rounded.
    if x.abs() < 2.980_232_2e-8 { x } else { y }
}

/// Returns `e^x - 1` without cancellation near 0.
#[inline(always)]
pub fn expm1_f64(x: f64) -> f64 {
    let above = select(x > 710.0, 710.0, x);
    let reduced = reduce_exponent(select(above < -60.0, -60.0, above));
    let r = reduced.r;
    // Half of the power of two, which stays finite.
    let s = power_of_two(minus(reduced.n, 1));
    let (h, l) = fast_two_sum(s - 0.5, s * r);
    let tail = fma(r * r, exp_poly(r), fma(reduced.rest, r, reduced.rest));
    let y = 2.0 * (h + fma(s, tail, l));
    select(abs(x) < 5.551115123125783e-17, x, y)
}

/// Splits an exponent of magnitude up to 2^19.
#[inline(always)]
pub(crate) fn reduce_exponent(x: f64) -> ReducedExponent {
    let shifted = fma(x, 1.4426950408889634, ROUND);
    let n = shifted - ROUND;
    // The high part of ln 2 has 32 bits, so that its product with n is exact.
    let high = fma(-n, 6.931471803691238e-1, x);
    let low = n * 1.9082149292705877e-10;
    let r = high - low;
    ReducedExponent { n: minus(bits_of(shifted), bits_of(ROUND)), r, rest: (high - r) - low }
}

/// Returns `(e^r - 1 - r) / r²`, the Taylor series of [`exp_f64`](super::exp::exp_f64).
#[inline(always)]
fn exp_poly(r: f64) -> f64 {
    polynomial!(
        r,
        1.6059043836821613e-10,
        2.08767569878681e-9,
        2.505210838544172e-8,
        2.755731922398589e-7,
        2.7557319223985893e-6,
        2.48015873015873e-5,
        1.984126984126984e-4,
        1.388888888888889e-3,
        8.333333333333333e-3,
        4.1666666666666664e-2,
        1.6666666666666666e-1,
        0.5
    )
}

/// Returns e to the power of `x + x_rest`, for an `x_rest` that is much smaller than `x`.
#[inline(always)]
pub(crate) fn exp_parts(x: f64, x_rest: f64) -> ScaledExp {
    let reduced = reduce_exponent(x);
    let r = reduced.r;
    let rest = reduced.rest + x_rest;
    let (high, low) = fast_two_sum(1.0, r);
    let q = r * r * exp_poly(r);
    ScaledExp { n: reduced.n, high, low: low + (q + fma(rest, r + q, rest)) }
}

/// Rounds to one number. The power of two is applied as two factors, so that subnormal results are rounded correctly.
#[inline(always)]
pub(crate) fn scaled(parts: ScaledExp) -> f64 {
    let half = half_of(parts.n);
    (parts.high + parts.low) * power_of_two(half) * power_of_two(minus(parts.n, half))
}
