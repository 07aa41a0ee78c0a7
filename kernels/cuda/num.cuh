// Arithmetic as in the CPU's loops (kernels/src/num/real.rs), for f32, f64, i64, i32, u8. Integers wrap. Maximum and
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

// The magnitude; that of the lowest integer wraps to itself.
DEVICE i64 abs_(i64 x) { return x < 0 ? (i64)(0 - (u64)x) : x; }
DEVICE i32 abs_(i32 x) { return x < 0 ? (i32)(0 - (u32)x) : x; }
DEVICE u8 abs_(u8 x) { return x; }

// A constant in the type A: floats round, integers take the lowest bits of a whole number.
template <class A>
struct Constant {
  static DEVICE A of(f64 x) {
    return (A)(x >= 9223372036854775808.0 ? (i64)0x7fffffffffffffffll
               : x <= -9223372036854775808.0 ? (i64)0x8000000000000000ull : (i64)x);
  }
};
template <>
struct Constant<f32> {
  static DEVICE f32 of(f64 x) { return (f32)x; }
};
template <>
struct Constant<f64> {
  static DEVICE f64 of(f64 x) { return x; }
};

// The remainder of the division that truncates; an integer divided by 0 gives itself. The lowest integer divided by -1
// would overflow.
DEVICE f32 fmod_(f32 x, f32 y) { return fmodf(x, y); }
DEVICE f64 fmod_(f64 x, f64 y) { return fmod(x, y); }
template <class A>
DEVICE A fmod_(A x, A y) {
  return y == 0 ? x : y == (A)-1 && (A)-1 < 0 ? A(0) : (A)(x % y);
}
// The remainder of the division that rounds down: it has the sign of y.
DEVICE f32 remainder_(f32 x, f32 y) {
  f32 rest = fmod_(x, y);
  return rest == 0.0f ? copysign_(rest, y) : (rest < 0.0f) != (y < 0.0f) ? rest + y : rest;
}
DEVICE f64 remainder_(f64 x, f64 y) {
  f64 rest = fmod_(x, y);
  return rest == 0.0 ? copysign_(rest, y) : (rest < 0.0) != (y < 0.0) ? rest + y : rest;
}
// True for negative numbers; compilers warn about a comparison of unsigned ones with 0.
template <class A>
DEVICE bool is_negative(A x) { return x < A(1) && x != A(0); }
template <class A>
DEVICE A remainder_(A x, A y) {
  A rest = fmod_(x, y);
  return y != 0 && rest != 0 && is_negative(rest) != is_negative(y) ? add_(rest, y) : rest;
}
// The quotient rounded down; an integer divided by 0 gives 0.
template <class A>
DEVICE A float_floor_div(A x, A y) {
  A rest = fmod_(x, y), down = rest != A(0) && (rest < A(0)) != (y < A(0)) ? A(1) : A(0);
  A quotient = (x - rest) / y - down, floor = floor_(quotient);
  A whole = quotient - floor > A(0.5) ? floor + A(1) : floor;
  whole = quotient == A(0) ? copysign_(A(0), x / y) : whole;
  return y == A(0) ? x / y : whole;
}
DEVICE f32 floor_div_(f32 x, f32 y) { return float_floor_div(x, y); }
DEVICE f64 floor_div_(f64 x, f64 y) { return float_floor_div(x, y); }
template <class A>
DEVICE A floor_div_(A x, A y) {
  if (y == 0) return 0;
  if (y == (A)-1 && (A)-1 < 0) return sub_(A(0), x);
  A rest = x % y;
  return (A)(x / y - (rest != 0 && is_negative(rest) != is_negative(y) ? 1 : 0));
}

// Shifts. All bits leave if `by` is negative or at least the number of bits; the sign stays.
DEVICE i64 shift_left_(i64 x, i64 by) { return (u64)by < 64 ? (i64)((u64)x << by) : 0; }
DEVICE i32 shift_left_(i32 x, i32 by) { return (u32)by < 32 ? (i32)((u32)x << by) : 0; }
DEVICE u8 shift_left_(u8 x, u8 by) { return by < 8 ? (u8)(x << by) : 0; }
DEVICE i64 shift_right_(i64 x, i64 by) { return x >> ((u64)by < 64 ? by : 63); }
DEVICE i32 shift_right_(i32 x, i32 by) { return x >> ((u32)by < 32 ? by : 31); }
DEVICE u8 shift_right_(u8 x, u8 by) { return by < 8 ? (u8)(x >> by) : 0; }

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

// The identity of a sum of T, which a rank contributes for an element that another rank stores: -0 or 0.
template <class T>
DEVICE T sum_identity() {
  return narrow<T>(Num<Wide<T>>::sum_pad());
}
template <>
DEVICE bool sum_identity<bool>() {
  return false;
}
