// 2^-e for 2^e <= |x| < 2^(e + 1), and 1 for 0, infinities and NaN.
#include "pointwise.cuh"

struct inverse_power_of_two_formula {
  template <class A>
  static DEVICE A at(f64, f64, A of) {
    f64 x = (f64)of;
    u64 exponent = bits_of(x) >> 52 & 0x7ff;
    if (exponent == 0x7ff || x == 0.0) return A(1);
    if (exponent == 0) return A(f64_of(0x7feull << 52));
    // The largest power of two in f32 is 2^127.
    if (sizeof(A) == 4 && 0x7fe - exponent > 0x47e) return A(f64_of(0x47eull << 52));
    // 2^-1023 is subnormal.
    return A(exponent == 0x7fe ? f64_of(1ull << 51) : f64_of((0x7fe - exponent) << 52));
  }
};
ALIKE_1(inverse_power_of_two, f32)
ALIKE_1(inverse_power_of_two, f64)
