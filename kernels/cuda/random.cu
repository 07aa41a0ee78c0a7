// Random fills with one set of parameters for all elements, in any region of the global tensor. Exponential, gamma
// and Poisson numbers have files of their own.
#include "draws.cuh"

// fma(x, scale, shift) of uniform numbers x.
template <class T>
DEVICE void fill_uniform(T* out, Place place, Draw draw, Wide<T> scale, Wide<T> shift) {
  const int PER = PER_BLOCK<T>;
  fill_rounded<PER>(out, place, [=](Group group, Wide<T>(&x)[PER]) {
    uniforms(philox(draw, group.block), x);
    UNROLL
    for (int i = 0; i < PER; i++) x[i] = fma_(x[i], scale, shift);
  });
}

// fma(z, scale, shift) of normal numbers z, or e to that power if `of_log`.
template <bool OF_LOG, class T>
DEVICE void fill_normal(T* out, Place place, Draw draw, Wide<T> scale, Wide<T> shift) {
  const int PER = PER_BLOCK<T>;
  fill_rounded<PER>(out, place, [=](Group group, Wide<T>(&x)[PER]) {
    normals(philox(draw, group.block), x);
    UNROLL
    for (int i = 0; i < PER; i++) {
      x[i] = fma_(x[i], scale, shift);
      if (OF_LOG) x[i] = exp_(x[i]);
    }
  });
}

// The first attempt whose z std + mean is within [low, high], in f64.
template <class T>
DEVICE void fill_truncated(T* out, Place place, Draw draw, f64 mean, f64 std, f64 low, f64 high) {
  const int PER = PER_BLOCK<T>;
  fill_rounded<PER>(out, place, [=](Group group, Wide<T>(&x)[PER]) {
    Wide<T> z[PER];
    u32 left = 0;
    UNROLL
    for (int i = 0; i < PER; i++) {
      left |= group.has(i) ? 1u << i : 0u;
      x[i] = 0;
    }
    // The remaining lanes try together: each element has attempts of its own.
    for (u32 attempt = 0; left != 0; attempt++) {
      normals(philox(draw, group.block, attempt), z);
      UNROLL
      for (int i = 0; i < PER; i++) {
        f64 y = (f64)z[i] * std + mean;
        bool waits = left >> i & 1;
        x[i] = waits ? (Wide<T>)y : x[i];
        left &= ((low <= y) & (y <= high)) | (attempt == 0xffff) ? ~(1u << i) : ~0u;
      }
    }
  });
}

// Normal numbers of a tail or of a narrow interval (src/rng/distributions/truncated_tail.rs).
struct Tail {
  f64 mean, std, low, high, from, to, rate, peak;
};

template <class T>
DEVICE void fill_tail(T* out, const Place& place, Draw draw, const Tail& tail) {
  each_element(place, [&](u64 e, u64 at) {
    f64 x = 0;
    for (u32 attempt = 0; attempt < 0xffff; attempt++) {
      Words words = philox(draw, e, attempt);
      f64 u = unit_f64(words.pair(0)) + 0.5 / 9007199254740992.0;
      bool exponential = tail.rate > 0.0;
      f64 step = exponential ? -ln_(u) / tail.rate : u * (tail.to - tail.from);
      f64 z = tail.from + step;
      f64 power = exponential ? z - tail.rate : z, peak = exponential ? 0.0 : tail.peak;
      f64 density = exp_((peak * peak - power * power) * 0.5);
      x = z * tail.std + tail.mean;
      x = x < tail.low ? tail.low : x;
      x = x > tail.high ? tail.high : x;
      if (unit_f64(words.pair(1)) < density && z <= tail.to) break;
    }
    out[at] = narrow<T>((Wide<T>)x);
  });
}

// True, or 1, if the word is below the threshold, which may be 2^32.
template <class T>
DEVICE void fill_bernoulli(T* out, Place place, Draw draw, u64 threshold, T no, T yes) {
  fill_groups<4>(out, place, [=](Group group, T(&x)[4]) {
    Words words = philox(draw, group.block);
    UNROLL
    for (int i = 0; i < 4; i++) x[i] = words.word[i] < threshold ? yes : no;
  });
}

// `low` and the count of numbers minus one. A word below the threshold is rejected: the next attempt's word is read.
struct Range {
  u64 low;
  u64 last;
  u64 threshold;
};

