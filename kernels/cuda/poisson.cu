// Poisson numbers, with one rate for all elements or one per element. src/rng/distributions/poisson.rs documents the methods and
// the words that they read. Counts are f64 until they are written.
#include "draws.cuh"
#include "parameters.cuh"

// From this rate on, counts are found by rejection.
#define LARGE 10.0
// Smaller probabilities are below the resolution of 53 bits.
#define TINY (1.0 / 72057594037927936.0)

// ---- kernels/src/math/poisson.rs ------------------------------------------------------------------------------------

// The remainder of Stirling's formula at 1 to 15.
CONSTANT f64 STIRLING_RESTS[16] = {
    0.0,
    0.08106146679532726,
    0.04134069595540929,
    0.02767792568499834,
    0.020790672103765093,
    0.016644691189821193,
    0.013876128823070748,
    0.011896709945891770,
    0.010411265261972096,
    0.009255462182712733,
    0.00833056343336287,
    0.007573675487951841,
    0.00694284010720953,
    0.006408994188004207,
    0.005951370112758848,
    0.005554733551962801,
};

DEVICE f64 stirling_rest(f64 k) {
  f64 r = 1.0 / k;
  f64 p = horner(r * r, -1.0 / 1680.0, 1.0 / 1260.0, -1.0 / 360.0, 1.0 / 12.0);
  return k < 16.0 ? STIRLING_RESTS[(i32)k] : p * r;
}

// The logarithm of the probability that a Poisson variable of this mean is k.
DEVICE f64 ln_poisson(f64 k, f64 rate) {
  f64 safe = k > 0.0 ? k : 1.0;
  f64 spread = safe * ln_1p_rest_f64(rate / safe, (rate - safe) / safe);
  f64 root = fma(0.5, ln_normal_f64(safe), 0.9189385332046727);
  return k > 0.0 ? (spread - stirling_rest(safe)) - root : -rate;
}

// ---- counts --------------------------------------------------------------------------------------------------------

template <class T>
struct Count {
  static DEVICE T of(f64 count) { return narrow<T>((Wide<T>)count); }
};
template <>
struct Count<i64> {
  static DEVICE i64 of(f64 count) { return (i64)count; }
};
template <>
struct Count<i32> {
  static DEVICE i32 of(f64 count) { return count < 2147483647.0 ? (i32)count : 2147483647; }
};

// p_0, p_0 + p_1, ... as far as they matter, computed by the host.
struct Sums {
  f64 of[64];
  u64 len;
};

// Inversion: the number of sums that are at most u.
DEVICE f64 inverted(const Sums& sums, f64 u) {
  u32 count = 0;
  while (count < (u32)sums.len && sums.of[count] <= u) count++;
  return count;
}
DEVICE f64 inverted(f64 rate, f64 u) {
  f64 p = exp_f64(-rate), sum = p, count = 0.0;
  while (sum <= u && p > TINY) {
    count += 1.0;
    p *= rate * (1.0 / count);
    sum += p;
  }
  return count;
}

// Transformed rejection.
DEVICE f64 rejected(Draw draw, u64 e, f64 rate) {
  const f64 step = 1.0 / 9007199254740992.0, most = 2251799813685248.0;
  f64 b = fma(sqrt(rate), 2.53, 0.931), a = fma(b, 0.02483, -0.059);
  f64 inverse_alpha = 1.1239 + 1.1328 / (b - 3.4), out = 0.0;
  bool accepted = false;
  for (u32 k = 0; !accepted && k < 0xffff; k++) {
    Words words = philox(draw, e, k + 1);
    f64 u = fma((f64)(i64)(words.pair(0) >> 11), step, 0.5 * step - 0.5);
    f64 v = fma((f64)(i64)(words.pair(1) >> 11), step, 0.5 * step);
    f64 us = 0.5 - fabs(u);
    f64 count = floor(fma(2.0 * a / us + b, u, rate) + 0.43);
    f64 above = count > 0.0 ? count : 0.0;
    out = above < most ? above : most;
    f64 density = ln_normal_f64(v * inverse_alpha / (a / (us * us) + b));
    accepted = out == count && density <= ln_poisson(out, rate);
  }
  return out;
}

template <class T>
DEVICE void fill(T* out, Place place, Draw draw, const Sums& sums) {
  fill_groups<2>(out, place, [&](Group group, T(&x)[2]) {
    f64 u[2];
    uniforms(philox(draw, group.block), u);
    UNROLL
    for (int i = 0; i < 2; i++) x[i] = Count<T>::of(inverted(sums, u[i]));
  });
}

template <class T>
DEVICE void fill_large(T* out, Place place, Draw draw, f64 rate) {
  each_element(place, [=](u64 e, u64 at) { out[at] = Count<T>::of(rejected(draw, e, rate)); });
}

// The rates' dtype: 0 f32, 1 f64, 2 f16, 3 bf16.
DEVICE f64 rate_at(const void* rates, u32 type, u64 at) {
  switch (type) {
    case 0: return ((const f32*)rates)[at];
    case 1: return ((const f64*)rates)[at];
    case 2: return widen(((const f16*)rates)[at]);
    default: return widen(((const bf16*)rates)[at]);
  }
}

template <class T>
DEVICE void fill_each(const void* rates, u32 type, T* out, Place place, Draw draw, Fault* fault) {
  each_element(place, [=](u64 e, u64 at) {
    f64 rate = rate_at(rates, type, at), count = 0.0;
    if (!(rate >= 0.0 && rate <= 1125899906842624.0)) {
      report_parameter(fault, POISSON_RATE, e, rate);
    } else if (rate < LARGE) {
      count = inverted(rate, unit_f64(pair_of(draw, e)));
    } else {
      count = rejected(draw, e, rate);
    }
    out[at] = Count<T>::of(count);
  });
}

#define ENTRIES(T)                                                                                               \
  KERNEL(poisson_##T, 256, (T * out, Place place, Draw draw, Sums sums)) { fill(out, place, draw, sums); }        \
  KERNEL(poisson_large_##T, 256, (T * out, Place place, Draw draw, f64 rate)) { fill_large(out, place, draw, rate); } \
  KERNEL(poisson_each_##T, 256,                                                                                  \
         (const void* rates, u32 type, T* out, Place place, Draw draw, Fault* fault)) {                           \
    fill_each(rates, type, out, place, draw, fault);                                                             \
  }
FLOATS(ENTRIES)
ENTRIES(i64)
ENTRIES(i32)
