//! The number types in which kernels compute.

use std::ops::{Add, Div, Mul, Neg, Sub};

use half::{bf16, f16};

use crate::element::{Element, Float};
use crate::math::{circular, erf, exp, exponential, hyperbolic, log, logarithm, normal};

/// f32 or f64, with the functions that kernels may use. Each is a fixed sequence of IEEE operations, so its result has
/// the same bits on every machine.
///
/// ```
/// use isoshard_kernels::Real;
/// fn softplus<A: Real>(x: A) -> A {
///     (A::of(1.0) + x.exp()).ln()
/// }
/// assert_eq!(softplus(0.0f64), 2f64.ln());
/// ```
pub trait Real:
    Num
    + Widen<Wide = Self>
    + Float<Acc = Self>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// Returns the value nearest to a constant.
    fn of(x: f64) -> Self;
    /// Returns `self * a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// Returns e to the power of this value.
    fn exp(self) -> Self;
    /// Returns the two numbers from which [`exp_end`](Real::exp_end) computes the exponential, the first of them never 0. Loops in two
    /// passes have shorter chains of operations, and a CPU overlaps more of them.
    fn exp_begin(self) -> [Self; 2];
    /// Returns the exponential of a value from the two numbers that [`exp_begin`](Real::exp_begin) gave.
    fn exp_end(parts: [Self; 2]) -> Self;
    /// Returns the bits of [`exp`](Real::exp) by fewer operations, for a NaN and from the first to the second of
    /// [`EXP_MID`](Real::EXP_MID). Other results are arbitrary.
    fn exp_mid(self) -> Self;
    /// The ends of the arguments of [`exp_mid`](Real::exp_mid), whose results are normal numbers.
    const EXP_MID: [Self; 2];
    /// Returns the natural logarithm.
    fn ln(self) -> Self;
    /// Returns the hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Returns the error function.
    fn erf(self) -> Self;
    /// Returns `e^(-x²/2)`.
    fn bell(self) -> Self;
    /// Returns `(1 - Φ(x)) · e^(x²/2)` for `x >= 0`.
    fn mills(self) -> Self;
    /// Returns the logistic function `1 / (1 + e^-x)`.
    fn sigmoid(self) -> Self;
    /// Returns 2 to the power of this value.
    fn exp2(self) -> Self;
    /// Returns `e^x - 1` without cancellation near 0.
    fn expm1(self) -> Self;
    /// Returns `ln(1 + x)` without cancellation near 0.
    fn ln_1p(self) -> Self;
    /// Returns the logarithm to base 2.
    fn log2(self) -> Self;
    /// Returns the logarithm to base 10.
    fn log10(self) -> Self;
    /// Returns the inverse hyperbolic tangent.
    fn atanh(self) -> Self;
    /// Returns the sine of radians.
    fn sin(self) -> Self;
    /// Returns the sine of radians, or NaN for large operands, without branches.
    fn sin_near(self) -> Self;
    /// Returns the cosine of radians.
    fn cos(self) -> Self;
    /// Returns the cosine of radians, or NaN for large operands, without branches.
    fn cos_near(self) -> Self;
    /// Returns the tangent of radians.
    fn tan(self) -> Self;
    /// Returns the tangent of radians, or NaN for large operands, without branches.
    fn tan_near(self) -> Self;
    /// Returns the square root.
    fn sqrt(self) -> Self;
    /// Returns the magnitude.
    fn abs(self) -> Self;
    /// Returns `1 / x`.
    fn recip(self) -> Self;
    /// Returns the largest integer not above this value.
    fn floor(self) -> Self;
    /// Returns the smallest integer not below this value.
    fn ceil(self) -> Self;
    /// Returns the integer part: this value rounded toward 0.
    fn trunc(self) -> Self;
    /// Returns the nearest integer, the even one of two.
    fn round(self) -> Self;
    /// Returns this value's magnitude with the sign of `sign`.
    fn copysign(self, sign: Self) -> Self;
    /// Returns [`Num::fmod`], or NaN if the quotient is large: without branches.
    fn fmod_near(self, y: Self) -> Self;
    /// Returns [`Num::remainder`], or NaN if the quotient is large.
    fn remainder_near(self, y: Self) -> Self;
    /// Returns [`Num::floor_div`], or NaN if the quotient is large.
    fn floor_div_near(self, y: Self) -> Self;
}