// The index of a word, and its position among the words of the thread.
DEVICE u64 placed(Range range, u32 word, u64& share) {
  u64 product = (u64)word * (u32)range.last + word;
  share = (u32)product;
  return range.low + (product >> 32);
}
DEVICE u64 placed(Range range, u64 pair, u64& share) {
  u64 product = pair * range.last;
  share = product + pair;
  return range.low + __umul64hi(pair, range.last) + (share < product);
}

DEVICE u32 draw_at(Words words, int i, u32) { return words.word[i]; }
DEVICE u64 draw_at(Words words, int i, u64) { return words.pair(i); }

// Reads words (U = u32) if there are at most 2^32 numbers, else pairs of words (U = u64).
template <class U, class T>
DEVICE void fill_integers(T* out, Place place, Draw draw, Range range) {
  const int PER = 16 / sizeof(U);
  fill_groups<PER>(out, place, [=](Group group, T(&x)[PER]) {
    u32 left = 0;
    UNROLL
    for (int i = 0; i < PER; i++) left |= group.has(i) ? 1u << i : 0u;
    for (u32 attempt = 0; left != 0; attempt++) {
      Words words = philox(draw, group.block, attempt);
      UNROLL
      for (int i = 0; i < PER; i++) {
        u64 share, number = placed(range, draw_at(words, i, (U)0), share);
        x[i] = left >> i & 1 ? (T)number : x[i];
        left &= (share >= range.threshold) | (attempt == 0xffff) ? ~(1u << i) : ~0u;
      }
    }
  });
}

// Random bits: i64 takes a pair of words, i32 a word, u8 the upper 8 bits of a word.
DEVICE void fill_bits(i64* out, Place place, Draw draw) {
  fill_groups<2>(out, place, [=](Group group, i64(&x)[2]) {
    Words words = philox(draw, group.block);
    x[0] = (i64)words.pair(0);
    x[1] = (i64)words.pair(1);
  });
}
template <class T>
DEVICE void fill_bits(T* out, Place place, Draw draw) {
  fill_groups<4>(out, place, [=](Group group, T(&x)[4]) {
    Words words = philox(draw, group.block);
    UNROLL
    for (int i = 0; i < 4; i++) x[i] = (T)(words.word[i] >> (32 - 8 * sizeof(T)));
  });
}

#define ENTRIES(T)                                                                                      \
  KERNEL(uniform_##T, 256, (T * out, Place place, Draw draw, Wide<T> scale, Wide<T> shift)) {            \
    fill_uniform(out, place, draw, scale, shift);                                                       \
  }                                                                                                     \
  KERNEL(normal_##T, 256, (T * out, Place place, Draw draw, Wide<T> scale, Wide<T> shift)) {             \
    fill_normal<false>(out, place, draw, scale, shift);                                                 \
  }                                                                                                     \
  KERNEL(log_normal_##T, 256, (T * out, Place place, Draw draw, Wide<T> scale, Wide<T> shift)) {         \
    fill_normal<true>(out, place, draw, scale, shift);                                                  \
  }                                                                                                     \
  KERNEL(truncated_##T, 256, (T * out, Place place, Draw draw, f64 mean, f64 std, f64 low, f64 high)) {  \
    fill_truncated(out, place, draw, mean, std, low, high);                                             \
  }                                                                                                     \
  KERNEL(truncated_tail_##T, 256, (T * out, Place place, Draw draw, Tail tail)) { fill_tail(out, place, draw, tail); }
FLOATS(ENTRIES)
#undef ENTRIES

#define ENTRIES(T)                                                                          \
  KERNEL(bernoulli_##T, 256, (T * out, Place place, Draw draw, u64 threshold, T no, T yes)) { \
    fill_bernoulli(out, place, draw, threshold, no, yes);                                   \
  }
ALL_TYPES(ENTRIES)
#undef ENTRIES

#define ENTRIES(T)                                                                                                      \
  KERNEL(bits_##T, 256, (T * out, Place place, Draw draw)) { fill_bits(out, place, draw); }                             \
  KERNEL(integers_##T, 256, (T * out, Place place, Draw draw, Range range)) { fill_integers<u32>(out, place, draw, range); }  \
  KERNEL(wide_integers_##T, 256, (T * out, Place place, Draw draw, Range range)) { fill_integers<u64>(out, place, draw, range); }
ENTRIES(i64)
ENTRIES(i32)
ENTRIES(u8)
#undef ENTRIES
