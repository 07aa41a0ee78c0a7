// Elementary functions as fixed sequences of IEEE operations, with the bits of kernels/src/math, file by file. The
// Rust files document error bounds and the origin of the coefficients. Each function is a polynomial in fma, without
// a table.
//
// Every name ends in its type (exp_f32) and has an overload for templates (exp_).
#pragma once
#include "iso.cuh"

// ---- operations of IEEE 754
// ----------------------------------------------------------------------------------------

DEVICE f32 fma_(f32 a, f32 b, f32 c) { return fmaf(a, b, c); }
DEVICE f64 fma_(f64 a, f64 b, f64 c) { return fma(a, b, c); }
DEVICE f32 abs_(f32 x) { return f32_of(bits_of(x) & 0x7fffffffu); }
DEVICE f64 abs_(f64 x) { return f64_of(bits_of(x) & 0x7fffffffffffffffull); }
DEVICE f32 copysign_(f32 x, f32 sign) { return f32_of((bits_of(x) & 0x7fffffffu) | (bits_of(sign) & 0x80000000u)); }
DEVICE f64 copysign_(f64 x, f64 sign) {
  return f64_of((bits_of(x) & 0x7fffffffffffffffull) | (bits_of(sign) & 0x8000000000000000ull));
}
DEVICE f32 sqrt_(f32 x) { return sqrtf(x); }
DEVICE f64 sqrt_(f64 x) { return sqrt(x); }
DEVICE f32 floor_(f32 x) { return floorf(x); }
DEVICE f64 floor_(f64 x) { return floor(x); }
DEVICE f32 ceil_(f32 x) { return ceilf(x); }
DEVICE f64 ceil_(f64 x) { return ceil(x); }
DEVICE f32 trunc_(f32 x) { return truncf(x); }
DEVICE f64 trunc_(f64 x) { return trunc(x); }
// To the nearest integer, the even one of two.
DEVICE f32 round_(f32 x) { return rintf(x); }
DEVICE f64 round_(f64 x) { return rint(x); }
DEVICE f32 recip_(f32 x) { return 1.0f / x; }
DEVICE f64 recip_(f64 x) { return 1.0 / x; }

// The A nearest to a constant.
template <class A>
DEVICE A of(f64 x) {
  return (A)x;
}
// True for a NaN.
template <class A>
DEVICE bool is_nan(A x) {
  return x != x;
}
DEVICE f32 nan_f32() { return f32_of(0x7fc00000u); }
DEVICE f64 nan_f64() { return f64_of(0x7ff8000000000000ull); }
DEVICE f32 inf_f32() { return f32_of(0x7f800000u); }
DEVICE f64 inf_f64() { return f64_of(0x7ff0000000000000ull); }

// A polynomial by Horner's rule, highest coefficient first.
template <class A>
DEVICE A horner(A, A p) {
  return p;
}
template <class A, class... More>
DEVICE A horner(A x, A p, A next, More... more) {
  return horner(x, fma_(p, x, next), more...);
}

// ---- exp.rs --------------------------------------------------------------------------------------------------------

// n, and e^r - 1, of x = n ln 2 + r.
DEVICE i32 exp_split_f32(f32 x, f32& em1) {
  const f32 shift = 12582912.0f;
  f32 shifted = fmaf(x, 1.44269504088896340736f, shift);
  f32 n = shifted - shift;
  f32 r = fmaf(n, -0.693147180559945309417232121458f, x);
  r = fmaf(n, 1.9046543e-9f, r);
  f32 p = horner(r, 1.0f / 5040.0f, 1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f);
  em1 = fmaf(r * r, p, r);
  return (i32)(bits_of(shifted) - bits_of(shift));
}
DEVICE i64 exp_split_f64(f64 x, f64& em1) {
  const f64 shift = 6755399441055744.0;
  f64 shifted = fma(x, 1.44269504088896340735992468100, shift);
  f64 n = shifted - shift;
  f64 r = fma(n, -0.693147180559945309417232121458, x);
  r = fma(n, -2.3190468138462996e-17, r);
  f64 p = horner(r, 1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
                 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5);
  em1 = fma(r * r, p, r);
  return (i64)(bits_of(shifted) - bits_of(shift));
}
// 2^n for a normal result.
DEVICE f32 exp2_whole(i32 n) { return f32_of(((u32)n + 127u) << 23); }
DEVICE f64 exp2_whole(i64 n) { return f64_of(((u64)n + 1023ull) << 52); }

