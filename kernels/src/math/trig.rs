//! Sine and cosine of an angle in full turns.
//!
//! ```
//! use isoshard_kernels::math::trig::sin_cos_2pi_f64;
//! let (sin, cos) = sin_cos_2pi_f64(1.0 / 12.0); // 30 degrees
//! assert!((sin - 0.5).abs() < 2e-16 && (cos - 0.75f64.sqrt()).abs() < 2e-16);
//! ```
//!
//! Since angles are in turns, the reduction of the argument is exact: `4u = q + r` with a whole `q` and `r` in [-1/2,
//! 1/2]. sin and cos of `r` quarter turns are Taylor series, up to terms far below rounding. The largest errors found:
//! [`sin_cos_2pi_f32`] 1.22 ulp (all 24-bit fractions), [`sin_cos_2pi_f64`] 2e-16 absolute.
//!
//! [`circular`](super::circular) has the functions of radians.

/// Returns sin and cos of 2π`u` for |`u`| up to 2^19. Quarter turns are exact.
#[inline(always)]
pub fn sin_cos_2pi_f32(u: f32) -> (f32, f32) {
    // Adding 1.5 * 2^23 rounds to the nearest integer (ties to even), in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = u.mul_add(4.0, ROUND);
    let q = shifted.to_bits();
    let r = u.mul_add(4.0, -(shifted - ROUND));
    let z = r * r;
    let mut s = 1.604_412e-4_f32;
    s = s.mul_add(z, -4.681_754_3e-3);
    s = s.mul_add(z, 7.969_263e-2);
    s = s.mul_add(z, -6.459_641e-1);
    s = s.mul_add(z, -4.371_139e-8);
    let s = r.mul_add(1.570_796_4, r * s);
    let mut c = -2.520_204_2e-5_f32;
    c = c.mul_add(z, 9.192_602_6e-4);
    c = c.mul_add(z, -2.086_348e-2);
    c = c.mul_add(z, 2.536_695e-1);
    c = c.mul_add(z, -1.233_700_6);
    let c = c.mul_add(z, 1.0);
    let (sin, cos) = if q & 1 == 0 { (s, c) } else { (c, s) };
    let (sin_sign, cos_sign) = ((q & 2) << 30, (q.wrapping_add(1) & 2) << 30);
    (f32::from_bits(sin.to_bits() ^ sin_sign), f32::from_bits(cos.to_bits() ^ cos_sign))
}

/// Returns sin and cos of 2π`u` for |`u`| up to 2^48. Quarter turns are exact.
#[inline(always)]
pub fn sin_cos_2pi_f64(u: f64) -> (f64, f64) {
    // 1.5 * 2^52, as above.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let shifted = u.mul_add(4.0, ROUND);
    let q = shifted.to_bits();
    let r = u.mul_add(4.0, -(shifted - ROUND));
    let z = r * r;
    let mut s = 6.066_935_731_106_195_5e-12_f64;
    s = s.mul_add(z, -6.688_035_109_811_468e-10);
    s = s.mul_add(z, 5.692_172_921_967_927e-8);
    s = s.mul_add(z, -3.598_843_235_212_085e-6);
    s = s.mul_add(z, 1.604_411_847_873_598_3e-4);
    s = s.mul_add(z, -4.681_754_135_318_688e-3);
    s = s.mul_add(z, 7.969_262_624_616_705e-2);
    s = s.mul_add(z, -6.459_640_975_062_463e-1);
    s = s.mul_add(z, 6.123_233_995_736_766e-17);
    let s = r.mul_add(std::f64::consts::FRAC_PI_2, r * s);
    let mut c = 6.565_963_114_979_473e-11_f64;
    c = c.mul_add(z, -6.386_603_083_791_852e-9);
    c = c.mul_add(z, 4.710_874_778_818_172e-7);
    c = c.mul_add(z, -2.520_204_237_306_060_7e-5);
    c = c.mul_add(z, 9.192_602_748_394_266e-4);
    c = c.mul_add(z, -2.086_348_076_335_296e-2);
    c = c.mul_add(z, 2.536_695_079_010_480_3e-1);
    c = c.mul_add(z, -1.233_700_550_136_169_7);
    let c = c.mul_add(z, 1.0);
    let (sin, cos) = if q & 1 == 0 { (s, c) } else { (c, s) };
    let (sin_sign, cos_sign) = ((q & 2) << 62, (q.wrapping_add(1) & 2) << 62);
    (f64::from_bits(sin.to_bits() ^ sin_sign), f64::from_bits(cos.to_bits() ^ cos_sign))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(got: f32, exact: f64) -> f64 {
        let near = (exact as f32).abs();
        let ulp = f64::from(near.next_up()) - f64::from(near);
        (f64::from(got) - exact).abs() / ulp
    }

    /// Returns sin and cos of 2πu, reduced to the first octant, in which f64 functions keep their relative precision.
    fn exact(u: f64) -> (f64, f64) {
        let q = (4.0 * u).round();
        let (s, c) = ((4.0 * u - q) * std::f64::consts::FRAC_PI_2).sin_cos();
        [(s, c), (c, -s), (-s, -c), (-c, s)][q.rem_euclid(4.0) as usize]
    }

    #[test]
    fn f32_within_its_bound() {
        let mut worst = 0.0f64;
        for k in (0..1 << 24).step_by(3) {
            let u = k as f32 * (1.0 / 16_777_216.0);
            let (s, c) = sin_cos_2pi_f32(u);
            let (es, ec) = exact(f64::from(u));
            if es != 0.0 {
                worst = worst.max(ulps(s, es));
            }
            if ec != 0.0 {
                worst = worst.max(ulps(c, ec));
            }
        }
        assert!(worst < 1.22, "{worst} ulp");
    }

    #[test]
    fn f64_within_its_bound() {
        let mut worst = 0.0f64;
        for k in 0..2_000_000u64 {
            let u = (k.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0);
            let (s, c) = sin_cos_2pi_f64(u);
            let (es, ec) = exact(u);
            worst = worst.max((s - es).abs()).max((c - ec).abs());
            assert!((s.mul_add(s, c * c) - 1.0).abs() < 4.5e-16);
        }
        assert!(worst < 2.3e-16, "{worst}");
    }

    #[test]
    fn quarter_turns_and_other_turns() {
        for k in -9i32..9 {
            let want = [(0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0)][k.rem_euclid(4) as usize];
            assert_eq!(sin_cos_2pi_f32(k as f32 / 4.0), (want.0 as f32, want.1 as f32));
            assert_eq!(sin_cos_2pi_f64(f64::from(k) / 4.0), want);
        }
        assert_eq!(sin_cos_2pi_f32(-3.0625), sin_cos_2pi_f32(0.9375));
        assert!(sin_cos_2pi_f32(f32::NAN).0.is_nan());
    }
}
