// Tests of floating-point numbers: NaN, infinite, finite.
#include "pointwise.cuh"

#define TO_BOOL(name, T) POINTWISE_1(name, name##_formula, T, bool, T)
#define FLOAT_TEST(name, ...)                 \
  struct name##_formula {                     \
    template <class A>                        \
    static DEVICE bool at(f64, f64, A x) {    \
      return __VA_ARGS__;                     \
    }                                         \
  };                                          \
  EACH_FLOAT(TO_BOOL, name)

FLOAT_TEST(float_test_nan, x != x)
FLOAT_TEST(float_test_infinite, abs_(x) == A(inf_f64()))
FLOAT_TEST(float_test_finite, abs_(x) < A(inf_f64()))
