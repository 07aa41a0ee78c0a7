// What gelu and its derivative have in common: src/ops/gelu.rs.
#pragma once
#include "pointwise.cuh"

constexpr f64 FRAC_2_SQRT_PI = 1.12837916709551257389615890312, FRAC_1_SQRT_2 = 0.707106781186547524400844362105;
// 2 sqrt(2 / pi), and the cubic term's factor: the approximation is x sigmoid(V (x + C x^3)).
constexpr f64 GELU_V = 2.0 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2, GELU_C = 0.044715;
// 1 / sqrt(2 pi)
constexpr f64 GELU_DENSITY = 0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2;

// Bounds beyond which the distribution function is 0 or 1, and x to the third power finite; NaN stays.
template <class A>
DEVICE A bounded(A x) {
  return abs_(x) > A(1e4) ? copysign_(A(1e4), x) : x;
}

// The normal distribution function.
template <class A>
DEVICE A phi(A b) {
  return fma_(A(0.5), erf_(b * A(FRAC_1_SQRT_2)), A(0.5));
}