// e to the x: 0 if that underflows, infinity if it overflows.
DEVICE f32 exp_f32(f32 x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  f32 em1;
  i32 n = exp_split_f32(x, em1), half = n >> 1;
  return (1.0f + em1) * exp2_whole(half) * exp2_whole(n - half);
}
DEVICE f64 exp_f64(f64 x) {
  x = x > 710.0 ? 710.0 : x;
  x = x < -746.0 ? -746.0 : x;
  f64 em1;
  i64 n = exp_split_f64(x, em1), half = n >> 1;
  return (1.0 + em1) * exp2_whole(half) * exp2_whole((i64)((u64)n - (u64)half));
}
// As exp, for arguments whose result is a normal number.
DEVICE f32 exp_mid_f32(f32 x) {
  f32 em1;
  i32 n = exp_split_f32(x, em1);
  return (1.0f + em1) * exp2_whole(n);
}
DEVICE f64 exp_mid_f64(f64 x) {
  f64 em1;
  i64 n = exp_split_f64(x, em1);
  return (1.0 + em1) * exp2_whole(n);
}

// The hyperbolic tangent.
DEVICE f32 tanh_f32(f32 x) {
  f32 y = 2.0f * abs_(x), em1;
  y = y > 20.0f ? 20.0f : y;
  f32 scale = exp2_whole(exp_split_f32(y, em1));
  em1 = fmaf(scale, em1, scale - 1.0f);
  return copysign_(em1 / (em1 + 2.0f), x);
}
DEVICE f64 tanh_f64(f64 x) {
  f64 y = 2.0 * abs_(x), em1;
  y = y > 40.0 ? 40.0 : y;
  f64 scale = exp2_whole(exp_split_f64(y, em1));
  em1 = fma(scale, em1, scale - 1.0);
  return copysign_(em1 / (em1 + 2.0), x);
}

