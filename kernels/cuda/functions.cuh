// Functions in f32 and f64 as fixed sequences of IEEE operations, with the bits of kernels/src/math, file by file. Those files
// document the methods and the errors.
#pragma once
#include "math.cuh"

// ---- pair.rs -------------------------------------------------------------------------------------------------------

struct Pair {
  f64 high, low;
};
struct ReducedAngle {
  f64 r, rest;
  u64 q;
};
struct ReducedExponent {
  u64 n;
  f64 r, rest;
};
struct ScaledExp {
  u64 n;
  f64 high, low;
};
// A function of several hundred operations, which kernels call rather than inline.
#ifdef ISO_SHIM
#define CALLED [[maybe_unused]] static __attribute__((noinline))
#else
#define CALLED [[maybe_unused]] static __device__ __noinline__
#endif
constexpr f64 ROUND = 6755399441055744.0;
constexpr f64 HALF_PI_0 = 1.5707963267948966, HALF_PI_1 = 6.123233995736766e-17, HALF_PI_2 = -1.4973849048591698e-33;
constexpr f64 NEAR = 1073741824.0;
DEVICE f64 select_(bool condition, f64 yes, f64 no) { return condition ? yes : no; }
DEVICE u64 half_of(u64 n) { return (u64)((i64)n >> 1); }
DEVICE Pair split_f64(f64 x) {
  f64 f, e = ln_split_f64(x, f);
  return Pair{e, f};
}
DEVICE Pair two_sum(f64 a, f64 b) {
  auto sum = a + b;
  auto t = sum - a;
  return Pair{sum, (a - (sum - t)) + (b - t)};
}
DEVICE Pair fast_two_sum(f64 a, f64 b) {
  auto sum = a + b;
  return Pair{sum, b - (sum - a)};
}
DEVICE Pair two_product(f64 a, f64 b) {
  auto product = a * b;
  return Pair{product, fma_(a, b, -product)};
}
DEVICE f64 power_of_two(u64 k) { return f64_of((k + 1023) << 52); }

// ---- circular.rs ----------------------------------------------------------------------------------------------------

DEVICE f64 sin_poly(ReducedAngle angle) {
  auto r = angle.r;
  auto z = r * r;
  auto p = horner(z, -7.586633672657066e-13, 1.60585305421325e-10, -2.5052106225650122e-08, 2.755731921931959e-06,
      -0.0001984126984126504, 0.008333333333333331, -0.16666666666666666);
  return r + fma_(z * r, p, fma_(-0.5 * z, angle.rest, angle.rest));
}
DEVICE f64 cos_poly(ReducedAngle angle) {
  auto r = angle.r;
  auto z = r * r;
  auto p = horner(z, -1.1382539967177458e-11, 2.0876144984413913e-09, -2.755731726556589e-07, 2.48015872987538e-05,
      -0.0013888888888887389, 0.041666666666666664);
  auto half = 0.5 * z;
  auto w = 1.0 - half;
  return w + (((1.0 - w) - half) + fma_(z * z, p, -(r * angle.rest)));
}
DEVICE f64 sin_reduced(ReducedAngle angle) {
  auto y = select_((angle.q & 1) == 1, cos_poly(angle), sin_poly(angle));
  return f64_of(bits_of(y) ^ ((angle.q & 2) << 62));
}
DEVICE ReducedAngle reduce_near(f64 x) {
  auto shifted = fma_(x, 0.6366197723675814, ROUND);
  auto q = shifted - ROUND;
  auto t = fma_(-q, HALF_PI_0, x);
  auto [p, p_rest] = two_product(q, HALF_PI_1);
  auto [r, r_rest] = two_sum(t, -p);
  return ReducedAngle{r, fma_(-q, HALF_PI_2, r_rest - p_rest), bits_of(shifted)};
}
DEVICE f64 sin_near_f64(f64 x) {
  auto y = select_(x == 0.0, x, sin_reduced(reduce_near(x)));
  return select_(abs_(x) <= NEAR, y, nan_f64());
}
DEVICE f64 cos_reduced(ReducedAngle angle) {
  auto y = select_((angle.q & 1) == 1, sin_poly(angle), cos_poly(angle));
  return f64_of(bits_of(y) ^ (((angle.q + 1) & 2) << 62));
}
DEVICE f64 cos_near_f64(f64 x) {
  auto y = cos_reduced(reduce_near(x));
  return select_(abs_(x) <= NEAR, y, nan_f64());
}
DEVICE f64 tan_reduced(ReducedAngle angle) {
  auto s = sin_poly(angle);
  auto c = cos_poly(angle);
  bool odd = (angle.q & 1) == 1;
  return select_(odd, -c, s) / select_(odd, s, c);
}
DEVICE f64 tan_near_f64(f64 x) {
  auto y = select_(x == 0.0, x, tan_reduced(reduce_near(x)));
  return select_(abs_(x) <= NEAR, y, nan_f64());
}
// 2/pi in words of 32 bits, the first of weight 2^-32.
CONSTANT u32 TWO_OVER_PI[38] = {0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u, 0x3c439041u,
      0xfe5163abu, 0xdebbc561u, 0xb7246e3au, 0x424dd2e0u, 0x06492eeau, 0x09d1921cu, 0xfe1deb1cu, 0xb129a73eu,
      0xe88235f5u, 0x2ebb4484u, 0xe99c7026u, 0xb45f7e41u, 0x3991d639u, 0x835339f4u, 0x9c845f8bu, 0xbdf9283bu,
      0x1ff897ffu, 0xde05980fu, 0xef2f118bu, 0x5a0a6d1fu, 0x6d367ecfu, 0x27cb09b7u, 0x4f463f66u, 0x9e5fea2du,
      0x7527bac7u, 0xebe5f17bu, 0x3d0739f7u, 0x8a5292eau, 0x6bfb5fb1u, 0x1f8d5d08u, 0x56033046u, 0xfc7b6babu};