/// A number type: f32, f64, i64, i32 or u8. Integers wrap.
///
/// ```
/// use isoshard_kernels::Num;
/// assert_eq!(Num::add(250u8, 9), 3);
/// assert!(Num::max(1.0f32, f32::NAN).is_nan());
/// ```
pub trait Num: Widen<Wide = Self> + PartialOrd {
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// The identity of addition, also for the sign of zero: -0.0 for floats, 0 for integers.
    const SUM_PAD: Self;
    /// The identity of the maximum: the lowest value.
    const LOWEST: Self;
    /// The identity of the minimum: the highest value.
    const HIGHEST: Self;
    /// Returns the value nearest to a constant. An integer type takes the lowest bits of a whole number between -2^63
    /// and 2^63: -1 is 255 for u8.
    fn constant(x: f64) -> Self;
    /// Returns the sum.
    fn add(self, other: Self) -> Self;
    /// Returns the difference.
    fn sub(self, other: Self) -> Self;
    /// Returns the product.
    fn mul(self, other: Self) -> Self;
    /// Returns the number with the opposite sign.
    fn negative(self) -> Self;
    /// Returns the magnitude. That of the lowest integer wraps to itself.
    fn magnitude(self) -> Self;
    /// Returns the remainder of the division by `y` that truncates: it has this number's sign, and is exact. A float
    /// divided by 0 gives NaN, an integer itself.
    fn fmod(self, y: Self) -> Self;
    /// Returns the remainder of the division by `y` that rounds down: it has the sign of `y`, as in Python. A float
    /// divided by 0 gives NaN, an integer itself.
    fn remainder(self, y: Self) -> Self;
    /// Returns the quotient rounded down. A float divided by 0 gives an infinity or NaN, an integer 0.
    fn floor_div(self, y: Self) -> Self;
    /// Returns the larger number: IEEE 754-2019's `maximum`. -0 is less than 0, and the result is the type's canonical
    /// NaN if either number is a NaN. So the maximum of several values has the same bits in any order.
    fn max(self, other: Self) -> Self;
    /// Returns the smaller number: IEEE 754-2019's `minimum`, with the rules of [`Num::max`].
    fn min(self, other: Self) -> Self;
}

/// Returns one of two values. Both are computed, so that loops vectorise.
#[inline(always)]
pub fn select<T>(condition: bool, yes: T, no: T) -> T {
    if condition { yes } else { no }
}

/// Returns true if a value does not equal itself.
///
/// ```
/// use isoshard_kernels::is_nan;
/// assert!(is_nan(f32::NAN) && !is_nan(f64::INFINITY) && !is_nan(3i32));
/// ```
#[inline(always)]
#[allow(clippy::eq_op)]
pub fn is_nan<T: PartialEq + Copy>(x: T) -> bool {
    x != x
}

/// An element, with the type that loops use for it: f16 and bf16 are converted to f32 chunk by chunk.
pub trait Widen: Element {
    /// The type that loops use: f32 for f16 and bf16, else the type itself.
    type Wide: Widen<Wide = Self::Wide>;
    /// True if `Wide` is the type itself.
    const NATIVE: bool;
    /// Returns the widened elements: `src` itself, or the beginning of `buf`, filled from it.
    fn load<'a>(src: &'a [Self], buf: &'a mut [Self::Wide]) -> &'a [Self::Wide];
    /// Widens the elements into `wide`, which has their length.
    fn widen_into(src: &[Self], wide: &mut [Self::Wide]);
    /// Rounds the elements of `wide` into `dst`, which has their length.
    fn narrow_into(wide: &[Self::Wide], dst: &mut [Self]);
    /// Calls `write` with `dst`, or with the beginning of `buf`, which is then rounded into `dst`.
    fn store(dst: &mut [Self], buf: &mut [Self::Wide], write: impl FnOnce(&mut [Self::Wide]));
}

