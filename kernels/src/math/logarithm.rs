//! Logarithms to the bases 2 and 10, and `ln(1 + x)`.
//!
//! ```
//! use isoshard_kernels::math::logarithm::{ln_1p_f64, log2_f64, log10_f64};
//! assert_eq!((log2_f64(8.0), log10_f64(1e22), ln_1p_f64(1e-20)), (3.0, 22.0, 1e-20));
//! assert_eq!((log2_f64(5e-324), ln_1p_f64(-1.0)), (-1074.0, f64::NEG_INFINITY));
//! ```
//!
//! The argument is split as for [`ln_f64`](super::log::ln_f64). In f64 the logarithm is first computed as a sum of two
//! numbers.
//! The f32 functions have errors of up to 1 ulp.

use super::log::{polynomial_f32, polynomial_f64, split_f32, split_f64, with_limits_f32, with_limits_f64};
use super::pair::*;

/// Returns the logarithm to base 2, with the special values of [`ln_f64`](super::log::ln_f64).
#[inline(always)]
pub fn log2_f64(x: f64) -> f64 {
    let tiny: bool = x < 2.2250738585072014e-308;
    let (e, f) = split_f64(select(tiny, x * 18014398509481984.0, x));
    let (h, l) = ln_1p_pair(f);
    let (p, rest) = two_product(h, 1.4426950408889634);
    let low = rest + fma(l, 1.4426950408889634, h * 2.0355273740931033e-17);
    let (sum, sum_rest) = two_sum(e + select(tiny, -54.0, 0.0), p);
    with_limits_f64(x, sum + (sum_rest + low))
}

/// Returns the logarithm to base 10, with the special values of [`ln_f64`](super::log::ln_f64).
#[inline(always)]
pub fn log10_f64(x: f64) -> f64 {
    let tiny: bool = x < 2.2250738585072014e-308;
    let (e, f) = split_f64(select(tiny, x * 18014398509481984.0, x));
    let n = e + select(tiny, -54.0, 0.0);
    let (h, l) = ln_1p_pair(f);
    let (p, rest) = two_product(h, 0.4342944819032518);
    let low = rest + fma(l, 0.4342944819032518, h * 1.098319650216765e-17);
    let (sum, sum_rest) = two_sum(n * 3.010299956636117713e-1, p);
    with_limits_f64(x, sum + (sum_rest + fma(n, 3.6942390771589308e-13, low)))
}

/// Returns the logarithm to base 2, with the special values of [`ln_f32`](super::log::ln_f32).
#[inline(always)]
pub fn log2_f32(x: f32) -> f32 {
    let (e, f, tail) = split_log_f32(x);
    // log2(e) is a sum of two numbers.
    with_limits_f32(x, e + f.mul_add(1.442_695, tail.mul_add(1.442_695, f * 1.925_963e-8)))
}

/// Returns the logarithm to base 10, with the special values of [`ln_f32`](super::log::ln_f32).
#[inline(always)]
pub fn log10_f32(x: f32) -> f32 {
    let (e, f, tail) = split_log_f32(x);
    // log10(2) and log10(e) are sums of two numbers, and the first product with e is exact.
    let small = tail.mul_add(4.342_945e-1, f.mul_add(-1.010_305e-8, e * 4.605_039e-6));
    with_limits_f32(x, e.mul_add(3.010_254e-1, f.mul_add(4.342_945e-1, small)))
}

/// Returns e, f and `ln(1 + f) - f`, with `x = 2^e (1 + f)`.
#[inline(always)]
fn split_log_f32(x: f32) -> (f32, f32, f32) {
    let tiny = x < f32::MIN_POSITIVE;
    let (e, f) = split_f32(if tiny { x * 8388608.0 } else { x });
    let z = f * f;
    (e + if tiny { -23.0 } else { 0.0 }, f, (-0.5f32).mul_add(z, f * z * polynomial_f32(f)))
}

/// Returns `ln(1 + x)` without cancellation near 0: `-inf` at -1, NaN below.
#[inline(always)]
pub fn ln_1p_f32(x: f32) -> f32 {
    let w = 1.0 + x;
    let above = w - 1.0;
    let rest = (1.0 - (w - above)) + (x - above);
    let (e, f) = split_f32(w);
    let (f, rest) = if e == 0.0 { (x, 0.0) } else { (f, rest / w) };
    let z = f * f;
    let tail = e.mul_add(-2.121_944_4e-4, (f * z).mul_add(polynomial_f32(f), rest));
    let y = e.mul_add(0.693_359_4, (-0.5f32).mul_add(z, tail) + f);
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x > -1.0 { y } else { f32::NAN };
    let y = if x == -1.0 { f32::NEG_INFINITY } else { y };
    if x == 0.0 { x } else { y }
}

/// Returns `ln(1 + x)` without cancellation near 0: `-inf` at -1, NaN below.
#[inline(always)]
pub fn ln_1p_f64(x: f64) -> f64 {
    let finite = select(x == f64::INFINITY, x, ln_1p_sum(x, 0.0));
    let real = select(x > -1.0, finite, f64::NAN);
    let y = select(x == -1.0, f64::NEG_INFINITY, real);
    select(x == 0.0, x, y)
}

/// Returns `ln(1 + u + rest)` for `u` above -1 and finite, and a `rest` that is much smaller.
#[inline(always)]
pub(crate) fn ln_1p_sum(u: f64, rest: f64) -> f64 {
    let (w, w_rest) = two_sum(1.0, u);
    let (e, f) = split_f64(w);
    let near: bool = e == 0.0;
    ln_join(e, select(near, u, f), select(near, rest, (w_rest + rest) / w))
}

/// Returns `ln(w + rest)` for a positive, normal and finite `w` and a `rest` that is much smaller.
#[inline(always)]
pub(crate) fn ln_sum(w: f64, rest: f64, shift: f64) -> f64 {
    let (e, f) = split_f64(w);
    ln_join(e + shift, f, rest / w)
}

/// Returns `e ln 2 + ln(1 + f) + rest`.
#[inline(always)]
fn ln_join(e: f64, f: f64, rest: f64) -> f64 {
    let s = f / (2.0 + f);
    let half_square = 0.5 * f * f;
    let tail = fma(s, polynomial_f64(s, half_square), fma(e, 1.9082149292705877e-10, rest));
    fma(e, 6.931471803691238e-1, f - (half_square - tail))
}

/// Returns `ln(1 + f)` as a sum of two numbers, for the `f` of a split argument.
#[inline(always)]
fn ln_1p_pair(f: f64) -> (f64, f64) {
    let s = f / (2.0 + f);
    let (half_square, rest) = two_product(0.5 * f, f);
    let (h, l) = fast_two_sum(f, -half_square);
    (h, l + fma(s, polynomial_f64(s, half_square), -rest))
}

/// Returns `ln x` as a sum of two numbers, for a positive finite `x`.
#[inline(always)]
pub(crate) fn ln_pair(x: f64) -> (f64, f64) {
    let tiny: bool = x < 2.2250738585072014e-308;
    let (e, f) = split_f64(select(tiny, x * 18014398509481984.0, x));
    let n = e + select(tiny, -54.0, 0.0);
    let (h, l) = ln_1p_pair(f);
    let (sum, rest) = two_sum(n * 6.931471803691238e-1, h);
    (sum, rest + fma(n, 1.9082149292705877e-10, l))
}