// 64 bits from bit `at` on.
DEVICE u64 bits_from(const u32* words, i32 at) {
  i32 word = at / 32, bit = at % 32;
  u64 low = ((u64)words[word] | (u64)words[word + 1] << 32) >> bit;
  return bit == 0 ? low : low | (u64)words[word + 2] << (64 - bit);
}
// Reduces an angle above 2^30 by the bits of 2/pi that matter.
DEVICE ReducedAngle reduce_far(f64 x) {
  u64 magnitude = bits_of(x) & 0x7fffffffffffffffull;
  if (magnitude >= 0x7ff0000000000000ull) return ReducedAngle{nan_f64(), 0.0, 0};
  i32 e = (i32)(magnitude >> 52) - 1075;
  u64 m = (magnitude & 0x000fffffffffffffull) | 0x0010000000000000ull;
  i32 first = e > 2 ? (e - 2) / 32 : 0;
  u32 product[11] = {};
  for (i32 part = 0; part < 2; part++) {
    u64 factor = (m >> (32 * part)) & 0xffffffffull, carry = 0;
    for (i32 i = 0; i < 7; i++) {
      u64 t = (u64)TWO_OVER_PI[first + 6 - i] * factor + (u64)product[i + part] + carry;
      product[i + part] = (u32)t;
      carry = t >> 32;
    }
    product[7 + part] = (u32)carry;
  }
  i32 point = 224 - (e - 32 * first);
  u64 turns = bits_from(product, point), high = bits_from(product, point - 64), low = bits_from(product, point - 128);
  u64 round = high >> 63, q = turns + round;
  if (round == 1) {
    high = ~high;
    low = ~low;
  }
  f64 f = (f64)high;
  f64 f_rest = (f64)(i64)(high - (u64)f) + (f64)low * 5.421010862427522e-20;
  f64 sign = round == 1 ? -5.421010862427522e-20 : 5.421010862427522e-20;
  if (x < 0.0) {
    sign = -sign;
    q = 0 - q;
  }
  auto [p, p_rest] = two_product(f, HALF_PI_0);
  auto [r, rest] = fast_two_sum(p, fma_(f, HALF_PI_1, fma_(f_rest, HALF_PI_0, p_rest)));
  return ReducedAngle{r * sign, rest * sign, q};
}
CALLED f64 sin_f64(f64 x) { return abs_(x) <= NEAR ? sin_near_f64(x) : sin_reduced(reduce_far(x)); }
CALLED f64 cos_f64(f64 x) { return abs_(x) <= NEAR ? cos_near_f64(x) : cos_reduced(reduce_far(x)); }
CALLED f64 tan_f64(f64 x) { return abs_(x) <= NEAR ? tan_near_f64(x) : tan_reduced(reduce_far(x)); }