macro_rules! native {
    ($($t:ty)*) => {$(
        impl Widen for $t {
            type Wide = $t;
            const NATIVE: bool = true;
            #[inline(always)]
            fn load<'a>(src: &'a [$t], _: &'a mut [$t]) -> &'a [$t] {
                src
            }
            #[inline(always)]
            fn widen_into(src: &[$t], wide: &mut [$t]) {
                wide.copy_from_slice(src);
            }
            #[inline(always)]
            fn narrow_into(wide: &[$t], dst: &mut [$t]) {
                dst.copy_from_slice(wide);
            }
            #[inline(always)]
            fn store(dst: &mut [$t], _: &mut [$t], write: impl FnOnce(&mut [$t])) {
                write(dst)
            }
        }
    )*};
}

native!(f32 f64 i64 i32 u8 bool);

macro_rules! half {
    ($($t:ty, $widen:path, $narrow:path;)*) => {$(
        impl Widen for $t {
            type Wide = f32;
            const NATIVE: bool = false;
            fn load<'a>(src: &'a [$t], buf: &'a mut [f32]) -> &'a [f32] {
                let buf = &mut buf[..src.len()];
                Self::widen_into(src, buf);
                buf
            }
            fn widen_into(src: &[$t], wide: &mut [f32]) {
                crate::isa::map_slice::map_slice(src, wide, |x: $t| $widen(x.to_bits()));
            }
            fn narrow_into(wide: &[f32], dst: &mut [$t]) {
                crate::isa::map_slice::map_slice(wide, dst, |x: f32| <$t>::from_bits($narrow(x)));
            }
            fn store(dst: &mut [$t], buf: &mut [f32], write: impl FnOnce(&mut [f32])) {
                let buf = &mut buf[..dst.len()];
                write(buf);
                Self::narrow_into(buf, dst);
            }
        }
    )*};
}

half! {
    f16, widen_f16, narrow_f16;
    bf16, widen_bf16, narrow_bf16;
}

/// Converts the bits of an f16 to f32, exactly and without branches, so that loops vectorise.
#[inline(always)]
pub fn widen_f16(h: u16) -> f32 {
    let h = u32::from(h);
    let (sign, magnitude) = ((h & 0x8000) << 16, h & 0x7fff);
    // After the shift the exponent is 112 too small; a multiplication corrects it, also for subnormals.
    let finite = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let special = 0x7f80_0000 | (magnitude << 13) | select(magnitude > 0x7c00, 0x0040_0000, 0);
    f32::from_bits(sign | select(magnitude >= 0x7c00, special, finite.to_bits()))
}

/// Rounds an f32 to the nearest f16, ties to even.
#[inline(always)]
pub fn narrow_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, magnitude) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
    // Normal results: rounds at bit 13 by adding half of its value minus one, plus the bit that decides ties.
    let normal = (magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + (magnitude >> 13 & 1))) >> 13;
    // Subnormal results: adding 0.5 moves the unit of f16's subnormals to the last bit and rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let special = 0x7c00 | select(magnitude > 0x7f80_0000, 0x200 | (magnitude >> 13 & 0x3ff), 0);
    let finite = select(magnitude < 113 << 23, subnormal, normal);
    (sign | select(magnitude >= 143 << 23, special, finite)) as u16
}

/// Converts the bits of a bf16 to f32, exactly.
#[inline(always)]
pub fn widen_bf16(h: u16) -> f32 {
    f32::from_bits(u32::from(h) << 16)
}

/// Rounds an f32 to the nearest bf16, ties to even.
#[inline(always)]
pub fn narrow_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    select(bits & 0x7fff_ffff > 0x7f80_0000, bits >> 16 | 0x40, rounded) as u16
}

