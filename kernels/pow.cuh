// Powers, computed in f64: src/ops/pow.rs.
#pragma once
#include "pointwise.cuh"

// x^y, with IEEE 754's special cases.
DEVICE f64 power(f64 x, f64 y) {
  f64 a = abs_(x);
  f64 magnitude = exp_f64(y * ln_f64(a));
  bool integer = floor_(y) == y;
  bool odd = integer && floor_(y * 0.5) != y * 0.5;
  f64 with_sign = odd && !is_nan(x) ? copysign_(magnitude, x) : magnitude;
  f64 real = x < 0.0 && a != inf_f64() && !integer && !is_nan(y) ? nan_f64() : with_sign;
  bool one = y == 0.0 || x == 1.0 || (a == 1.0 && abs_(y) == inf_f64());
  return one ? 1.0 : real;
}