struct ReducedAngleF32 {
  f32 r, rest;
  u32 q;
};
DEVICE f32 sin_poly_f32(ReducedAngleF32 angle) {
  f32 r = angle.r, z = r * r;
  f32 p = horner(z, -1.9515296e-4f, 8.332161e-3f, -1.6666655e-1f);
  return r + fma_(z * r, p, fma_(-0.5f * z, angle.rest, angle.rest));
}
DEVICE f32 cos_poly_f32(ReducedAngleF32 angle) {
  f32 r = angle.r, z = r * r;
  f32 p = horner(z, 2.4433157e-5f, -1.3887316e-3f, 4.1666646e-2f);
  f32 half = 0.5f * z, w = 1.0f - half;
  return w + (((1.0f - w) - half) + fma_(z * z, p, -(r * angle.rest)));
}
DEVICE ReducedAngleF32 reduce_near_f32(f32 x) {
  const f32 round = 12582912.0f;
  f32 shifted = fma_(x, 6.3661975e-1f, round), q = shifted - round;
  f32 t = fma_(-q, 1.5707964f, x);
  f32 p = q * -4.371139e-8f, p_rest = fma_(q, -4.371139e-8f, -p);
  f32 r = t - p, back = r - t;
  f32 r_rest = (t - (r - back)) - (p + back);
  return ReducedAngleF32{r, fma_(-q, -1.7151245e-15f, r_rest - p_rest), bits_of(shifted)};
}
DEVICE f32 sin_near_f32(f32 x) {
  auto angle = reduce_near_f32(x);
  f32 y = (angle.q & 1) == 1 ? cos_poly_f32(angle) : sin_poly_f32(angle);
  y = f32_of(bits_of(y) ^ ((angle.q & 2) << 30));
  return x == 0.0f ? x : y;
}
DEVICE f32 cos_near_f32(f32 x) {
  auto angle = reduce_near_f32(x);
  f32 y = (angle.q & 1) == 1 ? sin_poly_f32(angle) : cos_poly_f32(angle);
  return f32_of(bits_of(y) ^ (((angle.q + 1) & 2) << 30));
}
DEVICE f32 tan_near_f32(f32 x) {
  auto angle = reduce_near_f32(x);
  f32 s = sin_poly_f32(angle), c = cos_poly_f32(angle);
  bool odd = (angle.q & 1) == 1;
  f32 y = (odd ? -c : s) / (odd ? s : c);
  return x == 0.0f ? x : y;
}
constexpr f32 NEAR_F32 = 32768.0f;
DEVICE f32 sin_f32(f32 x) { return abs_(x) <= NEAR_F32 ? sin_near_f32(x) : (f32)sin_f64((f64)x); }
DEVICE f32 cos_f32(f32 x) { return abs_(x) <= NEAR_F32 ? cos_near_f32(x) : (f32)cos_f64((f64)x); }
DEVICE f32 tan_f32(f32 x) { return abs_(x) <= NEAR_F32 ? tan_near_f32(x) : (f32)tan_f64((f64)x); }

// ---- inverse_trig.rs ------------------------------------------------------------------------------------------------

