//! The functions that formulas may call.
//!
//! `kernels/cuda/pointwise.cuh` defines functions of the same names for CUDA, which perform the same sequence of IEEE
//! operations. Formulas also use `+ - * /` on floats, comparisons, `&&`, `||` and `!`.

pub(crate) use crate::tensor::cpu::is_nan;
use crate::tensor::cpu::{BitNum, Num, Real};
use crate::tensor::math::{erfc, hyperbolic, inverse_trig, logarithm, power};

/// Rounds a constant to the element type.
#[inline(always)]
pub fn of<A: Num>(x: f64) -> A {
    A::constant(x)
}

/// Converts a value to f64.
#[inline(always)]
pub fn wide<A: Real>(x: A) -> f64 {
    x.to_f64()
}

/// Returns `yes` if the condition holds, else `no`. Both are computed.
#[inline(always)]
pub fn select<A>(condition: bool, yes: A, no: A) -> A {
    if condition { yes } else { no }
}

/// Infinity.
#[inline(always)]
pub fn inf() -> f64 {
    f64::INFINITY
}

/// The quiet NaN.
#[inline(always)]
pub fn nan() -> f64 {
    f64::NAN
}

macro_rules! words {
    ($bound:ident: $($(#[$doc:meta])* $name:ident($first:ident $(, $other:ident)*) = $method:expr;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name<A: $bound>($first: A $(, $other: A)*) -> A {
            $method($first $(, $other)*)
        }
    )*};
}

words! { Real:
    /// `a · b + c`, rounded once.
    fma(a, b, c) = A::mul_add;
    /// e to the power of `x`.
    exp(x) = Real::exp;
    /// The natural logarithm.
    ln(x) = Real::ln;
    /// The hyperbolic tangent.
    tanh(x) = Real::tanh;
    /// The error function.
    erf(x) = Real::erf;
    /// `e^(-x²/2)`.
    bell(x) = Real::bell;
    /// `(1 - Φ(x)) · e^(x²/2)` for `x >= 0`.
    mills(x) = Real::mills;
    /// `1 / (1 + e^-x)`.
    sigmoid(x) = Real::sigmoid;
    /// 2 to the power of `x`.
    exp2(x) = Real::exp2;
    /// `e^x - 1`.
    expm1(x) = Real::expm1;
    /// `ln(1 + x)`.
    log1p(x) = Real::ln_1p;
    /// The logarithm to base 2.
    log2(x) = Real::log2;
    /// The logarithm to base 10.
    log10(x) = Real::log10;
    /// The inverse hyperbolic tangent.
    atanh(x) = Real::atanh;
    /// The square root.
    sqrt(x) = Real::sqrt;
    /// `1 / x`.
    recip(x) = Real::recip;
    /// The largest integer not above `x`.
    floor(x) = Real::floor;
    /// The smallest integer not below `x`.
    ceil(x) = Real::ceil;
    /// `x` rounded toward 0.
    trunc(x) = Real::trunc;
    /// The integer nearest to `x`, the even one of two.
    round(x) = Real::round;
    /// The magnitude of `x` with the sign of `sign`.
    copysign(x, sign) = Real::copysign;
}

words! { Num:
    /// The sum; integers wrap.
    add(x, y) = Num::add;
    /// The difference; integers wrap.
    sub(x, y) = Num::sub;
    /// The product; integers wrap.
    mul(x, y) = Num::mul;
    /// `-x`; integers wrap.
    negative(x) = Num::negative;
    /// The magnitude; that of the lowest integer wraps to itself.
    abs(x) = Num::magnitude;
    /// The remainder of the division that truncates.
    fmod(x, y) = Num::fmod;
    /// The remainder of the division that rounds down.
    remainder(x, y) = Num::remainder;
    /// The quotient rounded down.
    floor_div(x, y) = Num::floor_div;
    /// The larger value. -0 is less than 0; NaN if either is NaN.
    max(x, y) = Num::max;
    /// The smaller value. -0 is less than 0; NaN if either is NaN.
    min(x, y) = Num::min;
}

words! { BitNum:
    /// The bits that both have.
    bit_and(x, y) = BitNum::bit_and;
    /// The bits that one or both have.
    bit_or(x, y) = BitNum::bit_or;
    /// The bits that exactly one has.
    bit_xor(x, y) = BitNum::bit_xor;
    /// The bits that `x` does not have.
    bit_not(x) = BitNum::bit_not;
    /// The bits, moved up.
    shift_left(x, by) = BitNum::shift_left;
    /// The bits, moved down, with copies of the sign.
    shift_right(x, by) = BitNum::shift_right;
}

