// A random order of a dim's indices, and the keyed bijection that gives it (src/rng/permutation.rs).
#include "random.cuh"

// The permutation of 0..len.
struct Order {
  u64 len;
  u64 keys[64];
};

DEVICE u64 order_at(const Order& order, Draw draw, u64 x) {
#pragma unroll 1
  for (u32 round = 0; round < 64; round++) {
    u64 key = order.keys[round];
    u64 reflected = key - x + (x > key ? order.len : 0);
    u64 upper = x > reflected ? x : reflected;
    x = philox(draw, upper, round + 1).word[0] & 1 ? reflected : x;
  }
  return x;
}

KERNEL(permutation_i64, 256, (i64 * out, Place place, Draw draw, Order order)) {
  each_element(place, [&](u64 e, u64 at) { out[at] = (i64)order_at(order, draw, e); });
}

// y[.., i, ..] = x[.., order[i], ..] for shape [outer, len, width], or the inverse, y[.., order[i], ..] = x[.., i,
// ..].
template <class T>
DEVICE void shuffle(const T* x, const i64* order, T* out, u64 outer, u64 len, u64 width, u32 inverse) {
  u64 total = outer * len * width;
  for (u64 i = thread_index(); i < total; i += threads_len()) {
    Split row = split(i, width), place = split(row.whole, len);
    u64 other = (place.whole * len + (u64)order[place.rest]) * width + row.rest;
    if (inverse) {
      out[other] = x[i];
    } else {
      out[i] = x[other];
    }
  }
}

// Elements are moved unchanged, so a type stands for all types of its size.
struct alignas(16) Sixteen {
  u64 of[2];
};
#define ENTRIES(T, name)                                                                                            \
  KERNEL(name, 256, (const T* x, const i64* order, T* out, u64 outer, u64 len, u64 width, u32 inverse)) {            \
    shuffle(x, order, out, outer, len, width, inverse);                                                             \
  }
ENTRIES(u8, shuffle_u8)
ENTRIES(bf16, shuffle_bf16)
ENTRIES(i32, shuffle_i32)
ENTRIES(i64, shuffle_i64)
ENTRIES(Sixteen, shuffle_sixteen_u8)
