//! Sine, cosine and tangent of radians.
//!
//! ```
//! use isoshard_kernels::math::circular::{cos_f64, sin_f64, tan_f64};
//! assert_eq!((sin_f64(-0.0), cos_f64(0.0)), (-0.0, 1.0));
//! assert!((tan_f64(1e22) + 1.628778225606898).abs() < 1e-15); // 1e22 is reduced by a 1,184-bit 2/π
//! ```
//!
//! The argument is `x = q π/2 + r`. Up to 2^30, three parts of π/2 are subtracted (Cody and Waite), so that `r` is
//! known to more than 100 bits; beyond, `x` is multiplied by the bits of 2/π that matter (Payne and Hanek), in integers.
//! The functions `*_near_f64` have no branch, so that loops vectorise, and return NaN beyond 2^30. In f32 the same is
//! done up to 2^15, and the f64 functions serve beyond. Measured errors: docs/functions.md.

use super::pair::*;

/// The largest magnitude that the branch-free functions accept.
const NEAR: f64 = 1073741824.0;

/// The remainder `x - q π/2` as a sum of two numbers, and `q`, whose lowest two bits count.
#[derive(Clone, Copy)]
struct ReducedAngle {
    r: f64,
    rest: f64,
    q: u64,
}

/// Returns the sine of `x` radians, and NaN if `x` is infinite.
pub fn sin_f64(x: f64) -> f64 {
    if abs(x) <= NEAR { sin_near_f64(x) } else { sin_reduced(reduce_far(x)) }
}

/// Returns the cosine of `x` radians, and NaN if `x` is infinite.
pub fn cos_f64(x: f64) -> f64 {
    if abs(x) <= NEAR { cos_near_f64(x) } else { cos_reduced(reduce_far(x)) }
}

/// Returns the tangent of `x` radians, and NaN if `x` is infinite.
pub fn tan_f64(x: f64) -> f64 {
    if abs(x) <= NEAR { tan_near_f64(x) } else { tan_reduced(reduce_far(x)) }
}

/// Returns [`sin_f64`] up to 2^30 in magnitude, and NaN beyond.
#[inline(always)]
pub fn sin_near_f64(x: f64) -> f64 {
    let y = select(x == 0.0, x, sin_reduced(reduce_near(x)));
    select(abs(x) <= NEAR, y, f64::NAN)
}

/// Returns [`cos_f64`] up to 2^30 in magnitude, and NaN beyond.
#[inline(always)]
pub fn cos_near_f64(x: f64) -> f64 {
    let y = cos_reduced(reduce_near(x));
    select(abs(x) <= NEAR, y, f64::NAN)
}

/// Returns [`tan_f64`] up to 2^30 in magnitude, and NaN beyond.
#[inline(always)]
pub fn tan_near_f64(x: f64) -> f64 {
    let y = select(x == 0.0, x, tan_reduced(reduce_near(x)));
    select(abs(x) <= NEAR, y, f64::NAN)
}

/// The largest magnitude that the branch-free f32 functions accept.
const NEAR_F32: f32 = 32768.0;

/// The remainder `x - q π/2` as a sum of two numbers, and `q`, whose lowest two bits count.
#[derive(Clone, Copy)]
struct ReducedAngleF32 {
    r: f32,
    rest: f32,
    q: u32,
}

/// Returns the sine of `x` radians, and NaN if `x` is infinite.
pub fn sin_f32(x: f32) -> f32 {
    if x.abs() <= NEAR_F32 { sin_near_f32(x) } else { sin_f64(f64::from(x)) as f32 }
}

/// Returns the cosine of `x` radians, and NaN if `x` is infinite.
pub fn cos_f32(x: f32) -> f32 {
    if x.abs() <= NEAR_F32 { cos_near_f32(x) } else { cos_f64(f64::from(x)) as f32 }
}

/// Returns the tangent of `x` radians, and NaN if `x` is infinite.
pub fn tan_f32(x: f32) -> f32 {
    if x.abs() <= NEAR_F32 { tan_near_f32(x) } else { tan_f64(f64::from(x)) as f32 }
}

/// Returns [`sin_f32`] up to 2^15 in magnitude, and NaN beyond.
#[inline(always)]
pub fn sin_near_f32(x: f32) -> f32 {
    let angle = reduce_near_f32(x);
    let y = if angle.q & 1 == 1 { cos_poly_f32(angle) } else { sin_poly_f32(angle) };
    let y = f32::from_bits(y.to_bits() ^ ((angle.q & 2) << 30));
    let y = if x == 0.0 { x } else { y };
    if x.abs() <= NEAR_F32 { y } else { f32::NAN }
}