macro_rules! wide_words {
    ($($(#[$doc:meta])* $name:ident($($x:ident),+) = $function:path;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name($($x: f64),+) -> f64 {
            $function($($x),+)
        }
    )*};
}

// Functions of f64, for formulas that are computed in f64 for every dtype.
wide_words! {
    /// The angle whose sine is `x`.
    asin(x) = inverse_trig::asin_f64;
    /// The angle whose cosine is `x`.
    acos(x) = inverse_trig::acos_f64;
    /// The angle whose tangent is `x`.
    atan(x) = inverse_trig::atan_f64;
    /// The angle of the point `(x, y)`.
    atan2(y, x) = inverse_trig::atan2_f64;
    /// The hyperbolic sine.
    sinh(x) = hyperbolic::sinh_f64;
    /// The hyperbolic cosine.
    cosh(x) = hyperbolic::cosh_f64;
    /// The inverse hyperbolic sine.
    asinh(x) = hyperbolic::asinh_f64;
    /// The inverse hyperbolic cosine.
    acosh(x) = hyperbolic::acosh_f64;
    /// `1 - erf x`.
    erfc(x) = erfc::erfc_f64;
    /// The inverse error function.
    erfinv(x) = erfc::erfinv_f64;
    /// The cube root.
    cbrt(x) = power::cbrt_f64;
    /// `a` to the power of `y`, for `a` of at least 0.
    pow_abs(a, y) = power::pow_abs_f64;
    /// `ln(1 + x)` for `x` from 0 to 1.
    log1p_unit(x) = logarithm::ln_1p_f64;
}

/// Functions of f64 for formulas whose operands and results are narrower.
pub mod short {
    use crate::tensor::math::short;

    wide_words! {
        /// e to the power of `x`.
        exp(x) = short::exp_short;
        /// The angle whose sine is `x`.
        asin(x) = short::asin_short;
        /// The angle whose cosine is `x`.
        acos(x) = short::acos_short;
        /// The angle whose tangent is `x`.
        atan(x) = short::atan_short;
        /// The angle of the point `(x, y)`.
        atan2(y, x) = short::atan2_short;
        /// `1 - erf x`.
        erfc(x) = short::erfc_short;
        /// The inverse error function.
        erfinv(x) = short::erfinv_short;
        /// `a` to the power of `y`, for `a` of at least 0.
        pow_abs(a, y) = short::pow_abs_short;
        /// `ln(1 + x)` for `x` from 0 to 1.
        log1p_unit(x) = short::ln_1p_unit_short;
    }
}

/// Functions without branches, which return NaN at rare arguments.
pub mod near {
    use crate::tensor::cpu::Real;
    use crate::tensor::math::gamma;

    words! { Real:
        /// The sine.
        sin(x) = Real::sin_near;
        /// The cosine.
        cos(x) = Real::cos_near;
        /// The tangent.
        tan(x) = Real::tan_near;
    }

    words! { Real:
        /// The remainder of the division that truncates.
        fmod(x, y) = Real::fmod_near;
        /// The remainder of the division that rounds down.
        remainder(x, y) = Real::remainder_near;
        /// The quotient rounded down.
        floor_div(x, y) = Real::floor_div_near;
    }

    wide_words! {
        /// The logarithm of the gamma function.
        lgamma(x) = gamma::lgamma_near_f64;
        /// The derivative of `lgamma`.
        digamma(x) = gamma::digamma_near_f64;
        /// The derivative of `digamma`.
        trigamma(x) = gamma::trigamma_near_f64;
    }
}

/// The functions of [`near`] for all arguments.
pub mod far {
    pub use crate::ops::pointwise::words::{floor_div, fmod, remainder};
    use crate::tensor::cpu::Real;
    use crate::tensor::math::gamma;

    words! { Real:
        /// The sine.
        sin(x) = Real::sin;
        /// The cosine.
        cos(x) = Real::cos;
        /// The tangent.
        tan(x) = Real::tan;
    }

    wide_words! {
        /// The logarithm of the gamma function.
        lgamma(x) = gamma::lgamma_f64;
        /// The derivative of `lgamma`.
        digamma(x) = gamma::digamma_f64;
        /// The derivative of `digamma`.
        trigamma(x) = gamma::trigamma_f64;
    }
}
