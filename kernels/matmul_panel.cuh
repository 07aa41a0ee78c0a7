// Panels of a product's operands: from memory, in any strides, into shared memory, widened, in the order tiles read them.
#pragma once
#include "iso.cuh"

// Threads of a block, in every tile.
constexpr u32 THREADS = 128;

// N values that are read and written in one go, 16 bytes at most.
template <class T, u32 N>
struct alignas(N * sizeof(T) > 16 ? 16 : N * sizeof(T)) Vec {
  T x[N];
};

// How an operand's elements are taken. The first two are quick: four that lie side by side, aligned, all inside or all outside.
enum PanelLoad : u32 { ALONG4 = 0, OUTER4 = 1, ALONG = 2, OUTER = 3 };

// How an operand lies in memory; steps are in elements. Its outer dim is the left operand's rows, the right one's columns.
struct PanelOperand {
  i64 outer;
  // Along the contraction.
  i64 along;
  // From one product of the batch to the next; 0 where all use the same.
  i64 batch;
  PanelLoad mode;
  u32 extent;  // of the outer dim
};

// R of the outer dim's indices by at most DEPTH of the contraction's, as a block's threads carry them. In shared memory
// the outer dim is the inner one.
template <class T, u32 R, u32 DEPTH>
struct Panel {
  typedef Wide<T> W;
  static constexpr u32 ITEMS = (R * DEPTH + THREADS - 1) / THREADS;
  // From index to index of the contraction, with some room against bank conflicts.
  static constexpr u32 PITCH = R + 16 / sizeof(W);
  // True where there are whole quads for every thread.
  static constexpr bool QUADS = R * DEPTH >= 4 * THREADS;

  // How threads share the panel: as many as fill a line of one dim, the others on the lines after it.
  template <PanelLoad MODE>
  struct Shares {
    static constexpr bool LINE_ALONG = MODE == ALONG4 || MODE == ALONG;
    static constexpr u32 SIZE = MODE == ALONG4 || MODE == OUTER4 ? 4 : 1, LEN = ITEMS / SIZE;
    static constexpr u32 LINE = (LINE_ALONG ? DEPTH : R) / SIZE, LINES = THREADS / LINE;
    // From one of a thread's shares to the next.
    static constexpr u32 K_STEP = LINE_ALONG ? 0 : LINES, OUTER_STEP = LINE_ALONG ? LINES : 0;
  };

  const T* from;  // this thread's first element
  i64 step;       // from share to share
  i64 along;
  PanelLoad mode;
  u32 k, at;      // its index of the contraction, and its place in shared memory
  i32 more;       // indices of the outer dim from there on that are inside
  T items[ITEMS];

  // At the outer dim's index `first` and the contraction's index `start`.
  DEVICE void begin(const T* data, const PanelOperand& side, u32 first, i64 start) {
    mode = side.mode;
    along = side.along;
    u32 outer;
    if (QUADS && mode == ALONG4) {
      outer = place<QUADS ? ALONG4 : ALONG>(side);
    } else if (QUADS && mode == OUTER4) {
      outer = place<QUADS ? OUTER4 : OUTER>(side);
    } else if (mode == ALONG) {
      outer = place<ALONG>(side);
    } else {
      outer = place<OUTER>(side);
    }
    at = k * PITCH + outer;
    more = (i32)(side.extent - first - outer);
    from = data + (start + k) * along + (i64)(first + outer) * side.outer;
    // What is outside stays so; nobody reads a sum that it goes into.
    UNROLL
    for (u32 i = 0; i < ITEMS; ++i) items[i] = T{};
  }

  // The thread's first index of the outer dim.
  template <PanelLoad MODE>
  DEVICE u32 place(const PanelOperand& side) {
    typedef Shares<MODE> S;
    u32 in_line = threadIdx.x % S::LINE * S::SIZE, line = threadIdx.x / S::LINE;
    k = S::LINE_ALONG ? in_line : line;
    step = S::LINE_ALONG ? S::LINES * side.outer : S::LINES * along;
    return S::LINE_ALONG ? line : in_line;
  }

  // Fetches the next `len` indices.
  DEVICE void load(u32 len) {
    if (QUADS && mode == ALONG4) {
      fetch<QUADS ? ALONG4 : ALONG>(len);
    } else if (QUADS && mode == OUTER4) {
      fetch<QUADS ? OUTER4 : OUTER>(len);
    } else if (mode == ALONG) {
      fetch<ALONG>(len);
    } else {
      fetch<OUTER>(len);
    }
    from += (i64)len * along;
  }

  template <PanelLoad MODE>
  DEVICE void fetch(u32 len) {
    typedef Shares<MODE> S;
    const T* p = from;
    i32 more_k = (i32)(len - k);
    UNROLL
    for (u32 i = 0; i < S::LEN; ++i, p += step) {
      if ((i32)(i * S::K_STEP) < more_k && (i32)(i * S::OUTER_STEP) < more) {
        Vec<T, S::SIZE> v = *(const Vec<T, S::SIZE>*)p;
        UNROLL
        for (u32 e = 0; e < S::SIZE; ++e) items[S::SIZE * i + e] = v.x[e];
      }
    }
  }

  DEVICE void store(W* panel) const {
    W* to = panel + at;
    // A small panel has less than one element a thread.
    if (R * DEPTH < THREADS && threadIdx.x >= R * DEPTH) return;
    if (QUADS && mode == ALONG4) {
      put<QUADS ? ALONG4 : ALONG>(to);
    } else if (QUADS && mode == OUTER4) {
      put<QUADS ? OUTER4 : OUTER>(to);
    } else if (mode == ALONG) {
      put<ALONG>(to);
    } else {
      put<OUTER>(to);
    }
  }

  template <PanelLoad MODE>
  DEVICE void put(W* to) const {
    typedef Shares<MODE> S;
    // Elements that are neighbours in shared memory, too.
    constexpr u32 V = MODE == OUTER4 ? 16 / sizeof(W) : 1, NEXT = S::LINE_ALONG ? PITCH : 1;
    UNROLL
    for (u32 i = 0; i < S::LEN; ++i) {
      UNROLL
      for (u32 e = 0; e < S::SIZE; e += V) {
        Vec<W, V> wide;
        UNROLL
        for (u32 f = 0; f < V; ++f) wide.x[f] = widen(items[S::SIZE * i + e + f]);
        *(Vec<W, V>*)(to + i * (S::K_STEP * PITCH + S::OUTER_STEP) + e * NEXT) = wide;
      }
    }
  }
};