/// Returns [`cos_f32`] up to 2^15 in magnitude, and NaN beyond.
#[inline(always)]
pub fn cos_near_f32(x: f32) -> f32 {
    let angle = reduce_near_f32(x);
    let y = if angle.q & 1 == 1 { sin_poly_f32(angle) } else { cos_poly_f32(angle) };
    let y = f32::from_bits(y.to_bits() ^ ((angle.q.wrapping_add(1) & 2) << 30));
    if x.abs() <= NEAR_F32 { y } else { f32::NAN }
}

/// Returns [`tan_f32`] up to 2^15 in magnitude, and NaN beyond.
#[inline(always)]
pub fn tan_near_f32(x: f32) -> f32 {
    let angle = reduce_near_f32(x);
    let (s, c) = (sin_poly_f32(angle), cos_poly_f32(angle));
    let odd = angle.q & 1 == 1;
    let y = (if odd { -c } else { s }) / (if odd { s } else { c });
    let y = if x == 0.0 { x } else { y };
    if x.abs() <= NEAR_F32 { y } else { f32::NAN }
}

/// Returns sin(r + rest) for |r| up to π/4, with the coefficients of the Cephes library's `sinf` (S. Moshier).
#[inline(always)]
fn sin_poly_f32(angle: ReducedAngleF32) -> f32 {
    let (r, z) = (angle.r, angle.r * angle.r);
    let p = (-1.951_529_6e-4f32).mul_add(z, 8.332_161e-3).mul_add(z, -1.666_665_5e-1);
    r + (z * r).mul_add(p, (-0.5 * z).mul_add(angle.rest, angle.rest))
}

/// Returns cos(r + rest) for |r| up to π/4, with the coefficients of the Cephes library's `cosf`.
#[inline(always)]
fn cos_poly_f32(angle: ReducedAngleF32) -> f32 {
    let (r, z) = (angle.r, angle.r * angle.r);
    let p = 2.443_315_7e-5f32.mul_add(z, -1.388_731_6e-3).mul_add(z, 4.166_664_6e-2);
    let half = 0.5 * z;
    let w = 1.0 - half;
    w + (((1.0 - w) - half) + (z * z).mul_add(p, -(r * angle.rest)))
}

/// Reduces an angle up to 2^15: the first product's difference from `x` is exact.
#[inline(always)]
fn reduce_near_f32(x: f32) -> ReducedAngleF32 {
    const ROUND_F32: f32 = 12_582_912.0;
    let shifted = x.mul_add(6.366_197_5e-1, ROUND_F32);
    let q = shifted - ROUND_F32;
    let t = (-q).mul_add(1.570_796_4, x);
    let p = q * -4.371_139e-8;
    let p_rest = q.mul_add(-4.371_139e-8, -p);
    let r = t - p;
    let back = r - t;
    let r_rest = (t - (r - back)) - (p + back);
    ReducedAngleF32 { r, rest: (-q).mul_add(-1.715_124_5e-15, r_rest - p_rest), q: shifted.to_bits() }
}

/// Returns the sine of a reduced angle.
#[inline(always)]
fn sin_reduced(angle: ReducedAngle) -> f64 {
    let y = select((angle.q & 1) == 1, cos_poly(angle), sin_poly(angle));
    f64_of(bits_of(y) ^ ((angle.q & 2) << 62))
}

/// Returns the cosine of a reduced angle.
#[inline(always)]
fn cos_reduced(angle: ReducedAngle) -> f64 {
    let y = select((angle.q & 1) == 1, sin_poly(angle), cos_poly(angle));
    f64_of(bits_of(y) ^ ((plus(angle.q, 1) & 2) << 62))
}

/// Returns the tangent of a reduced angle.
#[inline(always)]
fn tan_reduced(angle: ReducedAngle) -> f64 {
    let s = sin_poly(angle);
    let c = cos_poly(angle);
    let odd: bool = (angle.q & 1) == 1;
    select(odd, -c, s) / select(odd, s, c)
}

/// Returns sin(r + rest) for |r| up to π/4.
#[inline(always)]
fn sin_poly(angle: ReducedAngle) -> f64 {
    let r = angle.r;
    let z = r * r;
    let p = polynomial!(
        z,
        -7.586_633_672_657_066e-13,
        1.605_853_054_213_25e-10,
        -2.505_210_622_565_012_2e-08,
        2.755_731_921_931_959e-06,
        -0.000_198_412_698_412_650_4,
        0.008_333_333_333_333_331,
        -0.166_666_666_666_666_66
    );
    r + fma(z * r, p, fma(-0.5 * z, angle.rest, angle.rest))
}

