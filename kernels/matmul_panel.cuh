// Panels of a product's operands: from memory, in any strides, into shared memory, widened, in the order tiles read them.
#pragma once
#include "iso.cuh"

// Threads of a block, in every tile.
constexpr u32 THREADS = 128;
// Indices of the contraction that a tile handles without asking whether there are more.
constexpr u32 GROUP = 4;

// N values that are read and written in one go, 16 bytes at most.
template <class T, u32 N>
struct alignas(N * sizeof(T) > 16 ? 16 : N * sizeof(T)) Vec {
  T x[N];
};

// How an operand's elements are taken. The first two are quick: four that lie side by side, aligned, all inside or all outside.
enum Way : u32 { ALONG4 = 0, OUTER4 = 1, ALONG = 2, OUTER = 3 };

// How an operand lies in memory; steps are in elements. Its outer dim is the left operand's rows, the right one's columns.
struct Side {
  i64 outer;
  // Along the contraction.
  i64 along;
  // From one product of the batch to the next; 0 where all use the same.
  i64 batch;
  Way way;
  u32 extent;  // of the outer dim
};

// R of the outer dim's indices by at most DEPTH of the contraction's, as a block's threads carry them. In shared memory
// the outer dim is the inner one.
template <class T, u32 R, u32 DEPTH>
struct Panel {
  typedef Wide<T> W;
  static constexpr i32 ITEMS = (R * DEPTH + THREADS - 1) / THREADS, QUADS = ITEMS / 4;
  // From index to index of the contraction, with some room against bank conflicts.
  static constexpr u32 PITCH = R + 16 / sizeof(W);

  const T* from;  // this thread's first element
  i64 step, along;
  Way way;
  u32 k, outer, k_step, outer_step;  // its first element's place, and from item to item
  u32 left;                          // indices of the outer dim that are inside
  T items[ITEMS];

  // At the outer dim's index `first` and the contraction's index `start`.
  DEVICE void begin(const T* data, const Side& side, u32 first, i64 start) {
    u32 t = threadIdx.x;
    way = side.way;
    along = side.along;
    left = side.extent - first;
    k_step = outer_step = 0;
    if (way == ALONG4) {
      k = t % (DEPTH / 4) * 4, outer = t / (DEPTH / 4), outer_step = THREADS / (DEPTH / 4);
    } else if (way == ALONG) {
      k = t % DEPTH, outer = t / DEPTH, outer_step = THREADS / DEPTH;
    } else if (R >= 4 && way == OUTER4) {
      k = t / (R / 4 + (R < 4)), outer = t % (R / 4 + (R < 4)) * 4, k_step = THREADS / (R / 4 + (R < 4));
    } else {
      k = t / R, outer = t % R, k_step = THREADS / R;
    }
    step = (i64)k_step * along + (i64)outer_step * side.outer;
    from = data + (start + k) * along + (i64)(first + outer) * side.outer;
  }

  // Fetches the next `len` indices. What is not there becomes `nothing`.
  DEVICE void load(u32 len, T nothing) {
    const T* p = from;
    if (QUADS > 0 && way <= OUTER4) {
      UNROLL
      for (i32 i = 0; i < QUADS; ++i, p += step) {
        Vec<T, 4> quad = {{nothing, nothing, nothing, nothing}};
        if (k + i * k_step < len && outer + i * outer_step < left) quad = *(const Vec<T, 4>*)p;
        UNROLL
        for (i32 e = 0; e < 4; ++e) items[4 * i + e] = quad.x[e];
      }
    } else {
      UNROLL
      for (i32 i = 0; i < ITEMS; ++i, p += step) {
        items[i] = nothing;
        if (k + i * k_step < len && outer + i * outer_step < left) items[i] = *p;
      }
    }
    from += (i64)len * along;
  }

  DEVICE void store(W* panel) const {
    W* to = panel + k * PITCH + outer;
    u32 to_step = k_step * PITCH + outer_step;
    if (way == ALONG4) {
      UNROLL
      for (i32 i = 0; i < QUADS; ++i) {
        UNROLL
        for (i32 e = 0; e < 4; ++e) to[i * to_step + e * PITCH] = widen(items[4 * i + e]);
      }
    } else if (way == OUTER4) {
      constexpr u32 V = 16 / sizeof(W);
      UNROLL
      for (i32 i = 0; i < QUADS; ++i) {
        UNROLL
        for (u32 e = 0; e < 4; e += V) {
          Vec<W, V> wide;
          UNROLL
          for (u32 f = 0; f < V; ++f) wide.x[f] = widen(items[4 * i + e + f]);
          *(Vec<W, V>*)(to + i * to_step + e) = wide;
        }
      }
    } else {
      UNROLL
      for (i32 i = 0; i < ITEMS; ++i) {
        if (R * DEPTH >= THREADS || (k < DEPTH && outer < R)) to[i * to_step] = widen(items[i]);
      }
    }
  }
};
