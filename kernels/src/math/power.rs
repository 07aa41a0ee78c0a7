//! Powers and cube roots.
//!
//! ```
//! use isoshard_kernels::math::power::{cbrt_f64, pow_abs_f64};
//! assert_eq!((pow_abs_f64(3.0, 7.0), pow_abs_f64(0.0, -1.0)), (2187.0, f64::INFINITY));
//! assert_eq!((cbrt_f64(-27.0), cbrt_f64(-0.0)), (-3.0, -0.0));
//! ```
//!
//! `a^y = e^(y ln a)`, where `ln a` is a sum of two numbers with about 65 correct bits, because the exponential multiplies
//! its error by up to 745. The cube root is FDLIBM's `s_cbrt.c`.

use super::exponential::{exp_parts, scaled};
use super::log::split_f64;
use super::pair::*;

/// Returns `a` to the power of `y`, for `a` of at least 0. The result is 1 if `y` is 0, and for `a` = 1 and a finite `y`.
#[inline(always)]
pub fn pow_abs_f64(a: f64, y: f64) -> f64 {
    let (h, l) = precise_ln(a);
    let (p, p_rest) = two_product(y, h);
    let rest = fma(y, l, p_rest);
    // Products beyond the range of results, infinities included, need no rest.
    let inside: bool = abs(p) < 800.0;
    let low = select(p < -800.0, -800.0, p);
    let b = select(low > 800.0, 800.0, low);
    let z = scaled(exp_parts(b, select(inside, rest, 0.0)));
    select(y == 0.0, 1.0, z)
}

/// Returns `ln a` as a sum of two numbers, with a relative error of about 2^-65; `-inf` at 0, `inf` at `inf`.
#[inline(always)]
fn precise_ln(a: f64) -> (f64, f64) {
    let tiny: bool = a < 2.2250738585072014e-308;
    let (e, f) = split_f64(select(tiny, a * 18014398509481984.0, a));
    let n = e + select(tiny, -54.0, 0.0);
    // s = f / (2 + f) as a sum of two numbers; ln(1 + f) = 2s + 2/3 s³ + s⁵ (2/5 + ...).
    let (d, d_rest) = fast_two_sum(2.0, f);
    let inverse = 1.0 / d;
    let s = f * inverse;
    let s_rest = (fma(-s, d, f) - s * d_rest) * inverse;
    let (z, z_low) = two_product(s, s);
    let z_rest = fma(2.0 * s, s_rest, z_low);
    // s³
    let (c, c_low) = two_product(s, z);
    let c_rest = c_low + fma(s, z_rest, s_rest * z);
    let (t, t_low) = two_product(c, 6.666666666666666e-1);
    let t_rest = t_low + fma(c_rest, 6.666666666666666e-1, c * 3.700743415417188e-17);
    let tail = fma(
        c * z,
        polynomial!(
            z,
            0.107_628_674_236_432_12,
            0.104_562_783_757_782_07,
            0.117_668_153_034_060_82,
            0.133_332_964_839_732_92,
            0.153_846_157_618_126_1,
            0.181_818_181_796_525_15,
            0.222_222_222_222_284_44,
            0.285_714_285_714_285_64,
            0.4
        ),
        t_rest,
    );
    let (u, u_rest) = fast_two_sum(2.0 * s, t);
    let rest = u_rest + (2.0 * s_rest + tail);
    let (v, v_rest) = two_sum(n * 6.931471803691238e-1, u);
    let (w, w_rest) = two_product(n, 1.9082149292705877e-10);
    let (x, x_rest) = two_sum(v, w);
    let small = (v_rest + x_rest) + (fma(n, 1.1612227229362532e-26, w_rest) + rest);
    let (high, low) = fast_two_sum(x, small);
    let positive = select(a > 0.0, high, f64::NAN);
    let real = select(a == f64::INFINITY, a, select(a == 0.0, f64::NEG_INFINITY, positive));
    (real, low)
}

/// Returns the cube root.
#[inline(always)]
pub fn cbrt_f64(x: f64) -> f64 {
    let a = abs(x);
    let tiny: bool = a < 2.2250738585072014e-308;
    let b = select(tiny, a * 18014398509481984.0, a);
    // A third of the exponent, by integer arithmetic on the upper word.
    let word: u64 = bits_of(b) >> 32;
    let third: u64 = ((word * 2863311531) >> 33) + 715094163;
    let guess = f64_of(third << 32);
    let r = (guess * guess) * (guess / b);
    let high = fma(r, fma(r, 1.6214297201053545, -1.8849797954337717), 1.87595182427177);
    let t = guess * fma((r * r) * r, fma(r, 0.14599619288661245, -0.758397934778766), high);
    // 20 bits, so that the square is exact.
    let u = f64_of(plus(bits_of(t), 0x8000_0000) & 0xffff_ffff_c000_0000);
    let q = b / (u * u);
    let y = fma(u, (q - u) / (u + u + q), u);
    let unscaled = select(tiny, y * 3.814697265625e-6, y);
    let finite: bool = a > 0.0 && a < f64::INFINITY;
    copysign(select(finite, unscaled, a), x)
}