/// Returns cos(r + rest) for |r| up to π/4.
#[inline(always)]
fn cos_poly(angle: ReducedAngle) -> f64 {
    let r = angle.r;
    let z = r * r;
    let p = polynomial!(
        z,
        -1.138_253_996_717_745_8e-11,
        2.087_614_498_441_391_3e-09,
        -2.755_731_726_556_589e-07,
        2.480_158_729_875_38e-05,
        -0.001_388_888_888_888_738_9,
        0.041_666_666_666_666_664
    );
    let half = 0.5 * z;
    let w = 1.0 - half;
    w + (((1.0 - w) - half) + fma(z * z, p, -(r * angle.rest)))
}

/// Reduces an angle up to 2^30.
#[inline(always)]
fn reduce_near(x: f64) -> ReducedAngle {
    let shifted = fma(x, 0.6366197723675814, ROUND);
    let q = shifted - ROUND;
    let t = fma(-q, HALF_PI[0], x);
    let (p, p_rest) = two_product(q, HALF_PI[1]);
    let (r, r_rest) = two_sum(t, -p);
    ReducedAngle { r, rest: fma(-q, HALF_PI[2], r_rest - p_rest), q: bits_of(shifted) }
}

/// Reduces an angle above 2^30, or NaN if it is not finite.
fn reduce_far(x: f64) -> ReducedAngle {
    let magnitude = bits_of(x) & 0x7fff_ffff_ffff_ffff;
    if magnitude >= 0x7ff0_0000_0000_0000 {
        return ReducedAngle { r: f64::NAN, rest: 0.0, q: 0 };
    }
    // x = m 2^e. Words of 2/π whose product with 2^e is a multiple of 4 are left out.
    let e = (magnitude >> 52) as i32 - 1075;
    let m = (magnitude & 0x000f_ffff_ffff_ffff) | 0x0010_0000_0000_0000;
    let first = if e > 2 { (e - 2) / 32 } else { 0 };
    // The product of m with seven words, lowest word first.
    let mut product = [0u32; 11];
    for part in 0..2 {
        let factor = (m >> (32 * part)) & 0xffff_ffff;
        let mut carry = 0u64;
        for i in 0..7 {
            let word = u64::from(TWO_OVER_PI[first as usize + 6 - i]);
            let t = word * factor + u64::from(product[i + part]) + carry;
            product[i + part] = t as u32;
            carry = t >> 32;
        }
        product[7 + part] = carry as u32;
    }
    // The quarter turns begin at this bit.
    let point = 224 - (e - 32 * first);
    let turns = bits_from(&product, point);
    let (mut high, mut low) = (bits_from(&product, point - 64), bits_from(&product, point - 128));
    let round = high >> 63;
    let mut q = turns.wrapping_add(round);
    if round == 1 {
        high = !high;
        low = !low;
    }
    let f = high as f64;
    let f_rest = minus(high, f as u64) as i64 as f64 + low as f64 * 5.421010862427522e-20;
    let mut sign = if round == 1 { -5.421010862427522e-20 } else { 5.421010862427522e-20 };
    if x < 0.0 {
        sign = -sign;
        q = q.wrapping_neg();
    }
    let (r, r_rest) = two_product(f, HALF_PI[0]);
    let rest = fma(f, HALF_PI[1], fma(f_rest, HALF_PI[0], r_rest));
    let (r, rest) = fast_two_sum(r, rest);
    ReducedAngle { r: r * sign, rest: rest * sign, q }
}

/// Returns 64 bits from bit `at` on.
fn bits_from(words: &[u32; 11], at: i32) -> u64 {
    let (word, bit) = ((at / 32) as usize, at % 32);
    let low = (u64::from(words[word]) | u64::from(words[word + 1]) << 32) >> bit;
    if bit == 0 { low } else { low | u64::from(words[word + 2]) << (64 - bit) }
}

/// 2/π in words of 32 bits, the first of weight 2^-32.
#[rustfmt::skip]
const TWO_OVER_PI: [u32; 38] = [
    0xa2f9_836e, 0x4e44_1529, 0xfc27_57d1, 0xf534_ddc0, 0xdb62_9599, 0x3c43_9041, 0xfe51_63ab,
0xdebb_c561, 0xb724_6e3a, 0x424d_d2e0, 0x0649_2eea, 0x09d1_921c, 0xfe1d_eb1c, 0xb129_a73e,
0xe882_35f5, 0x2ebb_4484, 0xe99c_7026, 0xb45f_7e41, 0x3991_d639, 0x8353_39f4, 0x9c84_5f8b,
0xbdf9_283b, 0x1ff8_97ff, 0xde05_980f, 0xef2f_118b, 0x5a0a_6d1f, 0x6d36_7ecf, 0x27cb_09b7,
0x4f46_3f66, 0x9e5f_ea2d, 0x7527_bac7, 0xebe5_f17b, 0x3d07_39f7, 0x8a52_92ea, 0x6bfb_5fb1,
0x1f8d_5d08, 0x5603_3046, 0xfc7b_6bab
];
