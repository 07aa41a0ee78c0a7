// The two products of exact attention between tiles, along the CPU's summation trees.
//
// dot: row times row over the head's dim. The accumulators of a leaf and the finished nodes, at most DEPTH, are in
// registers. A leaf whose length is no multiple of four is padded with 0 on one side and -0 on the other: their
// product is -0, which changes no bit of a sum.
//
// chain: the scores times a matrix, over the scores' columns. The tree of the whole range decides where leaves end,
// so accumulators are carried from tile to tile. Finished nodes wait on a stack in device memory that is private to
// the thread: the first entry is used every other leaf, the next every fourth.
#pragma once
#include "attention.cuh"

// ---- operands ------------------------------------------------------------------------------------------------------

// The element of the head's dim at `place` in shared memory; -1 if there is none.
DEVICE i32 unplace(const Dim& dim, u32 place) {
  if (dim.plain) return place < dim.len ? (i32)place : -1;
  ONCE
  for (u32 l = 0; l < dim.leaves; l++) {
    u32 i = place - dim.leaf[l].place;
    if (i < dim.leaf[l].len) return (i32)(dim.leaf[l].start + i);
  }
  return -1;
}

// Loads one chunk of `rows` rows, at most ROWS.
template <class S, int ROWS>
DEVICE void load(typename S::A* to, const typename S::T* from, u64 step, u32 rows, const Dim& dim, u32 chunk,
                 typename S::A pad) {
  typedef typename S::T T;
  typedef typename S::A A;
  enum { VEC = 16 / (int)sizeof(T), ACROSS = S::CHUNK / VEC, EACH = ROWS * ACROSS / S::THREADS };
  enum { BATCH = EACH < 4 ? EACH : 4, PIECE = 16 / (int)sizeof(A) };
  struct alignas(16) Packed {
    T x[VEC];
  };
  struct alignas(16) Piece {
    A x[PIECE];
  };
  static_assert(EACH * S::THREADS == ROWS * ACROSS && EACH % BATCH == 0, "whole batches");
  u32 tid = threadIdx.x, first = chunk * S::CHUNK;
  if (dim.plain && dim.len % VEC == 0 && (((u64)from | step * sizeof(T)) & 15) == 0) {
    for (int batch = 0; batch < EACH; batch += BATCH) {
      Packed held[BATCH];
      UNROLL
      for (int i = 0; i < BATCH; i++) {
        u32 at = (u32)(batch + i) * S::THREADS + tid, row = at / ACROSS, col = at % ACROSS * VEC;
        bool there = row < rows && first + col < dim.len;
        UNROLL
        for (int e = 0; e < VEC; e++) held[i].x[e] = T{};
        if (there) held[i] = *(const Packed*)(from + row * step + first + col);
      }
      UNROLL
      for (int i = 0; i < BATCH; i++) {
        u32 at = (u32)(batch + i) * S::THREADS + tid, row = at / ACROSS, col = at % ACROSS * VEC;
        UNROLL
        for (int e = 0; e < VEC; e += PIECE) {
          Piece piece;
          UNROLL
          for (int n = 0; n < PIECE; n++) piece.x[n] = widen(held[i].x[e + n]);
          *(Piece*)(to + row * S::PITCH + col + e) = piece;
        }
      }
    }
    return;
  }
  ONCE
  for (u32 at = tid; at < (u32)(ROWS * S::CHUNK); at += S::THREADS) {
    u32 row = at / S::CHUNK, place = at % S::CHUNK;
    i32 d = unplace(dim, first + place);
    A x = pad;
    if (row < rows && d >= 0) x = widen(from[row * step + d]);
    to[row * S::PITCH + place] = x;
  }
}

// An operand of a product of rows: its rows in memory, and its shared memory.
template <class S>
struct Side {
  typename S::A* room;
  const typename S::T* from;
  u64 step;
  u32 rows;
};

template <class S>
DEVICE void load_rows(const Side<S>& x, const Dim& dim, u32 chunk) {
  load<S, S::ROWS>(x.room, x.from, x.step, x.rows, dim, chunk, (typename S::A)0.0);
}
template <class S>
DEVICE void load_cols(const Side<S>& y, const Dim& dim, u32 chunk) {
  load<S, S::COLS>(y.room, y.from, y.step, y.rows, dim, chunk, nothing<typename S::A>());
}

// ---- a tile of scores in shared memory ------------------------------------------------------------------------------

// Writes the values of a tile to shared memory, by columns.
template <class S>
DEVICE void put(typename S::A* p, const typename S::A (&s)[S::R][S::C]) {
  UNROLL
  for (int c = 0; c < S::C; c++) {
    UNROLL
    for (int r = 0; r < S::R; r += 4) {
      Four<typename S::A> held;
      UNROLL
      for (int i = 0; i < 4; i++) held.x[i] = s[r + i][c];
      *(Four<typename S::A>*)(p + (tile_x() + 16 * c) * S::STEP + tile_row<S>(r)) = held;
    }
  }
}