/// Returns the remainder of the division that rounds down, from that of the one that truncates.
#[inline(always)]
fn remainder_of<A: Real>(rest: A, y: A) -> A {
    let shifted = select((rest < A::ZERO) != (y < A::ZERO), rest + y, rest);
    select(rest == A::ZERO, rest.copysign(y), shifted)
}

/// Returns the quotient rounded down, from the remainder of the division that truncates.
#[inline(always)]
fn quotient_of<A: Real>(x: A, rest: A, y: A) -> A {
    let down = select((rest != A::ZERO) & ((rest < A::ZERO) != (y < A::ZERO)), A::ONE, A::ZERO);
    let quotient = (x - rest) / y - down;
    // The quotient is within rounding of an integer.
    let floor = quotient.floor();
    let whole = select(quotient - floor > A::of(0.5), floor + A::ONE, floor);
    let whole = select(quotient == A::ZERO, A::ZERO.copysign(x / y), whole);
    select(y == A::ZERO, x / y, whole)
}

macro_rules! float_num {
    ($($t:ident, $begin:path, $end:path, $ends:path => $($function:ident = $path:path),*;)*) => {$(
        impl Num for $t {
            const ZERO: $t = 0.0;
            const ONE: $t = 1.0;
            const SUM_PAD: $t = -0.0;
            const LOWEST: $t = $t::NEG_INFINITY;
            const HIGHEST: $t = $t::INFINITY;
            #[inline(always)]
            fn constant(x: f64) -> $t { x as $t }
            #[inline(always)]
            fn add(self, other: $t) -> $t { self + other }
            #[inline(always)]
            fn sub(self, other: $t) -> $t { self - other }
            #[inline(always)]
            fn mul(self, other: $t) -> $t { self * other }
            #[inline(always)]
            fn negative(self) -> $t { -self }
            #[inline(always)]
            fn magnitude(self) -> $t { $t::abs(self) }
            #[inline(always)]
            fn fmod(self, y: $t) -> $t {
                let near = self.fmod_near(y);
                if near.is_nan() { self % y } else { near }
            }
            #[inline(always)]
            fn remainder(self, y: $t) -> $t { remainder_of(Num::fmod(self, y), y) }
            #[inline(always)]
            fn floor_div(self, y: $t) -> $t { quotient_of(self, Num::fmod(self, y), y) }
            #[inline(always)]
            fn max(self, other: $t) -> $t {
                // `a` and `b` differ only if the values are zeros of different sign or if one is a NaN.
                let (a, b) = (select(self > other, self, other), select(other > self, other, self));
                let larger = $t::from_bits(a.to_bits() & b.to_bits());
                select(self.is_nan() | other.is_nan(), $t::NAN, larger)
            }
            #[inline(always)]
            fn min(self, other: $t) -> $t {
                let (a, b) = (select(self < other, self, other), select(other < self, other, self));
                let smaller = $t::from_bits(a.to_bits() | b.to_bits());
                select(self.is_nan() | other.is_nan(), $t::NAN, smaller)
            }
        }
        impl Real for $t {
            #[inline(always)]
            fn of(x: f64) -> $t { x as $t }
            #[inline(always)]
            fn mul_add(self, a: $t, b: $t) -> $t { $t::mul_add(self, a, b) }
            $(
                #[inline(always)]
                fn $function(self) -> $t { $path(self) }
            )*
            #[inline(always)]
            fn exp_begin(self) -> [$t; 2] { $begin(self) }
            #[inline(always)]
            fn exp_end([shifted, r]: [$t; 2]) -> $t { $end(shifted, r) }
            const EXP_MID: [$t; 2] = $ends;
            #[inline(always)]
            fn sqrt(self) -> $t { $t::sqrt(self) }
            #[inline(always)]
            fn abs(self) -> $t { $t::abs(self) }
            #[inline(always)]
            fn recip(self) -> $t { 1.0 / self }
            #[inline(always)]
            fn floor(self) -> $t { $t::floor(self) }
            #[inline(always)]
            fn ceil(self) -> $t { $t::ceil(self) }
            #[inline(always)]
            fn trunc(self) -> $t { $t::trunc(self) }
            #[inline(always)]
            fn round(self) -> $t { $t::round_ties_even(self) }
            #[inline(always)]
            fn copysign(self, sign: $t) -> $t { $t::copysign(self, sign) }
            #[inline(always)]
            fn fmod_near(self, y: $t) -> $t {
                // With a quotient that is surely exact, one step of the division gives the remainder, which is
                // representable. Rounding may have made the quotient 1 too large.
                let quotient = $t::trunc(self / y);
                let rest = $t::mul_add(-quotient, y, self);
                let low = ((rest < 0.0) != (self < 0.0)) & (rest != 0.0);
                let step = select((y < 0.0) == (self < 0.0), y, -y);
                let rest = $t::copysign(select(low, rest + step, rest), self);
                let rest = select($t::abs(quotient) < 0.25 / $t::EPSILON, rest, $t::NAN);
                select($t::abs(self) < $t::abs(y), self, rest)
            }
            #[inline(always)]
            fn remainder_near(self, y: $t) -> $t { remainder_of(self.fmod_near(y), y) }
            #[inline(always)]
            fn floor_div_near(self, y: $t) -> $t { quotient_of(self, self.fmod_near(y), y) }
        }
    )*};
}

