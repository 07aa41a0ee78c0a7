//! The natural logarithm, and variants for arguments near 1.
//!
//! ```
//! use isoshard_kernels::math::log::{ln_1p_rest_f64, ln_f32, ln_unit_f64};
//! assert_eq!((ln_f32(1.0), ln_f32(0.0)), (0.0, f32::NEG_INFINITY));
//! assert_eq!(ln_unit_f64(1.0 - 1e-20, 1e-20), -1e-20); // 1 - 1e-20 is 1.0 in f64
//! let rest = ln_1p_rest_f64(1.0 + 1e-10, 1e-10); // ln(1 + y) - y = -y^2 / 2 + y^3 / 3 - ...
//! assert!((rest / -0.5e-20 - 1.0).abs() < 1e-9);
//! ```
//!
//! The argument is `x = 2^e * m` with `m` in [sqrt(1/2), sqrt(2)), split by integer arithmetic; a polynomial in `m - 1`
//! follows. The largest errors found by the tests below: [`ln_f32`] 0.9 ulp, [`ln_f64`] 1 ulp; [`ln_unit_f32`] and
//! [`ln_unit_f64`] 1.2 ulp, also near 1; [`ln_1p_rest_f32`] and [`ln_1p_rest_f64`] 11 ulp.

/// Returns ln `x`: `-inf` for zeros, `inf` for `inf`, and the canonical NaN for negative `x` and NaN. Subnormals are
/// not flushed to zero.
#[inline(always)]
pub fn ln_f32(x: f32) -> f32 {
    let tiny = x < f32::MIN_POSITIVE;
    let scaled = if tiny { x * 8388608.0 } else { x };
    with_limits_f32(x, ln_split_f32(scaled, if tiny { -23.0 } else { 0.0 }))
}

/// Returns ln `x`: `-inf` for zeros, `inf` for `inf`, and the canonical NaN for negative `x` and NaN. Subnormals are
/// not flushed to zero.
#[inline(always)]
pub fn ln_f64(x: f64) -> f64 {
    let tiny = x < f64::MIN_POSITIVE;
    let scaled = if tiny { x * 18014398509481984.0 } else { x };
    with_limits_f64(x, ln_split_f64(scaled, if tiny { -54.0 } else { 0.0 }))
}

/// Returns `y` for positive finite `x`, `-inf` for zeros, `inf` for `inf`, and NaN for all else.
#[inline(always)]
pub(crate) fn with_limits_f32(x: f32, y: f32) -> f32 {
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x > 0.0 { y } else { f32::NAN };
    if x == 0.0 { f32::NEG_INFINITY } else { y }
}

/// The f64 version of [`with_limits_f32`].
#[inline(always)]
pub(crate) fn with_limits_f64(x: f64, y: f64) -> f64 {
    let y = if x == f64::INFINITY { x } else { y };
    let y = if x > 0.0 { y } else { f64::NAN };
    if x == 0.0 { f64::NEG_INFINITY } else { y }
}

/// Returns [`ln_f32`] for an `x` that is positive, normal and finite; for any other the result is arbitrary.
#[inline(always)]
pub fn ln_normal_f32(x: f32) -> f32 {
    ln_split_f32(x, 0.0)
}

/// Returns [`ln_f64`] for an `x` that is positive, normal and finite; for any other the result is arbitrary.
#[inline(always)]
pub fn ln_normal_f64(x: f64) -> f64 {
    ln_split_f64(x, 0.0)
}

/// Returns ln `x` for a positive, normal `x` of at most 1. `rest` is 1 - `x`, which for `x` near 1 the caller knows
/// more precisely than `x`.
#[inline(always)]
pub fn ln_unit_f32(x: f32, rest: f32) -> f32 {
    let (e, f) = split_f32(x);
    join_f32(e, if e == 0.0 { -rest } else { f })
}

/// The f64 version of [`ln_unit_f32`].
#[inline(always)]
pub fn ln_unit_f64(x: f64, rest: f64) -> f64 {
    let (e, f) = split_f64(x);
    join_f64(e, if e == 0.0 { -rest } else { f })
}

/// Returns ln(1 + `y`) - `y` (`log1pmx` in other libraries) without cancellation for `y` near 0. `x` is 1 + `y`,
/// rounded; it must be positive, normal and finite, else the result is arbitrary.
#[inline(always)]
pub fn ln_1p_rest_f32(x: f32, y: f32) -> f32 {
    let (e, f) = split_f32(x);
    let near = (y * y) * y.mul_add(polynomial_f32(y), -0.5);
    if e == 0.0 { near } else { join_f32(e, f) - y }
}