// Reads this thread's values back.
template <class S>
DEVICE void get(typename S::A (&s)[S::R][S::C], const typename S::A* p) {
  UNROLL
  for (int c = 0; c < S::C; c++) {
    UNROLL
    for (int r = 0; r < S::R; r += 4) {
      Four<typename S::A> held = four(p + (tile_x() + 16 * c) * S::STEP + tile_row<S>(r));
      UNROLL
      for (int i = 0; i < 4; i++) s[r + i][c] = held.x[i];
    }
  }
}

// ---- row times row -------------------------------------------------------------------------------------------------

// The scores before any factor. Operands of one chunk are loaded already, others are loaded here. If there is `spare`
// shared memory for a tile, the oldest finished node waits there instead of in registers.
template <class S, bool SPARE>
DEVICE void dot(typename S::A (&s)[S::R][S::C], const Side<S>& x, const Side<S>& y, const Dim& dim, typename S::A* spare) {
  typedef typename S::A A;
  enum { HELD = S::DEPTH - (SPARE ? 1 : 0) };
  A node[S::DEPTH][S::R][S::C];
  fill<S>(s, (A)0.0);
  u32 chunk = 0;
  ONCE
  for (u32 l = 0; l < dim.leaves; l++) {
    DimLeaf leaf = dim.leaf[l];
    if (S::CHUNKED && dim.chunks > 1 && (l == 0 || leaf.place / S::CHUNK != chunk)) {
      chunk = leaf.place / S::CHUNK;
      __syncthreads();
      load_rows(x, dim, chunk);
      load_cols(y, dim, chunk);
      __syncthreads();
    }
    fill<S>(s, nothing<A>());
    const A* xs = x.room + tile_row<S>(0) * S::PITCH + leaf.place % S::CHUNK;
    const A* ys = y.room + tile_x() * S::PITCH + leaf.place % S::CHUNK;
    ONCE
    for (u32 quad = 0; quad < leaf.quads; quad++, xs += 4, ys += 4) {
      Four<A> a[S::R];
      UNROLL
      for (int r = 0; r < S::R; r++) a[r] = four(xs + (tile_row<S>(r) - tile_row<S>(0)) * S::PITCH);
      UNROLL
      for (int c = 0; c < S::C; c++) {
        Four<A> b = four(ys + 16 * c * S::PITCH);
        UNROLL
        for (int i = 0; i < 4; i++) {
          UNROLL
          for (int r = 0; r < S::R; r++) s[r][c] = fma_(a[r].x[i], b.x[i], s[r][c]);
        }
      }
    }
    ONCE
    for (u32 join = 0; join < leaf.joins; join++) {
      if (SPARE && HELD == 0) get<S>(node[0], spare);
      UNROLL
      for (int r = 0; r < S::R; r++) {
        UNROLL
        for (int c = 0; c < S::C; c++) {
          s[r][c] = node[0][r][c] + s[r][c];
          UNROLL
          for (int i = 0; i + 1 < HELD; i++) node[i][r][c] = node[i + 1][r][c];
        }
      }
      if (SPARE && HELD > 0) get<S>(node[HELD > 0 ? HELD - 1 : 0], spare);
    }
    if (l + 1 < dim.leaves) {
      if (SPARE) put<S>(spare, HELD > 0 ? node[HELD > 0 ? HELD - 1 : 0] : s);
      UNROLL
      for (int r = 0; r < S::R; r++) {
        UNROLL
        for (int c = 0; c < S::C; c++) {
          UNROLL
          for (int i = HELD - 1; i > 0; i--) node[i][r][c] = node[i - 1][r][c];
          if (HELD > 0) node[0][r][c] = s[r][c];
        }
      }
    }
  }
}

// ---- a tile times a matrix -----------------------------------------------------------------------------------------

// The kind of a tile of probabilities or of their gradients.
enum TileKind : u32 { WHOLE, HOLES, EMPTY };

// HOLES if a tile has a `hole`, a key that is left out, and `count` rows of `b` have an infinity or a NaN; else WHOLE.
template <class S>
DEVICE TileKind kind_of(bool hole, const typename S::A* b, u32 count) {
  if (!__syncthreads_or(hole)) return WHOLE;
  bool odd = false;
  ONCE
  for (u32 i = threadIdx.x; i < count * S::CHUNK; i += S::THREADS) {
    typename S::A x = b[i / S::CHUNK * S::PITCH + i % S::CHUNK];
    odd |= !(x - x == (typename S::A)0.0);
  }
  return __syncthreads_or(odd) ? HOLES : WHOLE;
}
template <class S>
DEVICE TileKind kind_of(const typename S::A (&s)[S::R][S::C], const typename S::A* b, u32 count) {
  bool hole = false;
  UNROLL
  for (int r = 0; r < S::R; r++) {
    UNROLL
    for (int c = 0; c < S::C; c++) hole |= is_absent(s[r][c]);
  }
  return kind_of<S>(hole, b, count);
}

// A sum along a tree whose leaves arrive in order: 64 rows by CHUNK columns. A thread has its rows, and columns 64 n
// + 4 tx to 64 n + 4 tx + 3. Sums over keys have a tree of their own.
template <class S, bool BY_KEYS>
struct Sum {
  typedef typename S::A A;
  A acc[S::R][4 * S::N];
  // Memory for finished nodes, `S::ROWS * S::CHUNK` apart.
  A* stack;
  // The waiting nodes, and a bit for each that is empty.
  u32 top, absent;
  // The end of the current leaf, and the joins that follow it.
  u32 end, joins;