float_num! {
    f32, exp::begin_f32, exp::end_f32, exp::MID_ARGUMENTS_F32 => exp = exp::exp_f32, exp_mid = exp::exp_mid_f32, ln = log::ln_f32, tanh = exp::tanh_f32, erf = erf::erf_f32, bell = normal::bell_f32, mills = normal::mills_f32,
        sigmoid = exp::sigmoid_f32, exp2 = exponential::exp2_f32, expm1 = exponential::expm1_f32, ln_1p = logarithm::ln_1p_f32,
        log2 = logarithm::log2_f32, log10 = logarithm::log10_f32, atanh = hyperbolic::atanh_f32,
        sin = circular::sin_f32, cos = circular::cos_f32, tan = circular::tan_f32,
        sin_near = circular::sin_near_f32, cos_near = circular::cos_near_f32, tan_near = circular::tan_near_f32;
    f64, exp::begin_f64, exp::end_f64, exp::MID_ARGUMENTS_F64 => exp = exp::exp_f64, exp_mid = exp::exp_mid_f64, ln = log::ln_f64, tanh = exp::tanh_f64, erf = erf::erf_f64, bell = normal::bell_f64, mills = normal::mills_f64,
        sigmoid = exp::sigmoid_f64, exp2 = exponential::exp2_f64, expm1 = exponential::expm1_f64, ln_1p = logarithm::ln_1p_f64,
        log2 = logarithm::log2_f64, log10 = logarithm::log10_f64, atanh = hyperbolic::atanh_f64,
        sin = circular::sin_f64, cos = circular::cos_f64, tan = circular::tan_f64,
        sin_near = circular::sin_near_f64, cos_near = circular::cos_near_f64, tan_near = circular::tan_near_f64;
}