DEVICE f64 asin_poly(f64 z) {
  return horner(z, 0.02961201126495512, -0.01924167174674304, 0.019554513336123378, 0.0030448799094556773,
      0.009319560794767446, 0.009621842970100282, 0.011566459612121669, 0.01396378001220357, 0.017352816540325496,
      0.02237215744350722, 0.03038194447553234, 0.044642857142551895, 0.07500000000000118, 0.16666666666666666);
}
CALLED f64 asin_f64(f64 x) {
  auto a = abs_(x);
  bool big = a > 0.5;
  auto z = select_(big, (1.0 - a) * 0.5, a * a);
  auto s = select_(big, sqrt_(z), a);
  auto p = s * (z * asin_poly(z));
  auto [h, l] = fast_two_sum(HALF_PI_0, -2.0 * s);
  auto y = select_(big, h + (l + fma_(-2.0, p, HALF_PI_1)), s + p);
  return copysign_(y, x);
}
CALLED f64 acos_f64(f64 x) {
  auto a = abs_(x);
  bool big = a > 0.5;
  auto z = select_(big, (1.0 - a) * 0.5, a * a);
  auto s = select_(big, sqrt_(z), a);
  auto p = s * (z * asin_poly(z));
  auto [h, l] = fast_two_sum(HALF_PI_0, -x);
  auto middle = h + (l + (HALF_PI_1 - copysign_(p, x)));
  auto [g, k] = fast_two_sum(2.0 * HALF_PI_0, -2.0 * s);
  auto left = g + (k + fma_(-2.0, p, 2.0 * HALF_PI_1));
  auto outer = select_(x < 0.0, left, 2.0 * (s + p));
  return select_(big, outer, middle);
}
DEVICE Pair atan_ratio(f64 n, f64 d) {
  bool low = n < 0.4375 * d;
  bool middle = n < 0.6875 * d;
  auto numerator = select_(low, n, select_(middle, fma_(2.0, n, -d), n - d));
  auto denominator = select_(low, d, select_(middle, fma_(2.0, d, n), n + d));
  auto base = select_(low, 0.0, select_(middle, 4.636476090008061e-1, 7.853981633974483e-1));
  auto base_rest = select_(low, 0.0, select_(middle, 2.2698777452961687e-17, 3.061616997868383e-17));
  auto t = numerator / denominator;
  auto z = t * t;
  auto p = t * (z * horner(z, 0.01476642155379467, -0.033121323310643644, 0.044919637149159995, -0.05216607416783708,
      0.0587693549653035, -0.06666240859375808, 0.0769228548876496, -0.09090908353049669, 0.11111111096587765,
      -0.1428571428556615, 0.19999999999999407, -0.3333333333333333));
  auto [h, l] = fast_two_sum(base, t);
  return Pair{h, l + (p + base_rest)};
}
CALLED f64 atan_f64(f64 x) {
  auto a = abs_(x);
  bool steep = a > 1.0;
  auto [h, l] = atan_ratio(select_(steep, 1.0, a), select_(steep, a, 1.0));
  auto [top, rest] = fast_two_sum(HALF_PI_0, -h);
  auto y = select_(steep, top + (rest + (HALF_PI_1 - l)), h + l);
  return copysign_(y, x);
}
CALLED f64 atan2_f64(f64 y, f64 x) {
  auto a = abs_(y);
  auto b = abs_(x);
  bool steep = a > b;
  auto low = select_(steep, b, a);
  auto high = select_(steep, a, b);
  bool same = a == b;
  // 1 for two infinities, 0 for two zeros. Large numbers are scaled, so that 2 high + low is finite, and small ones, so
  // that fractions of them are exact.
  auto scale = select_(high > 1e300, 0.0625, select_(high < 1e-290, 1.2676506002282294e30, 1.0));
  bool zero = high == 0.0;
  bool infinite = same && high == inf_f64();
  auto n = select_(infinite, 1.0, low * scale);
  auto d = select_(infinite || zero, 1.0, high * scale);
  auto [h, l] = atan_ratio(n, d);
  bool left = (bits_of(x) >> 63) == 1;
  auto turned = select_(left, 2.0, 0.0);
  auto quarters = select_(steep, 1.0, turned);
  auto sign = select_(steep != left, -1.0, 1.0);
  auto [top, rest] = fast_two_sum(quarters * HALF_PI_0, sign * h);
  auto angle = top + (rest + fma_(sign, l, quarters * HALF_PI_1));
  return copysign_(angle, y);
}

// ---- exponential.rs -------------------------------------------------------------------------------------------------

