// Arithmetic as in the CPU's loops (src/tensor/cpu/real.rs), for f32, f64, i64, i32, u8. Integers wrap. Maximum and
// minimum are those of IEEE 754-2019: -0 is less than 0, and a NaN gives the one quiet NaN of its type.
#pragma once
#include "math.cuh"

DEVICE f32 add_(f32 x, f32 y) { return x + y; }
DEVICE f64 add_(f64 x, f64 y) { return x + y; }
DEVICE i64 add_(i64 x, i64 y) { return (i64)((u64)x + (u64)y); }
DEVICE i32 add_(i32 x, i32 y) { return (i32)((u32)x + (u32)y); }
DEVICE u8 add_(u8 x, u8 y) { return (u8)(x + y); }

DEVICE f32 sub_(f32 x, f32 y) { return x - y; }
DEVICE f64 sub_(f64 x, f64 y) { return x - y; }
DEVICE i64 sub_(i64 x, i64 y) { return (i64)((u64)x - (u64)y); }
DEVICE i32 sub_(i32 x, i32 y) { return (i32)((u32)x - (u32)y); }
DEVICE u8 sub_(u8 x, u8 y) { return (u8)(x - y); }

DEVICE f32 mul_(f32 x, f32 y) { return x * y; }
DEVICE f64 mul_(f64 x, f64 y) { return x * y; }
DEVICE i64 mul_(i64 x, i64 y) { return (i64)((u64)x * (u64)y); }
DEVICE i32 mul_(i32 x, i32 y) { return (i32)((u32)x * (u32)y); }
DEVICE u8 mul_(u8 x, u8 y) { return (u8)(x * y); }

// The two branches differ only if the values are zeros of different sign, or one is a NaN.
DEVICE f32 max_(f32 x, f32 y) {
  u32 larger = bits_of(x > y ? x : y) & bits_of(y > x ? y : x);
  return is_nan(x) | is_nan(y) ? nan_f32() : f32_of(larger);
}
DEVICE f64 max_(f64 x, f64 y) {
  u64 larger = bits_of(x > y ? x : y) & bits_of(y > x ? y : x);
  return is_nan(x) | is_nan(y) ? nan_f64() : f64_of(larger);
}
DEVICE f32 min_(f32 x, f32 y) {
  u32 smaller = bits_of(x < y ? x : y) | bits_of(y < x ? y : x);
  return is_nan(x) | is_nan(y) ? nan_f32() : f32_of(smaller);
}
DEVICE f64 min_(f64 x, f64 y) {
  u64 smaller = bits_of(x < y ? x : y) | bits_of(y < x ? y : x);
  return is_nan(x) | is_nan(y) ? nan_f64() : f64_of(smaller);
}
DEVICE i64 max_(i64 x, i64 y) { return x > y ? x : y; }
DEVICE i32 max_(i32 x, i32 y) { return x > y ? x : y; }
DEVICE u8 max_(u8 x, u8 y) { return x > y ? x : y; }
DEVICE i64 min_(i64 x, i64 y) { return x < y ? x : y; }
DEVICE i32 min_(i32 x, i32 y) { return x < y ? x : y; }
DEVICE u8 min_(u8 x, u8 y) { return x < y ? x : y; }

// Num<A>: the identities of a sum (-0 or 0, which keeps the sign of zero), of a maximum and of a minimum.
template <class A>
struct Num;
template <>
struct Num<f32> {
  static DEVICE f32 sum_pad() { return -0.0f; }
  static DEVICE f32 lowest() { return -inf_f32(); }
  static DEVICE f32 highest() { return inf_f32(); }
};
template <>
struct Num<f64> {
  static DEVICE f64 sum_pad() { return -0.0; }
  static DEVICE f64 lowest() { return -inf_f64(); }
  static DEVICE f64 highest() { return inf_f64(); }
};
template <>
struct Num<i64> {
  static DEVICE i64 sum_pad() { return 0; }
  static DEVICE i64 lowest() { return (i64)0x8000000000000000ull; }
  static DEVICE i64 highest() { return 0x7fffffffffffffffll; }
};
template <>
struct Num<i32> {
  static DEVICE i32 sum_pad() { return 0; }
  static DEVICE i32 lowest() { return (i32)0x80000000u; }
  static DEVICE i32 highest() { return 0x7fffffff; }
};
template <>
struct Num<u8> {
  static DEVICE u8 sum_pad() { return 0; }
  static DEVICE u8 lowest() { return 0; }
  static DEVICE u8 highest() { return 255; }
};
