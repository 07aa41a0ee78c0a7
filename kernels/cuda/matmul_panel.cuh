// Panels of a product's operands: read from memory with any strides, widened, and stored in shared memory in the
// order in which tiles read them.
#pragma once
#include "iso.cuh"

// The threads of a block, in every tile.
constexpr u32 THREADS = 128;

// N values that are read and written at once, at most 16 bytes.
template <class T, u32 N>
struct alignas(N * sizeof(T) > 16 ? 16 : N * sizeof(T)) Vec {
  T x[N];
};

// N neighbouring elements of T as they lie in memory, in whole registers: a load into halves of registers would be waited
// for where it is issued.
template <class T, u32 N>
struct Words {
  static constexpr u32 BYTES = N * sizeof(T), LEN = BYTES < 4 ? 1 : BYTES / 4;
  static DEVICE void load(const T* from, u32* to) {
    if constexpr (BYTES < 4) {
      to[0] = *(const u16*)from;
    } else {
      constexpr u32 EACH = LEN < 4 ? LEN : 4;
      UNROLL
      for (u32 i = 0; i < LEN; i += EACH) {
        Vec<u32, EACH> v = *(const Vec<u32, EACH>*)((const u32*)from + i);
        UNROLL
        for (u32 e = 0; e < EACH; ++e) to[i + e] = v.x[e];
      }
    }
  }
  // Element e, widened.
  static DEVICE Wide<T> at(const u32* words, u32 e) {
    if constexpr (sizeof(T) == 8) return f64_of((u64)words[2 * e + 1] << 32 | words[2 * e]);
    else if constexpr (sizeof(T) == 4) return f32_of(words[e]);
    else return widen(T{(u16)(words[e / 2] >> (e % 2 * 16))});
  }
};

// The order and width of an operand's loads. The first two are fast: four contiguous, aligned elements that are all
// inside or all outside.
enum PanelLoad : u32 { ALONG4 = 0, OUTER4 = 1, ALONG = 2, OUTER = 3 };

// An operand's layout, with strides in elements. The outer dim is the left operand's rows or the right one's columns.
struct PanelOperand {
  i64 outer;
  // The stride along the contraction.
  i64 along;
  // The stride of the batch; 0 if all products share the operand.
  i64 batch;
  PanelLoad mode;
  u32 extent;  // The length of the outer dim.
};

// R indices of the outer dim by at most DEPTH of the contraction's, distributed over a block's threads. In shared
// memory the outer dim is the inner one.
template <class T, u32 R, u32 DEPTH>
struct Panel {
  typedef Wide<T> W;
  static constexpr u32 ITEMS = (R * DEPTH + THREADS - 1) / THREADS;
  // The pitch of the contraction's indices, padded against bank conflicts.
  static constexpr u32 PITCH = R + 16 / sizeof(W);
  // True if each thread loads whole groups of four.
  static constexpr bool QUADS = R * DEPTH >= 4 * THREADS;

  // The distribution of the panel over threads: they fill a line of one dim, and then the next lines.
  template <PanelLoad MODE>
  struct Shares {
    static constexpr bool LINE_ALONG = MODE == ALONG4 || MODE == ALONG;
    static constexpr u32 SIZE = MODE == ALONG4 || MODE == OUTER4 ? 4 : 1, LEN = ITEMS / SIZE;
    static constexpr u32 LINE = (LINE_ALONG ? DEPTH : R) / SIZE, LINES = THREADS / LINE;
    // The distance between two shares of a thread.
    static constexpr u32 K_STEP = LINE_ALONG ? 0 : LINES, OUTER_STEP = LINE_ALONG ? LINES : 0;
  };

  const T* from;  // this thread's first element
  i64 step;       // from share to share
  i64 along;
  PanelLoad mode;
  u32 k, at;      // its index of the contraction, and its place in shared memory
  i32 more;       // indices of the outer dim from there on that are inside
  u32 words[ITEMS * Words<T, 1>::LEN];

  // Starts at index `first` of the outer dim and index `start` of the contraction.
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
    // Elements outside stay arbitrary: the sums that they enter are never read.
    UNROLL
    for (u32 i = 0; i < ITEMS * Words<T, 1>::LEN; ++i) words[i] = 0;
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
        Words<T, S::SIZE>::load(p, words + i * Words<T, S::SIZE>::LEN);
      }
    }
  }

  DEVICE void store(W* panel) const {
    W* to = panel + at;
    // A small panel has fewer elements than there are threads.
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
    // These elements are neighbours in shared memory as well.
    constexpr u32 V = MODE == OUTER4 ? 16 / sizeof(W) : 1, NEXT = S::LINE_ALONG ? PITCH : 1;
    UNROLL
    for (u32 i = 0; i < S::LEN; ++i) {
      UNROLL
      for (u32 e = 0; e < S::SIZE; e += V) {
        Vec<W, V> wide;
        UNROLL
        for (u32 f = 0; f < V; ++f) {
          typedef Words<T, S::SIZE> In;
          wide.x[f] = In::at(words + i * In::LEN, e + f);
        }
        *(Vec<W, V>*)(to + i * (S::K_STEP * PITCH + S::OUTER_STEP) + e * NEXT) = wide;
      }
    }
  }
};