  DEVICE void begin(A* room) {
    stack = room + 4 * threadIdx.x;
    top = absent = end = joins = 0;
    clear();
  }

  DEVICE Node leaf(u32 at, u32 total) const { return BY_KEYS ? leaf_of_keys(at, total) : leaf_of(at, total, LEAF); }

  DEVICE void clear() {
    UNROLL
    for (int r = 0; r < S::R; r++) {
      UNROLL
      for (int e = 0; e < 4 * S::N; e++) acc[r][e] = nothing<A>();
    }
  }

  // Adds indices [first, first + count) of `total`, the columns of `p`, times the rows of `b`. After the whole range
  // `more` joins follow; after `last` nothing does. In a tile with HOLES, an element -0 of `p` stands for a key or query
  // that is left out, and is not multiplied; in an EMPTY one all do.
  DEVICE void add(const A* p, const A* b, u32 first, u32 count, u32 total, u32 more, bool last, TileKind kind) {
    const A* ps = p + tile_row<S>(0);
    const A* bs = b + 4 * tile_x();
    for (u32 at = 0; at < count;) {
      if (first + at >= end) {
        Node node = leaf(first + at, total);
        end = node.start + node.len;
        joins = node.joins + (end == total ? more : 0);
      }
      u32 stop = min(count, end - first);
      if (kind == EMPTY) at = stop;
      ONCE
      for (; kind == HOLES && at < stop; at++) {
        UNROLL
        for (int r = 0; r < S::R; r++) {
          A x = ps[at * S::STEP + r / 4 * (S::THREADS / 4) + r % 4];
          UNROLL
          for (int e = 0; e < 4 * S::N; e++) {
            A y = bs[at * S::PITCH + e / 4 * 64 + e % 4];
            acc[r][e] = is_absent(x) ? acc[r][e] : fma_(x, y, acc[r][e]);
          }
        }
      }
      TWICE
      for (; at < stop; at++) {
        Four<A> x[S::R / 4], y[S::N];
        UNROLL
        for (int r = 0; r < S::R / 4; r++) x[r] = four(ps + at * S::STEP + r * (S::THREADS / 4));
        UNROLL
        for (int n = 0; n < S::N; n++) y[n] = four(bs + at * S::PITCH + 64 * n);
        UNROLL
        for (int r = 0; r < S::R; r++) {
          UNROLL
          for (int e = 0; e < 4 * S::N; e++) acc[r][e] = fma_(x[r / 4].x[r % 4], y[e / 4].x[e % 4], acc[r][e]);
        }
      }
      if (first + at == end) finish(last && end == total);
      if (end == total && first + at == end) end = 0;
    }
  }

  // Ends a leaf.
  DEVICE void finish(bool last) {
    ONCE
    for (u32 join = 0; join < joins; join++) {
      top--;
      if (absent >> top & 1) {
        absent ^= 1u << top;
        continue;
      }
      const A* node = stack + (u64)top * (S::ROWS * S::CHUNK);
      UNROLL
      for (int r = 0; r < S::R; r++) {
        UNROLL
        for (int n = 0; n < S::N; n++) {
          Four<A> held = four(node + (r * S::N + n) * (4 * S::THREADS));
          UNROLL
          for (int e = 0; e < 4; e++) acc[r][4 * n + e] = held.x[e] + acc[r][4 * n + e];
        }
      }
    }
    if (last) return;
    A* node = stack + (u64)top * (S::ROWS * S::CHUNK);
    UNROLL
    for (int r = 0; r < S::R; r++) {
      UNROLL
      for (int n = 0; n < S::N; n++) {
        Four<A> held;
        UNROLL
        for (int e = 0; e < 4; e++) held.x[e] = acc[r][4 * n + e];
        *(Four<A>*)(node + (r * S::N + n) * (4 * S::THREADS)) = held;
      }
    }
    top++;
    clear();
  }

  // Skips the part of a tree over `total` before `at`, which would add nothing.
  DEVICE void skip_to(u32 at, u32 total) {
    u32 lefts = leaf(at, total).lefts;
    absent |= ((1u << lefts) - 1) << top;
    top += lefts;
    end = 0;
  }

  // Stores to `rows` rows of a matrix; `f` maps each sum, given its row.
  template <class F>
  DEVICE void store(typename S::T* to, u64 step, u32 rows, const Dim& dim, u32 chunk, F f) const {
    UNROLL
    for (int e = 0; e < 4 * S::N; e++) {
      i32 d = unplace(dim, chunk * S::CHUNK + e / 4 * 64 + 4 * tile_x() + e % 4);
      UNROLL
      for (int r = 0; r < S::R; r++) {
        u32 row = tile_row<S>(r);
        if (d >= 0 && row < rows) to[row * step + d] = narrow<typename S::T>(f(r, acc[r][e]));
      }
    }
  }
};
