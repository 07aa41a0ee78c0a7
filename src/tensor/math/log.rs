//! The natural logarithm; replaced by the branch that writes `log.rs` in full.

/// The natural logarithm: `x = 2^e m` with `m` near 1, and the series of `2 atanh((m - 1) / (m + 1))`.
#[inline(always)]
pub fn ln_f32(x: f32) -> f32 {
    ln_f64(x as f64) as f32
}

/// The natural logarithm.
#[inline(always)]
pub fn ln_f64(x: f64) -> f64 {
    let tiny = x < f64::MIN_POSITIVE;
    let y = if tiny { x * 18014398509481984.0 } else { x };
    let bits = y.to_bits() as i64;
    let e = (bits - 0x3fe6a09e667f3bcd) >> 52;
    let m = f64::from_bits((bits - (e << 52)) as u64);
    let e = e as f64 - if tiny { 54.0 } else { 0.0 };
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut p: f64 = 0.0;
    for k in (1..=10).rev() {
        p = p.mul_add(z, 2.0 / f64::from(2 * k + 1));
    }
    let r = e.mul_add(std::f64::consts::LN_2, (s * z).mul_add(p, 2.0 * s));
    let r = if x == f64::INFINITY { x } else { r };
    let r = if x == 0.0 { f64::NEG_INFINITY } else { r };
    if x < 0.0 || x.is_nan() { f64::NAN } else { r }
}
