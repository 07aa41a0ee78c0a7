//! Constants and functions that several formulas use.
#![allow(clippy::approx_constant, clippy::excessive_precision)]

use super::flops::{KnownFlops, operations};
use super::words::*;
use crate::tensor::cpu::Real;

functions! {
    constants {
    /// `2 / √π`.
    FRAC_2_SQRT_PI = 1.128379167095512573896158903122;
    /// `1 / √2`.
    FRAC_1_SQRT_2 = 0.707106781186547524400844362105;
    /// `1 / √(2π)`.
    DENSITY = 0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
    /// `2 √(2/π)`: gelu's approximation is `x · sigmoid(V · (x + C x³))`, since `(1 + tanh(v / 2)) / 2 = sigmoid(v)`.
    V = 2.0 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
    /// The cubic term's factor.
    C = 0.044715;
    /// `π`.
    PI = 3.141592653589793238462643383280;
    /// `ln 2`.
    LN_2 = 0.693147180559945309417232121458;
    /// The factor of `selu`, and its slope just below 0: 1.6732632423543772848170429916717 times the factor.
    SELU_SCALE = 1.0507009873554804934193349852946;
    SELU_SLOPE = 1.7580993408473768599402175208123;
    }

    /// Clamps `x` to ±10⁴, where distribution functions are already 0 or 1 and `x³` is still finite. NaN stays NaN.
    fn bounded(x) = select(x < of(-1e4), of(-1e4), select(x > of(1e4), of(1e4), x));
    /// The magnitude of `x`, at most 10⁴. NaN stays NaN.
    fn bounded_abs(x) [a = abs(x)] = select(a > of(1e4), of(1e4), a);
    /// `x^y` with IEEE 754's special cases, from `|x|^y`.
    fn power(x, y, magnitude) [
        a = abs(x),
        integer = floor(y) == y,
        odd = integer && floor(y * of(0.5)) != y * of(0.5),
        with_sign = select(odd && !is_nan(x), copysign(magnitude, x), magnitude),
        real = select(x < of(0.0) && a != of(inf()) && !integer && !is_nan(y), of(nan()), with_sign),
        one = y == of(0.0) || x == of(1.0) || (a == of(1.0) && abs(y) == of(inf()))
    ] = select(one, of(1.0), real);
}
