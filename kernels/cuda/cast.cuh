// Conversions, as in kernels/src/loops/cast.rs: floats are rounded once, to nearest, ties to even; toward integers they
// are truncated and saturate, and NaN becomes 0; integers wrap; a bool is x != 0.
#pragma once
#include "pointwise.cuh"

// Converts a float to an integer between two bounds, the upper one being the first that is too large.
template <class O, class A>
DEVICE O truncate(A x, A low, A high, O lowest, O highest) {
  return is_nan(x) ? O(0) : x <= low ? lowest : x >= high ? highest : (O)x;
}

template <class O>
struct Cast;

#define CAST_TO_FLOAT(O)                       \
  template <>                                  \
  struct Cast<O> {                             \
    template <class A>                         \
    static DEVICE O at(f64, f64, A x) {        \
      return (O)x;                             \
    }                                          \
  };
CAST_TO_FLOAT(f32)
CAST_TO_FLOAT(f64)

struct CastToHalf {
  static DEVICE f32 at(f64, f64, f32 x) { return x; }
  static DEVICE f32 at(f64, f64, f64 x) { return odd_f32(x); }
  static DEVICE f32 at(f64, f64, i64 x) { return odd_f32((f64)x); }
  static DEVICE f32 at(f64, f64, i32 x) { return odd_f32((f64)x); }
  static DEVICE f32 at(f64, f64, u8 x) { return (f32)x; }
  static DEVICE f32 at(f64, f64, bool x) { return (f32)x; }
};
template <>
struct Cast<f16> : CastToHalf {};
template <>
struct Cast<bf16> : CastToHalf {};

#define CAST_TO_INTEGER(O, low, high)                                                                             \
  template <>                                                                                                     \
  struct Cast<O> {                                                                                                \
    static DEVICE O at(f64, f64, f32 x) { return truncate<O>(x, (f32)low, (f32)high, Num<O>::lowest(), Num<O>::highest()); } \
    static DEVICE O at(f64, f64, f64 x) { return truncate<O>(x, low, high, Num<O>::lowest(), Num<O>::highest()); } \
    template <class A>                                                                                            \
    static DEVICE O at(f64, f64, A x) {                                                                           \
      return (O)x;                                                                                                \
    }                                                                                                             \
  };
CAST_TO_INTEGER(i64, -9223372036854775808.0, 9223372036854775808.0)
CAST_TO_INTEGER(i32, -2147483648.0, 2147483648.0)
CAST_TO_INTEGER(u8, 0.0, 256.0)

template <>
struct Cast<bool> {
  template <class A>
  static DEVICE bool at(f64, f64, A x) {
    return x != A(0);
  }
};

// The casts from one dtype to all: cast_<from>_<to>.
#define CAST(from, to) POINTWISE_1(cast_##from, Cast<to>, to, to, from)
#define CASTS_FROM(from)                                                                                             \
  CAST(from, f32) CAST(from, f64) CAST(from, f16) CAST(from, bf16) CAST(from, i64) CAST(from, i32) CAST(from, u8)    \
  CAST(from, bool)