/// The f64 version of [`ln_1p_rest_f32`].
#[inline(always)]
pub fn ln_1p_rest_f64(x: f64, y: f64) -> f64 {
    let (e, f) = split_f64(x);
    let s = y / (2.0 + y);
    let half_square = 0.5 * y * y;
    let near = s * polynomial_f64(s, half_square) - half_square;
    if e == 0.0 { near } else { join_f64(e, f) - y }
}

/// Returns ln `x` + `shift` ln 2.
#[inline(always)]
fn ln_split_f32(x: f32, shift: f32) -> f32 {
    let (e, f) = split_f32(x);
    join_f32(e + shift, f)
}

/// Returns e and f with `x` = 2^e (1 + f).
#[inline(always)]
pub(crate) fn split_f32(x: f32) -> (f32, f32) {
    const SQRT_HALF: u32 = 0x3f35_04f3;
    let above = x.to_bits().wrapping_sub(SQRT_HALF);
    let m = f32::from_bits((above & 0x007f_ffff).wrapping_add(SQRT_HALF));
    ((above as i32 >> 23) as f32, m - 1.0)
}

/// Returns ln(2^e (1 + f)).
#[inline(always)]
fn join_f32(e: f32, f: f32) -> f32 {
    const LN2_HI: f32 = 0.693_359_4; // 355 / 512
    const LN2_LO: f32 = -2.121_944_4e-4;
    let z = f * f;
    let tail = e.mul_add(LN2_LO, (f * z) * polynomial_f32(f));
    e.mul_add(LN2_HI, (-0.5_f32).mul_add(z, tail) + f)
}

/// Returns p of ln(1 + f) = f - f^2 / 2 + f^3 p, with the coefficients of the Cephes library's `logf` (S. Moshier).
#[inline(always)]
pub(crate) fn polynomial_f32(f: f32) -> f32 {
    let mut p = 7.037_683_6e-2_f32;
    p = p.mul_add(f, -1.151_461e-1);
    p = p.mul_add(f, 1.167_699_9e-1);
    p = p.mul_add(f, -1.242_014_1e-1);
    p = p.mul_add(f, 1.424_932_3e-1);
    p = p.mul_add(f, -1.666_805_8e-1);
    p = p.mul_add(f, 2.000_071_5e-1);
    p = p.mul_add(f, -2.499_999_4e-1);
    p.mul_add(f, 3.333_333e-1)
}

/// Returns ln `x` + `shift` ln 2.
#[inline(always)]
fn ln_split_f64(x: f64, shift: f64) -> f64 {
    let (e, f) = split_f64(x);
    join_f64(e + shift, f)
}

/// Returns e and f with `x` = 2^e (1 + f).
#[inline(always)]
pub(crate) fn split_f64(x: f64) -> (f64, f64) {
    const SQRT_HALF: u64 = 0x3fe6_a09e_667f_3bcd;
    let above = x.to_bits().wrapping_sub(SQRT_HALF);
    let m = f64::from_bits((above & 0x000f_ffff_ffff_ffff).wrapping_add(SQRT_HALF));
    (f64::from((above as i64 >> 52) as i32), m - 1.0)
}

/// Returns ln(2^e (1 + f)).
#[inline(always)]
fn join_f64(e: f64, f: f64) -> f64 {
    const LN2_HI: f64 = 6.931_471_803_691_238e-1;
    const LN2_LO: f64 = 1.908_214_929_270_587_7e-10;
    let s = f / (2.0 + f);
    let half_square = 0.5 * f * f;
    let tail = s.mul_add(polynomial_f64(s, half_square), e * LN2_LO);
    e.mul_add(LN2_HI, f - (half_square - tail))
}

