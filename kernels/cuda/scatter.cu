// Writing by index, one thread per element of the source, and counting. Atomics on integers alone: the largest of
// several positions or keys does not depend on the order in which threads run.
#include "num.cuh"

// The index's extents, innermost first, and the strides of the result (0 along the dim), of the index, of the source and
// of the position along the dim.
struct ScatterPlaces {
  u64 out[6], index[6], src[6], position[6];
  u32 len[6];
  u32 dims, unused;
};

// The places of element e.
struct ScatterPlace {
  u64 out, index, src, position;
};
DEVICE ScatterPlace scatter_place(const ScatterPlaces& places, u64 e) {
  ScatterPlace at = {0, 0, 0, 0};
  u32 rest = (u32)e;
  UNROLL for (u32 d = 0; d < 6; ++d) {
    if (d >= places.dims) continue;
    u32 above = rest / places.len[d];
    u64 i = rest - above * places.len[d];
    rest = above;
    at.out += i * places.out[d], at.index += i * places.index[d];
    at.src += i * places.src[d], at.position += i * places.position[d];
  }
  return at;
}

// Calls `write(to, at, e)` for each element of the index, with its place in the result, if this rank stores that, and
// `miss(e)` otherwise.
template <class Write, class Miss>
DEVICE void each_write(const i64* index, const ScatterPlaces& places, u64 all, u64 stride, u64 held, u64 n, u64 start, u32 code,
                       Fault* faults, Write write, Miss miss) {
  for (u64 e = thread_index(); e < all; e += threads_len()) {
    ScatterPlace at = scatter_place(places, e);
    u64 chosen = (u64)index[at.index], place = chosen - start;
    if (chosen >= n) {
      report(faults, code, (i64)chosen);
      place = held;
    }
    if (place < held) {
      write(at.out + place * stride, at, e);
    } else {
      miss(e);
    }
  }
}

#define WRITES \
  ScatterPlaces places, u64 all, u64 stride, u64 held, u64 n, u64 start, u32 code, Fault *faults
#define PLACES places, all, stride, held, n, start, code, faults

// Each destination's last writer, as its position plus 1.
KERNEL(claim_i64, 256, (const i64* index, u32* owners, WRITES)) {
  each_write(
      index, PLACES, [&](u64 to, const ScatterPlace& at, u64) { atomicMax(&owners[to], (u32)at.position + 1); },
      [](u64) {});
}

KERNEL(last_bool, 256, (const i64* index, const u32* owners, bool* out, WRITES)) {
  each_write(
      index, PLACES, [&](u64 to, const ScatterPlace& at, u64 e) { out[e] = owners[to] == (u32)at.position + 1; },
      [&](u64 e) { out[e] = false; });
}

template <class T>
DEVICE void put(const i64* index, const u32* owners, const T* src, T* out, WRITES) {
  each_write(
      index, PLACES,
      [&](u64 to, const ScatterPlace& at, u64) {
        if (owners[to] == (u32)at.position + 1) out[to] = src[at.src];
      },
      [](u64) {});
}

// Keys of numbers: unsigned integers in the order of IEEE 754-2019's maximum and minimum, -0 below 0. NaN has the key
// that wins, which no number has.
template <class B>
DEVICE B number_key(B bits, B sign) {
  return bits & sign ? ~bits : bits | sign;
}
template <class B>
DEVICE B number_bits(B key, B sign) {
  return key & sign ? key ^ sign : ~key;
}
template <class T>
struct Extremum {
  typedef u32 Key;
  static DEVICE u32 key(T x, u32 largest) {
    f32 wide = widen(x);
    return is_nan(wide) ? (largest ? ~0u : 0u) : number_key(bits_of(wide), 0x80000000u);
  }
  static DEVICE T number(u32 key, u32 largest) {
    return narrow<T>(key == (largest ? ~0u : 0u) ? nan_f32() : f32_of(number_bits(key, 0x80000000u)));
  }
};
template <>
struct Extremum<f64> {
  typedef u64 Key;
  static DEVICE u64 key(f64 x, u32 largest) {
    return is_nan(x) ? (largest ? ~0ull : 0ull) : number_key(bits_of(x), (u64)0x8000000000000000ull);
  }
  static DEVICE f64 number(u64 key, u32 largest) {
    return key == (largest ? ~0ull : 0ull) ? nan_f64() : f64_of(number_bits(key, (u64)0x8000000000000000ull));
  }
};
template <>
struct Extremum<i64> {
  typedef u64 Key;
  static DEVICE u64 key(i64 x, u32) { return (u64)x ^ 0x8000000000000000ull; }
  static DEVICE i64 number(u64 key, u32) { return (i64)(key ^ 0x8000000000000000ull); }
};
template <>
struct Extremum<i32> {
  typedef u32 Key;
  static DEVICE u32 key(i32 x, u32) { return (u32)x ^ 0x80000000u; }
  static DEVICE i32 number(u32 key, u32) { return (i32)(key ^ 0x80000000u); }
};
template <>
struct Extremum<u8> {
  typedef u32 Key;
  static DEVICE u32 key(u8 x, u32) { return x; }
  static DEVICE u8 number(u32 key, u32) { return (u8)key; }
};