macro_rules! int_num {
    ($($t:ident)*) => {$(
        impl Num for $t {
            const ZERO: $t = 0;
            const ONE: $t = 1;
            const SUM_PAD: $t = 0;
            const LOWEST: $t = $t::MIN;
            const HIGHEST: $t = $t::MAX;
            #[inline(always)]
            fn constant(x: f64) -> $t { x as i64 as $t }
            #[inline(always)]
            fn add(self, other: $t) -> $t { self.wrapping_add(other) }
            #[inline(always)]
            fn sub(self, other: $t) -> $t { self.wrapping_sub(other) }
            #[inline(always)]
            fn mul(self, other: $t) -> $t { self.wrapping_mul(other) }
            #[inline(always)]
            fn negative(self) -> $t { self.wrapping_neg() }
            #[inline(always)]
            #[allow(unused_comparisons)]
            fn magnitude(self) -> $t { if self < 0 { self.wrapping_neg() } else { self } }
            #[inline(always)]
            fn fmod(self, y: $t) -> $t {
                if y == 0 { self } else { self.wrapping_rem(y) }
            }
            #[inline(always)]
            #[allow(unused_comparisons)]
            fn remainder(self, y: $t) -> $t {
                let rest = Num::fmod(self, y);
                if y != 0 && rest != 0 && (rest < 0) != (y < 0) { rest.wrapping_add(y) } else { rest }
            }
            #[inline(always)]
            #[allow(unused_comparisons)]
            fn floor_div(self, y: $t) -> $t {
                if y == 0 {
                    return 0;
                }
                let (quotient, rest) = (self.wrapping_div(y), self.wrapping_rem(y));
                quotient.wrapping_sub($t::from(rest != 0 && (rest < 0) != (y < 0)))
            }
            #[inline(always)]
            fn max(self, other: $t) -> $t { Ord::max(self, other) }
            #[inline(always)]
            fn min(self, other: $t) -> $t { Ord::min(self, other) }
        }
    )*};
}