DEVICE f64 scaled(ScaledExp parts) {
  auto half = half_of(parts.n);
  return (parts.high + parts.low) * power_of_two(half) * power_of_two((parts.n - half));
}
CALLED f64 exp2_f64(f64 x) {
  auto above = select_(x > 1030.0, 1030.0, x);
  auto b = select_(above < -1080.0, -1080.0, above);
  auto shifted = b + ROUND;
  auto r = b - (shifted - ROUND);
  auto [h, l] = two_product(r, 0.6931471805599453);
  auto tail = fma_(r * r, horner(r, 2.572508057683636e-11, 4.4549605981865186e-10, 7.054899956372649e-09,
      1.0178062445845774e-07, 1.3215486802903931e-06, 1.525273382983612e-05, 0.00015403530393375914,
      0.0013333558146416936, 0.009618129107628479, 0.0555041086648216, 0.24022650695910072), fma_(r,
      2.3190468138462996e-17, l));
  auto [high, low] = fast_two_sum(1.0, h);
  return scaled(ScaledExp{(bits_of(shifted) - bits_of(ROUND)), high, low + tail});
}
DEVICE ReducedExponent reduce_exponent(f64 x) {
  auto shifted = fma_(x, 1.4426950408889634, ROUND);
  auto n = shifted - ROUND;
  // The high part of ln 2 has 32 bits, so that its product with n is exact.
  auto high = fma_(-n, 6.931471803691238e-1, x);
  auto low = n * 1.9082149292705877e-10;
  auto r = high - low;
  return ReducedExponent{(bits_of(shifted) - bits_of(ROUND)), r, (high - r) - low};
}
DEVICE f64 exp_poly(f64 r) {
  return horner( r, 1.6059043836821613e-10, 2.08767569878681e-9, 2.505210838544172e-8, 2.755731922398589e-7,
      2.7557319223985893e-6, 2.48015873015873e-5, 1.984126984126984e-4, 1.388888888888889e-3, 8.333333333333333e-3,
      4.1666666666666664e-2, 1.6666666666666666e-1, 0.5 );
}
DEVICE f32 exp2_f32(f32 x) {
  const f32 round = 12582912.0f;
  x = x > 129.0f ? 129.0f : x;
  x = x < -151.0f ? -151.0f : x;
  f32 shifted = x + round;
  f32 r = x - (shifted - round);
  f32 p = horner(r, 1.5252734e-5f, 1.5403531e-4f, 1.3333558e-3f, 9.618129e-3f, 5.550411e-2f, 2.4022651e-1f);
  f32 em1 = fma_(r, 6.931472e-1f, fma_(r, -1.9046543e-9f, r * r * p));
  i32 n = (i32)(bits_of(shifted) - bits_of(round)), half = n >> 1;
  return (1.0f + em1) * exp2_whole(half) * exp2_whole(n - half);
}
DEVICE f32 expm1_f32(f32 x) {
  f32 b = x > 89.0f ? 89.0f : x, em1;
  b = b < -20.0f ? -20.0f : b;
  f32 s = exp2_whole(exp_split_f32(b, em1) - 1);
  f32 y = 2.0f * fma_(s, em1, s - 0.5f);
  return abs_(x) < 2.9802322e-8f ? x : y;
}
CALLED f64 expm1_f64(f64 x) {
  auto above = select_(x > 710.0, 710.0, x);
  auto reduced = reduce_exponent(select_(above < -60.0, -60.0, above));
  auto r = reduced.r;
  // Half of the power of two, which stays finite.
  auto s = power_of_two((reduced.n - 1));
  auto [h, l] = fast_two_sum(s - 0.5, s * r);
  auto tail = fma_(r * r, exp_poly(r), fma_(reduced.rest, r, reduced.rest));
  auto y = 2.0 * (h + fma_(s, tail, l));
  return select_(abs_(x) < 5.551115123125783e-17, x, y);
}
DEVICE ScaledExp exp_parts(f64 x, f64 x_rest) {
  auto reduced = reduce_exponent(x);
  auto r = reduced.r;
  auto rest = reduced.rest + x_rest;
  auto [high, low] = fast_two_sum(1.0, r);
  auto q = r * r * exp_poly(r);
  return ScaledExp{reduced.n, high, low + (q + fma_(rest, r + q, rest))};
}

// ---- logarithm.rs ---------------------------------------------------------------------------------------------------