#define PUT(T)                                                                                      \
  KERNEL(put_##T, 256, (const i64* index, const u32* owners, const T* src, T* out, WRITES)) {       \
    put(index, owners, src, out, PLACES);                                                           \
  }
ALL_TYPES(PUT)

#define EXTREMUM(T)                                                                                 \
  KERNEL(encode_##T, 256, (const T* x, Extremum<T>::Key* keys, u64 n, u32 largest)) {               \
    for (u64 e = thread_index(); e < n; e += threads_len()) keys[e] = Extremum<T>::key(x[e], largest); \
  }                                                                                                 \
  KERNEL(decode_##T, 256, (const Extremum<T>::Key* keys, T* out, u64 n, u32 largest)) {             \
    for (u64 e = thread_index(); e < n; e += threads_len()) out[e] = Extremum<T>::number(keys[e], largest); \
  }                                                                                                 \
  KERNEL(largest_##T, 256, (const i64* index, const T* src, Extremum<T>::Key* keys, WRITES)) {      \
    each_write(                                                                                     \
        index, PLACES,                                                                              \
        [&](u64 to, const ScatterPlace& at, u64) { atomicMax(&keys[to], Extremum<T>::key(src[at.src], 1)); }, \
        [](u64) {});                                                                                \
  }                                                                                                 \
  KERNEL(smallest_##T, 256, (const i64* index, const T* src, Extremum<T>::Key* keys, WRITES)) {     \
    each_write(                                                                                     \
        index, PLACES,                                                                              \
        [&](u64 to, const ScatterPlace& at, u64) { atomicMin(&keys[to], Extremum<T>::key(src[at.src], 0)); }, \
        [](u64) {});                                                                                \
  }
NUMBERS(EXTREMUM)

// Sums of integers, which wrap: the same in any order.
#define ADD(T, Bits)                                                                                              \
  KERNEL(add_##T, 256, (const i64* index, const T* src, Bits* out, WRITES)) {                                     \
    each_write(                                                                                                   \
        index, PLACES, [&](u64 to, const ScatterPlace& at, u64) { atomicAdd(&out[to], (Bits)src[at.src]); },      \
        [](u64) {});                                                                                              \
  }
ADD(i32, u32)
ADD(i64, u64)

// One index per dim, joined to the row-major index of the flattened dims.
struct LinearDims {
  const i64* of[8];
};
struct LinearExtents {
  u64 n[8];
};
KERNEL(linear_i64, 256, (LinearDims index, i64* out, LinearExtents extents, u32 dims, u64 all, u32 code, Fault* faults)) {
  for (u64 e = thread_index(); e < all; e += threads_len()) {
    u64 joined = 0;
    UNROLL for (u32 d = 0; d < 8; ++d) {
      if (d >= dims) continue;
      u64 chosen = (u64)index.of[d][e];
      if (chosen >= extents.n[d]) {
        report(faults, code, (i64)chosen);
        chosen = 0;
      }
      joined = joined * extents.n[d] + chosen;
    }
    out[e] = (i64)joined;
  }
}

KERNEL(bincount_i64, 256, (const i64* x, u64* counts, u64 all, u64 bins, u64 start, u64 held, u32 code, Fault* faults)) {
  for (u64 e = thread_index(); e < all; e += threads_len()) {
    u64 chosen = (u64)x[e], place = chosen - start;
    if (chosen >= bins) {
      report(faults, code, (i64)chosen);
    } else if (place < held) {
      atomicAdd(&counts[place], (u64)1);
    }
  }
}