int_num!(i64 i32 u8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_convert_as_the_half_crate_does() {
        for h in 0..=u16::MAX {
            let (got, want) = (widen_bf16(h), bf16::from_bits(h).to_f32_const());
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{h:x}");
            let (got, want) = (widen_f16(h), f16::from_bits(h).to_f32_const());
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{h:x}");
        }
        for bits in (0..=u32::MAX).step_by(977).chain((0..1 << 16).map(|h| h << 16 | 0x8000)) {
            let x = f32::from_bits(bits);
            assert_eq!(narrow_bf16(x), bf16::from_f32_const(x).to_bits(), "{x:e}");
            let (got, want) = (narrow_f16(x), f16::from_f32_const(x));
            assert!(got == want.to_bits() || (f16::from_bits(got).is_nan() && want.is_nan()), "{x:e}");
        }
        for bits in (0x3280_0000u32..0x4780_2000).step_by(1 << 8) {
            let x = f32::from_bits(bits);
            assert_eq!(narrow_f16(x), f16::from_f32_const(x).to_bits(), "{x:e}");
        }
    }

    #[test]
    fn extremes_do_not_depend_on_the_order() {
        let payload = f32::from_bits(0xffc0_1234);
        let all = [-0.0, 0.0, 1.5, -1.5, f32::INFINITY, f32::NEG_INFINITY, 1e-45, f32::NAN, payload];
        // IEEE 754's total order of the values that are not NaN.
        let key = |x: f32| (x.to_bits() as i32) ^ ((x.to_bits() as i32 >> 31) as u32 >> 1) as i32;
        for (x, y) in all.into_iter().flat_map(|x| all.map(|y| (x, y))) {
            let nan = x.is_nan() || y.is_nan();
            let (low, high) = if key(x) < key(y) { (x, y) } else { (y, x) };
            let want = [low, high].map(|x| if nan { 0x7fc0_0000 } else { x.to_bits() });
            assert_eq!([Num::min(x, y), Num::max(x, y)].map(f32::to_bits), want, "{x} {y}");
            let wide = [Num::min(f64::from(x), f64::from(y)), Num::max(f64::from(x), f64::from(y))];
            let want = [low, high].map(|x| if nan { f64::NAN } else { f64::from(x) });
            assert_eq!(wide.map(f64::to_bits), want.map(f64::to_bits), "{x} {y}");
        }
        assert_eq!((Num::max(-3i32, 2), Num::min(250u8, 7)), (2, 7));
        assert_eq!((Num::add(250u8, 9), Num::mul(i32::MAX, 2), Num::sub(0u8, 1)), (3, -2, 255));
    }

    /// The remainder by its definition, from the standard library's exact `%`.
    fn python_remainder(x: f64, y: f64) -> f64 {
        let rest = x % y;
        if rest == 0.0 {
            0f64.copysign(y)
        } else if (rest < 0.0) != (y < 0.0) {
            rest + y
        } else {
            rest
        }
    }

    #[test]
    fn remainders_of_floats_are_exact() {
        let special = [
            0.0,
            0.1,
            0.5,
            1.0,
            3.0,
            7.0,
            1e10,
            1e-40,
            1e-45,
            3.4e38,
            1e300,
            5e-324,
            f64::INFINITY,
            f64::NAN,
        ];
        let mut pairs: Vec<(f64, f64)> = Vec::new();
        for x in special.into_iter().flat_map(|x| [x, -x]) {
            pairs.extend(special.into_iter().flat_map(|y| [y, -y]).map(|y| (x, y)));
        }
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            f64::from_bits((state >> 12) | 0x3ff0 << 48).mul_add(2.0, -3.0)
                * ((state % 80) as f64 - 40.0).exp2()
        };
        pairs.extend((0..100_000).map(|_| (next(), next())));
        // Multiples, and their neighbours.
        pairs.extend(
            (0..1000).flat_map(|k| [(f64::from(k) * 0.1, 0.1), ((f64::from(k) * 0.7).next_down(), -0.7)]),
        );
        let same = |a: f64, b: f64| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        for (x, y) in pairs {
            assert!(same(Num::fmod(x, y), x % y), "{x:e} % {y:e}: {:e}", Num::fmod(x, y));
            let (a, b) = (x as f32, y as f32);
            assert!(same(Num::fmod(a, b).into(), (a % b).into()), "{a:e} % {b:e}: {:e}", Num::fmod(a, b));
            assert!(same(Num::remainder(x, y), python_remainder(x, y)), "{x:e} mod {y:e}");
            // The quotient times the divisor, and the remainder, give the dividend.
            let quotient = Num::floor_div(x, y);
            if quotient.abs() < 1e6 && y != 0.0 && y.is_finite() {
                let rest = Num::remainder(x, y);
                assert!((quotient * y + rest - x).abs() <= 1e-9 * (x.abs() + y.abs()), "{x:e} // {y:e}");
                assert_eq!(quotient, quotient.trunc());
            }
        }
        let divided = |x: f64, y: f64| Num::floor_div(x, y);
        assert_eq!(
            [divided(-7.0, 2.0), divided(7.0, -2.0), divided(1.0, 0.1), divided(6.0, 3.0)],
            [-4.0, -4.0, 9.0, 2.0]
        );
        assert_eq!((divided(1.0, 0.0), divided(-1.0, 0.0)), (f64::INFINITY, f64::NEG_INFINITY));
        assert!(divided(0.0, -3.0).is_sign_negative() && divided(f64::INFINITY, 2.0).is_nan());
    }

    #[test]
    fn integers_divide_without_a_panic() {
        for x in [i32::MIN, -7, -1, 0, 1, 8, i32::MAX] {
            for y in [i32::MIN, -3, -1, 1, 4, i32::MAX] {
                let (wide, by) = (i64::from(x), i64::from(y));
                let floor = wide.div_euclid(by) - i64::from(by < 0 && wide.rem_euclid(by) != 0);
                assert_eq!(i64::from(Num::floor_div(x, y)), i64::from(floor as i32), "{x} // {y}");
                assert_eq!(i64::from(Num::remainder(x, y)), wide - floor * by, "{x} mod {y}");
                assert_eq!(i64::from(Num::fmod(x, y)), wide % by, "{x} % {y}");
            }
            assert_eq!((Num::floor_div(x, 0), Num::remainder(x, 0), Num::fmod(x, 0)), (0, x, x));
        }
        assert_eq!(
            (Num::floor_div(7u8, 2), Num::remainder(7u8, 4), Num::magnitude(i64::MIN)),
            (3, 3, i64::MIN)
        );
        assert_eq!((<u8 as Num>::constant(-1.0), <i64 as Num>::constant(9.3e18)), (255, i64::MAX));
    }
}