DEVICE Pair ln_1p_pair(f64 f) {
  auto s = f / (2.0 + f);
  auto [half_square, rest] = two_product(0.5 * f, f);
  auto [h, l] = fast_two_sum(f, -half_square);
  return Pair{h, l + fma_(s, ln_polynomial_f64(s, half_square), -rest)};
}
CALLED f64 log2_f64(f64 x) {
  bool tiny = x < 2.2250738585072014e-308;
  auto [e, f] = split_f64(select_(tiny, x * 18014398509481984.0, x));
  auto [h, l] = ln_1p_pair(f);
  auto [p, rest] = two_product(h, 1.4426950408889634);
  auto low = rest + fma_(l, 1.4426950408889634, h * 2.0355273740931033e-17);
  auto [sum, sum_rest] = two_sum(e + select_(tiny, -54.0, 0.0), p);
  return with_limits_f64(x, sum + (sum_rest + low));
}
CALLED f64 log10_f64(f64 x) {
  bool tiny = x < 2.2250738585072014e-308;
  auto [e, f] = split_f64(select_(tiny, x * 18014398509481984.0, x));
  auto n = e + select_(tiny, -54.0, 0.0);
  auto [h, l] = ln_1p_pair(f);
  auto [p, rest] = two_product(h, 0.4342944819032518);
  auto low = rest + fma_(l, 0.4342944819032518, h * 1.098319650216765e-17);
  auto [sum, sum_rest] = two_sum(n * 3.010299956636117713e-1, p);
  return with_limits_f64(x, sum + (sum_rest + fma_(n, 3.6942390771589308e-13, low)));
}
DEVICE f64 ln_join(f64 e, f64 f, f64 rest) {
  auto s = f / (2.0 + f);
  auto half_square = 0.5 * f * f;
  auto tail = fma_(s, ln_polynomial_f64(s, half_square), fma_(e, 1.9082149292705877e-10, rest));
  return fma_(e, 6.931471803691238e-1, f - (half_square - tail));
}
DEVICE f64 ln_1p_sum(f64 u, f64 rest) {
  auto [w, w_rest] = two_sum(1.0, u);
  auto [e, f] = split_f64(w);
  bool near = e == 0.0;
  return ln_join(e, select_(near, u, f), select_(near, rest, (w_rest + rest) / w));
}
CALLED f64 ln_1p_f64(f64 x) {
  auto finite = select_(x == inf_f64(), x, ln_1p_sum(x, 0.0));
  auto real = select_(x > -1.0, finite, nan_f64());
  auto y = select_(x == -1.0, -inf_f64(), real);
  return select_(x == 0.0, x, y);
}
// e, f and ln(1 + f) - f, with x = 2^e (1 + f).
DEVICE f32 split_log_f32(f32 x, f32& f, f32& tail) {
  bool tiny = x < f32_of(0x00800000u);
  f32 e = ln_split_f32(tiny ? x * 8388608.0f : x, f);
  f32 z = f * f;
  tail = fma_(-0.5f, z, f * z * ln_polynomial_f32(f));
  return e + (tiny ? -23.0f : 0.0f);
}
DEVICE f32 log2_f32(f32 x) {
  f32 f, tail, e = split_log_f32(x, f, tail);
  return with_limits_f32(x, e + fma_(f, 1.442695f, fma_(tail, 1.442695f, f * 1.925963e-8f)));
}
DEVICE f32 log10_f32(f32 x) {
  f32 f, tail, e = split_log_f32(x, f, tail);
  f32 small = fma_(tail, 4.342945e-1f, fma_(f, -1.010305e-8f, e * 4.605039e-6f));
  return with_limits_f32(x, fma_(e, 3.010254e-1f, fma_(f, 4.342945e-1f, small)));
}
DEVICE f32 ln_1p_f32(f32 x) {
  f32 w = 1.0f + x, above = w - 1.0f;
  f32 rest = (1.0f - (w - above)) + (x - above);
  f32 f, e = ln_split_f32(w, f);
  rest = e == 0.0f ? 0.0f : rest / w;
  f = e == 0.0f ? x : f;
  f32 z = f * f;
  f32 tail = fma_(e, -2.1219444e-4f, fma_(f * z, ln_polynomial_f32(f), rest));
  f32 y = fma_(e, 0.6933594f, fma_(-0.5f, z, tail) + f);
  y = x == inf_f32() ? x : y;
  y = x > -1.0f ? y : nan_f32();
  y = x == -1.0f ? -inf_f32() : y;
  return x == 0.0f ? x : y;
}
DEVICE f64 ln_sum(f64 w, f64 rest, f64 shift) {
  auto [e, f] = split_f64(w);
  return ln_join(e + shift, f, rest / w);
}
DEVICE Pair ln_pair(f64 x) {
  bool tiny = x < 2.2250738585072014e-308;
  auto [e, f] = split_f64(select_(tiny, x * 18014398509481984.0, x));
  auto n = e + select_(tiny, -54.0, 0.0);
  auto [h, l] = ln_1p_pair(f);
  auto [sum, rest] = two_sum(n * 6.931471803691238e-1, h);
  return Pair{sum, rest + fma_(n, 1.9082149292705877e-10, l)};
}

// ---- hyperbolic.rs --------------------------------------------------------------------------------------------------