// The logistic function 1 / (1 + e^-x).
DEVICE f32 sigmoid_f32(f32 x) {
  f32 e = exp_f32(-abs_(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
DEVICE f64 sigmoid_f64(f64 x) {
  f64 e = exp_f64(-abs_(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

// ---- erf.rs --------------------------------------------------------------------------------------------------------

// The error function.
DEVICE f32 erf_f32(f32 x) {
  f32 a = abs_(x);
  f32 small = horner(a * a, -5.9669287e-4f, 4.988535e-3f, -2.6763487e-2f, 1.1281731e-1f, -3.7612486e-1f, 1.2837915e-1f);
  f32 b = a > 4.0f ? 4.0f : a;
  f32 log_erfc = horner(b, 1.957907e-4f, -3.0417948e-3f, 2.2221234e-2f, -1.0391967e-1f, -6.3719606e-1f, -1.1276673f,
                        -1.977367e-4f);
  small = fmaf(small, a, a);
  f32 big = 1.0f - exp_mid_f32(log_erfc);
  return copysign_(a < 0.92f ? small : big, x);
}
DEVICE f64 erf_f64(f64 x) {
  f64 a = abs_(x);
  f64 small = horner(a * a, -7.779438207878924e-10, 1.3710963588728289e-8, -1.620630972606518e-7,
                     1.644713102415044e-6, -1.4924712255869537e-5, 1.2055293574398284e-4, -8.548325929227224e-4,
                     5.223977606116573e-3, -2.6866170643111225e-2, 1.1283791670944183e-1, -3.761263890318352e-1,
                     1.2837916709551257e-1);
  f64 b = a > 6.0 ? 6.0 : a;
  f64 scaled_erfc =
      horner(b - 1.0, 1.1849081494686798e-12, -3.9627878636489114e-11, 6.238185383952767e-10, -6.190317692884444e-9,
             4.389139251246237e-8, -2.399593462976746e-7, 1.0711276303572949e-6, -4.0987245766418515e-6,
             1.4027518537980605e-5, -4.441752155086762e-5, 1.3309082772878966e-4, -3.8160463305611834e-4,
             0.0010501060516753748, -0.0027690078342245046, 0.006970127985671614, -0.01666186655940528,
             0.03757229592288177, -0.07922696892100438, 0.15437156137117428, -0.27321201478388824, 0.427583576155807);
  small = fma(small, a, a);
  f64 big = 1.0 - exp_mid_f64(-b * b) * scaled_erfc;
  return copysign_(a < 1.0 ? small : big, x);
}

// ---- normal.rs -----------------------------------------------------------------------------------------------------

// e^(-x^2/2), whose exponent is not rounded.
DEVICE f32 bell_f32(f32 x) {
  const f32 shift = 12582912.0f;
  f32 half = -0.5f * x, shifted = fmaf(half * x, 1.44269504088896340736f, shift), n = shifted - shift;
  f32 r = fmaf(half, x, -(n * 0.693359375f));
  r = fmaf(n, 2.1219444e-4f, r);
  f32 e = horner(r, 1.3863789e-3f, 8.367477e-3f, 4.1667238e-2f, 0.16666535f, 0.5f, 1.0f, 1.0f);
  e = f32_of(bits_of(e) + (bits_of(shifted) << 23));
  return abs_(x) > 13.0f ? 0.0f : e;
}
DEVICE f64 bell_f64(f64 x) {
  const f64 shift = 6755399441055744.0;
  f64 half = -0.5 * x, shifted = fma(half * x, 1.44269504088896340735992468100, shift), n = shifted - shift;
  f64 r = fma(half, x, -(n * 0.6931471803691238));
  r = fma(n, -1.9082149292705877e-10, r);
  f64 e = horner(r, 1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
                 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0);
  e = f64_of(bits_of(e) + (bits_of(shifted) << 52));
  return abs_(x) > 37.5 ? 0.0 : e;
}
// The normal distribution's tail at a >= 0, divided by bell a.
DEVICE f32 mills_f32(f32 a) {
  f32 above = horner(a, 4.0034344e-3f, 3.9870467e-2f, 0.18096788f, 0.435226f, 0.5f);
  f32 below = horner(a, 1.0034974e-2f, 9.9948e-2f, 0.463486f, 1.193072f, 1.6683369f, 1.0f);
  return above / below;
}
DEVICE f64 mills_f64(f64 a) {
  f64 above = horner(a, 2.234493587709515e-7, 6.9567111837213505e-6, 1.0632375917432761e-4, 1.0376693353738166e-3, 7.111191232013126e-3, 3.56199167950344e-2, 0.1319054202344295, 0.3570577363196861, 0.6792367174946996, 0.827686047928824, 0.5);
  f64 below = horner(a, 5.601044806433003e-7, 1.7437888951588453e-5, 2.670742454888159e-4, 2.618489184926318e-3, 1.8090506931304744e-2, 9.185206639371965e-2, 0.3479355343735865, 0.9792693268444177, 2.000203058536755, 2.8158890450256715, 2.4532566566605136, 1.0);
  return above / below;
}

// ---- log.rs --------------------------------------------------------------------------------------------------------

// x as 2^e (1 + f).
DEVICE f32 ln_split_f32(f32 x, f32& f) {
  const u32 sqrt_half = 0x3f3504f3u;
  u32 above = bits_of(x) - sqrt_half;
  f = f32_of((above & 0x007fffffu) + sqrt_half) - 1.0f;
  return (f32)((i32)above >> 23);
}
DEVICE f64 ln_split_f64(f64 x, f64& f) {
  const u64 sqrt_half = 0x3fe6a09e667f3bcdull;
  u64 above = bits_of(x) - sqrt_half;
  f = f64_of((above & 0x000fffffffffffffull) + sqrt_half) - 1.0;
  return (f64)(i32)((i64)above >> 52);
}
DEVICE f32 ln_polynomial_f32(f32 f) {
  return horner(f, 7.0376836e-2f, -1.151461e-1f, 1.1676999e-1f, -1.2420141e-1f, 1.4249323e-1f, -1.6668058e-1f,
                2.0000715e-1f, -2.4999994e-1f, 3.333333e-1f);
}
DEVICE f64 ln_polynomial_f64(f64 s, f64 half_square) {
  return horner(s * s, 1.4798198605116586e-1, 1.5313837699209373e-1, 1.818357216161805e-1, 2.2222198432149784e-1,
                2.857142874366239e-1, 3.999999999940942e-1, 6.666666666666735e-1, half_square);
}
// ln(2^e (1 + f)).
DEVICE f32 ln_join_f32(f32 e, f32 f) {
  f32 z = f * f;
  f32 tail = fmaf(e, -2.1219444e-4f, (f * z) * ln_polynomial_f32(f));
  return fmaf(e, 0.6933594f, fmaf(-0.5f, z, tail) + f);
}
DEVICE f64 ln_join_f64(f64 e, f64 f) {
  f64 s = f / (2.0 + f), half_square = 0.5 * f * f;
  f64 tail = fma(s, ln_polynomial_f64(s, half_square), e * 1.9082149292705877e-10);
  return fma(e, 6.931471803691238e-1, f - (half_square - tail));
}

// y for positive finite x, -inf for zeros, inf for inf, and the canonical NaN for all else.
DEVICE f32 with_limits_f32(f32 x, f32 y) {
  y = x == inf_f32() ? x : y;
  y = x > 0.0f ? y : nan_f32();
  return x == 0.0f ? -inf_f32() : y;
}
DEVICE f64 with_limits_f64(f64 x, f64 y) {
  y = x == inf_f64() ? x : y;
  y = x > 0.0 ? y : nan_f64();
  return x == 0.0 ? -inf_f64() : y;
}
// ln x, with these limits; subnormals are exact inputs.
DEVICE f32 ln_f32(f32 x) {
  bool tiny = x < f32_of(0x00800000u);
  f32 f, e = ln_split_f32(tiny ? x * 8388608.0f : x, f);
  return with_limits_f32(x, ln_join_f32(e + (tiny ? -23.0f : 0.0f), f));
}
DEVICE f64 ln_f64(f64 x) {
  bool tiny = x < f64_of(0x0010000000000000ull);
  f64 f, e = ln_split_f64(tiny ? x * 18014398509481984.0 : x, f);
  return with_limits_f64(x, ln_join_f64(e + (tiny ? -54.0 : 0.0), f));
}
// ln x without its special cases, for positive, normal and finite x.
DEVICE f32 ln_normal_f32(f32 x) {
  f32 f, e = ln_split_f32(x, f);
  return ln_join_f32(e + 0.0f, f);
}
DEVICE f64 ln_normal_f64(f64 x) {
  f64 f, e = ln_split_f64(x, f);
  return ln_join_f64(e + 0.0, f);
}
// ln x for a positive, normal x up to 1, given rest = 1 - x, which is more precise than x itself near 1.
DEVICE f32 ln_unit_f32(f32 x, f32 rest) {
  f32 f, e = ln_split_f32(x, f);
  return ln_join_f32(e, e == 0.0f ? -rest : f);
}
DEVICE f64 ln_unit_f64(f64 x, f64 rest) {
  f64 f, e = ln_split_f64(x, f);
  return ln_join_f64(e, e == 0.0 ? -rest : f);
}
// ln(1 + y) - y, given x = 1 + y as exactly as it is known; x must be positive, normal and finite.
DEVICE f32 ln_1p_rest_f32(f32 x, f32 y) {
  f32 f, e = ln_split_f32(x, f);
  f32 near = (y * y) * fmaf(y, ln_polynomial_f32(y), -0.5f);
  return e == 0.0f ? near : ln_join_f32(e, f) - y;
}
DEVICE f64 ln_1p_rest_f64(f64 x, f64 y) {
  f64 f, e = ln_split_f64(x, f);
  f64 s = y / (2.0 + y), half_square = 0.5 * y * y;
  f64 near = s * ln_polynomial_f64(s, half_square) - half_square;
  return e == 0.0 ? near : ln_join_f64(e, f) - y;
}

// ---- trig.rs -------------------------------------------------------------------------------------------------------

// sin and cos of 2 pi u, for |u| up to 2^19; exact at quarter turns.
DEVICE void sin_cos_2pi_f32(f32 u, f32& sin, f32& cos) {
  const f32 round = 12582912.0f;
  f32 shifted = fmaf(u, 4.0f, round);
  u32 q = bits_of(shifted);
  f32 r = fmaf(u, 4.0f, -(shifted - round)), z = r * r;
  f32 s = horner(z, 1.604412e-4f, -4.6817543e-3f, 7.969263e-2f, -6.459641e-1f, -4.371139e-8f);
  s = fmaf(r, 1.5707964f, r * s);
  f32 c = horner(z, -2.5202042e-5f, 9.1926026e-4f, -2.086348e-2f, 2.536695e-1f, -1.2337006f, 1.0f);
  sin = f32_of(bits_of((q & 1) == 0 ? s : c) ^ ((q & 2) << 30));
  cos = f32_of(bits_of((q & 1) == 0 ? c : s) ^ (((q + 1) & 2) << 30));
}
// The same, for |u| up to 2^48.
DEVICE void sin_cos_2pi_f64(f64 u, f64& sin, f64& cos) {
  const f64 round = 6755399441055744.0;
  f64 shifted = fma(u, 4.0, round);
  u64 q = bits_of(shifted);
  f64 r = fma(u, 4.0, -(shifted - round)), z = r * r;
  f64 s = horner(z, 6.0669357311061955e-12, -6.688035109811468e-10, 5.692172921967927e-8, -3.598843235212085e-6,
                 1.6044118478735983e-4, -4.681754135318688e-3, 7.969262624616705e-2, -6.459640975062463e-1,
                 6.123233995736766e-17);
  s = fma(r, 1.57079632679489661923132169164, r * s);
  f64 c = horner(z, 6.565963114979473e-11, -6.386603083791852e-9, 4.710874778818172e-7, -2.5202042373060607e-5,
                 9.192602748394266e-4, -2.086348076335296e-2, 2.5366950790104803e-1, -1.2337005501361697, 1.0);
  sin = f64_of(bits_of((q & 1) == 0 ? s : c) ^ ((q & 2) << 62));
  cos = f64_of(bits_of((q & 1) == 0 ? c : s) ^ (((q + 1) & 2) << 62));
}

// ---- the same by overload, for templates ---------------------------------------------------------------------------

DEVICE f32 exp_(f32 x) { return exp_f32(x); }
DEVICE f64 exp_(f64 x) { return exp_f64(x); }
DEVICE f32 tanh_(f32 x) { return tanh_f32(x); }
DEVICE f64 tanh_(f64 x) { return tanh_f64(x); }
DEVICE f32 sigmoid_(f32 x) { return sigmoid_f32(x); }
DEVICE f64 sigmoid_(f64 x) { return sigmoid_f64(x); }
DEVICE f32 erf_(f32 x) { return erf_f32(x); }
DEVICE f64 erf_(f64 x) { return erf_f64(x); }
DEVICE f32 bell_(f32 x) { return bell_f32(x); }
DEVICE f64 bell_(f64 x) { return bell_f64(x); }
DEVICE f32 mills_(f32 a) { return mills_f32(a); }
DEVICE f64 mills_(f64 a) { return mills_f64(a); }
DEVICE f32 ln_(f32 x) { return ln_f32(x); }
DEVICE f64 ln_(f64 x) { return ln_f64(x); }
DEVICE f32 ln_normal_(f32 x) { return ln_normal_f32(x); }
DEVICE f64 ln_normal_(f64 x) { return ln_normal_f64(x); }
DEVICE f32 ln_unit_(f32 x, f32 rest) { return ln_unit_f32(x, rest); }
DEVICE f64 ln_unit_(f64 x, f64 rest) { return ln_unit_f64(x, rest); }
DEVICE f32 ln_1p_rest_(f32 x, f32 y) { return ln_1p_rest_f32(x, y); }
DEVICE f64 ln_1p_rest_(f64 x, f64 y) { return ln_1p_rest_f64(x, y); }
DEVICE void sin_cos_2pi_(f32 u, f32& sin, f32& cos) { sin_cos_2pi_f32(u, sin, cos); }
DEVICE void sin_cos_2pi_(f64 u, f64& sin, f64& cos) { sin_cos_2pi_f64(u, sin, cos); }