/// Returns r of ln(1 + f) = f - (f^2 / 2 - s r) with s = f / (2 + f), with the coefficients of FDLIBM's `e_log.c` (Sun
/// Microsystems).
#[inline(always)]
pub(crate) fn polynomial_f64(s: f64, half_square: f64) -> f64 {
    let z = s * s;
    let mut p = 1.479_819_860_511_658_6e-1_f64;
    p = p.mul_add(z, 1.531_383_769_920_937_3e-1);
    p = p.mul_add(z, 1.818_357_216_161_805e-1);
    p = p.mul_add(z, 2.222_219_843_214_978_4e-1);
    p = p.mul_add(z, 2.857_142_874_366_239e-1);
    p = p.mul_add(z, 3.999_999_999_940_942e-1);
    p = p.mul_add(z, 6.666_666_666_666_735e-1);
    p.mul_add(z, half_square)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f32_within_its_bound() {
        let mut worst = 0.0f64;
        // Every 7th float around 1, for which the result is small, and every 191st positive one, subnormals included.
        let near = 0x3f00_0000u32..0x4000_0000;
        for x in near.step_by(7).chain((1..0x7f80_0000).step_by(191)).map(f32::from_bits) {
            let exact = f64::from(x).ln();
            let ulp = f64::from((exact as f32).abs().next_up()) - f64::from((exact as f32).abs());
            worst = worst.max((f64::from(ln_f32(x)) - exact).abs() / ulp);
        }
        assert!(worst < 0.9, "{worst} ulp");
    }

    #[test]
    fn f64_within_its_bound() {
        let mut worst = 0u64;
        let mut bits = 1u64;
        while bits < f64::INFINITY.to_bits() {
            let x = f64::from_bits(bits);
            // The system's logarithm is accurate to little more than half an ulp.
            worst = worst.max(ln_f64(x).to_bits().abs_diff(x.ln().to_bits()));
            bits += 0x7f_f1f3_7a1f_b3a1 / 64;
        }
        for k in -400_000..400_000 {
            let x = 1.0 + f64::from(k) * 7.3e-7;
            worst = worst.max(ln_f64(x).to_bits().abs_diff(x.ln().to_bits()));
        }
        assert!(worst <= 1, "{worst} ulp");
    }

    #[test]
    fn near_one_and_near_zero_nothing_cancels() {
        let ulps = |got: f64, exact: f64, epsilon: f64| (got / exact - 1.0).abs() / epsilon;
        let mut worst = [0.0f64; 4];
        // The system's f64 functions are accurate to an ulp; if they would cancel, the series is used instead.
        let rest = |y: f64| {
            if y.abs() < 0.5 {
                let term = |k: i32| (-y).powi(k - 2) / f64::from(k);
                -y * y * (2..60).rev().map(term).sum::<f64>()
            } else {
                y.ln_1p() - y
            }
        };
        for k in 1..200_000 {
            let d = 1e-9 * 1.000_103f64.powi(k); // up to 0.87
            let d32 = d as f32;
            let (x32, x) = (1.0 - d32, 1.0 - d);
            // Below sqrt(1/2) the function uses the rounded argument.
            let exact = |x: f64, d: f64| if x > 0.707 { (-d).ln_1p() } else { x.ln() };
            let exact32 = exact(x32.into(), d32.into());
            worst[0] = worst[0].max(ulps(ln_unit_f32(x32, d32).into(), exact32, f32::EPSILON.into()));
            worst[1] = worst[1].max(ulps(ln_unit_f64(x, d), exact(x, d), f64::EPSILON));
            for y in [-d, d, 5.0 * d] {
                let y32 = y as f32;
                let got = f64::from(ln_1p_rest_f32(1.0 + y32, y32));
                worst[2] = worst[2].max(ulps(got, rest(y32.into()), f32::EPSILON.into()));
                worst[3] = worst[3].max(ulps(ln_1p_rest_f64(1.0 + y, y), rest(y), f64::EPSILON));
            }
        }
        println!("{worst:?}");
        assert!(worst[0] < 1.2 && worst[1] < 1.2 && worst[2] < 11.0 && worst[3] < 11.0, "{worst:?}");
        assert_eq!((ln_unit_f32(1.0, 0.0), ln_1p_rest_f64(1.0, 0.0)), (0.0, 0.0));
    }

    #[test]
    fn special_values() {
        let at: Vec<f32> = [0.0, -0.0, 1.0, f32::INFINITY].map(ln_f32).to_vec();
        assert_eq!(at, [f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0, f32::INFINITY]);
        assert!([-1.0, f32::NAN, f32::NEG_INFINITY, -1e-45].iter().all(|&x| ln_f32(x).is_nan()));
        assert_eq!(ln_f32(f32::from_bits(1)), -103.27893);
        let at: Vec<f64> = [0.0, -0.0, 1.0, f64::INFINITY].map(ln_f64).to_vec();
        assert_eq!(at, [f64::NEG_INFINITY, f64::NEG_INFINITY, 0.0, f64::INFINITY]);
        assert!([-1.0, f64::NAN, f64::NEG_INFINITY, -5e-324].iter().all(|&x| ln_f64(x).is_nan()));
        assert_eq!(ln_f64(5e-324), -744.4400719213812);
        assert_eq!(ln_normal_f32(0.3).to_bits(), ln_f32(0.3).to_bits());
        assert_eq!(ln_normal_f64(0.3).to_bits(), ln_f64(0.3).to_bits());
    }
}