DEVICE ScaledExp quarter_exp(f64 a) {
  auto parts = exp_parts(select_(a > 711.0, 711.0, a), 0.0);
  auto s = power_of_two((parts.n - 2));
  auto [high, low] = fast_two_sum(parts.high, parts.low);
  return ScaledExp{parts.n, high * s, low * s};
}
CALLED f64 sinh_f64(f64 x) {
  auto a = abs_(x);
  auto parts = quarter_exp(a);
  auto [h, l] = fast_two_sum(parts.high, -(0.0625 / parts.high));
  auto large = select_(a > 710.4758600739439, inf_f64(), 2.0 * (h + (l + parts.low)));
  auto z = a * a;
  auto small = fma_(a, z * horner(z, 7.746178593018827e-13, 1.6057679623801638e-10, 2.5052117695907823e-08,
      2.7557319191381816e-06, 0.00019841269841324198, 0.008333333333333299, 0.16666666666666666), a);
  return copysign_(select_(a < 1.0, small, large), x);
}
CALLED f64 cosh_f64(f64 x) {
  auto a = abs_(x);
  auto parts = quarter_exp(a);
  auto [h, l] = fast_two_sum(parts.high, 0.0625 / parts.high);
  return select_(a > 710.4758600739439, inf_f64(), 2.0 * (h + (l + parts.low)));
}
CALLED f64 asinh_f64(f64 x) {
  auto a = abs_(x);
  bool huge = a > 268435456.0;
  auto b = select_(huge, 1.0, a);
  auto [p, p_rest] = two_product(b, b);
  auto [s, s_rest] = two_sum(1.0, p);
  auto root = sqrt_(s);
  auto root_rest = (fma_(-root, root, s) + (s_rest + p_rest)) * (0.5 / root);
  auto [w, w_rest] = two_sum(root, b);
  auto log = ln_sum(select_(huge, a, w), select_(huge, 0.0, w_rest + root_rest), select_(huge, 1.0, 0.0));
  auto large = select_(a == inf_f64(), a, log);
  auto z = b * b;
  auto small = fma_(a, z * horner(z, 0.0018854117655039003, -0.004992717198142511, 0.007622309427481728,
      -0.009591452221673173, 0.011526210169675569, -0.013962235682232349, 0.01735258771519257, -0.022372151449922602,
      0.030381944248546365, -0.044642857140252436, 0.0749999999999864, -0.16666666666666666), a);
  return copysign_(select_(a < 0.5, small, large), x);
}
CALLED f64 acosh_f64(f64 x) {
  bool huge = x > 268435456.0;
  auto t = select_(huge, 1.0, x - 1.0);
  auto [p, p_rest] = two_product(t, t);
  auto [s, s_rest] = two_sum(2.0 * t, p);
  auto root = sqrt_(s);
  auto correction = (fma_(-root, root, s) + (s_rest + p_rest)) * (0.5 / root);
  auto [u, u_rest] = two_sum(root, t);
  auto near = ln_1p_sum(u, select_(t > 0.0, u_rest + correction, 0.0));
  auto far = ln_sum(select_(huge, x, 2.0), 0.0, 1.0);
  auto y = select_(huge, far, near);
  auto real = select_(x == inf_f64(), x, y);
  return select_(x >= 1.0, real, nan_f64());
}
DEVICE f32 atanh_f32(f32 x) {
  f32 a = abs_(x);
  return copysign_(0.5f * ln_1p_f32((a + a) / (1.0f - a)), x);
}
CALLED f64 atanh_f64(f64 x) {
  auto a = abs_(x);
  auto q = 2.0 * a / (1.0 - a);
  auto large = 0.5 * ln_1p_sum(q, 0.0);
  auto limited = select_(a == 1.0, inf_f64(), large);
  auto z = a * a;
  auto small = fma_(a, z * horner(z, 0.21098097885975797, -0.14450491183414468, 0.13557903913692299,
      0.012292448728540531, 0.05441915418234587, 0.05160769881147162, 0.05893099692590042, 0.06665886352701884,
      0.07692345940270638, 0.09090907881509189, 0.11111111133938968, 0.14285714285490106, 0.20000000000000864,
      0.3333333333333333), a);
  auto y = select_(a < 0.5, small, limited);
  return copysign_(select_(a <= 1.0, y, nan_f64()), x);
}
