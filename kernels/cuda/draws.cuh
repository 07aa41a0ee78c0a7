// Random numbers from random words, with the bits of src/rng/{sample,continuous}.rs, which document the definitions.
#pragma once
#include "math.cuh"
#include "random.cuh"

// The number of values of type A (f32 or f64) per Philox block: an f32 reads one word, an f64 a pair.
template <class A>
struct Draws;
template <>
struct Draws<f32> {
  static const int PER = 4;
};
template <>
struct Draws<f64> {
  static const int PER = 2;
};
template <class T>
constexpr int PER_BLOCK = Draws<Wide<T>>::PER;

// ---- one number, or the two of a pair
// ------------------------------------------------------------------------------

// sqrt(-2 ln u) times the cosine and sine of 2 pi v, for the uniform numbers u of a and v of b.
DEVICE void box_muller(u32 a, u32 b, f32& x, f32& y) {
  const f32 step = 1.0f / 4294967296.0f;
  f32 radius = sqrtf(-2.0f * ln_normal_f32(fmaf((f32)a, step, 0.5f * step))), sin, cos;
  sin_cos_2pi_f32(unit_f32(b), sin, cos);
  x = radius * cos;
  y = radius * sin;
}
DEVICE void box_muller(u64 a, u64 b, f64& x, f64& y) {
  const f64 half_step = 0.5 / 9007199254740992.0;
  f64 u = fma((f64)(i64)(a >> 11), 2.0 * half_step, half_step);
  f64 radius = sqrt(-2.0 * ln_normal_f64(u)), sin, cos;
  sin_cos_2pi_f64(unit_f64(b), sin, cos);
  x = radius * cos;
  y = radius * sin;
}

// An exponential number of rate 1.
DEVICE f32 unit_exponential(u32 a) {
  const f32 step = 1.0f / 4294967296.0f;
  return -ln_unit_f32(fmaf((f32)a, step, 0.5f * step), fmaf((f32)~a, step, 0.5f * step));
}
DEVICE f64 unit_exponential(u64 a) {
  const f64 step = 1.0 / 9007199254740992.0;
  f64 rest = fma((f64)(i64)(~a >> 11), step, 0.5 * step);
  return -ln_unit_f64(fma((f64)(i64)(a >> 11), step, 0.5 * step), rest);
}

// ---- the numbers of a block ----------------------------------------------------------------------------------------

DEVICE void uniforms(Words words, f32 (&out)[4]) {
  UNROLL
  for (int i = 0; i < 4; i++) out[i] = unit_f32(words.word[i]);
}
DEVICE void uniforms(Words words, f64 (&out)[2]) {
  UNROLL
  for (int i = 0; i < 2; i++) out[i] = unit_f64(words.pair(i));
}

DEVICE void normals(Words words, f32 (&out)[4]) {
  UNROLL
  for (int i = 0; i < 4; i += 2) box_muller(words.word[i], words.word[i + 1], out[i], out[i + 1]);
}
DEVICE void normals(Words words, f64 (&out)[2]) { box_muller(words.pair(0), words.pair(1), out[0], out[1]); }

DEVICE void exponentials(Words words, f32 (&out)[4]) {
  UNROLL
  for (int i = 0; i < 4; i++) out[i] = unit_exponential(words.word[i]);
}
DEVICE void exponentials(Words words, f64 (&out)[2]) {
  UNROLL
  for (int i = 0; i < 2; i++) out[i] = unit_exponential(words.pair(i));
}
