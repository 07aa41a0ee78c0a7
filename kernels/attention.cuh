// Code that attention's kernels share: tiles of queries and keys, the two products between them along the CPU's
// summation trees (src/ops/attention/cpu.rs and cpu/{block,backward}.rs), and dropout.
//
// A block of threads has 64 rows and COLS columns of scores. Its threads form a grid 16 wide: thread (tx, ty) has
// rows 4 ty to 4 ty + 3 (and the same number 4 THREADS / 16 further on), and columns tx, tx + 16, ... Shared memory
// holds the operands by rows, as in memory but widened, in chunks of CHUNK elements of the head's dim.
//
// dot: row times row over the head's dim. The accumulators of a leaf and the finished nodes, at most DEPTH, are in
// registers. A leaf whose length is no multiple of four is padded with 0 on one side and -0 on the other: their
// product is -0, which changes no bit of a sum.
//
// chain: the scores times a matrix, over the scores' columns. The tree of the whole range decides where leaves end,
// so accumulators are carried from tile to tile. Finished nodes wait on a stack in device memory that is private to
// the thread: the first entry is used every other leaf, the next every fourth.
//
// R is 4 or 8. A thread's rows have 16 C columns of scores and 64 N columns of results. Kernels that are not CHUNKED
// hold the whole head's dim in shared memory. Kernels without EXTRAS know a window of positions (causal, full or
// sliding) and dropout, and no other treatment of the scores, which needs registers that the most frequent calls keep.
#pragma once
#include "math.cuh"
#include "philox.cuh"

// A leaf of the tree over a head's dim, and its position in shared memory.
struct DimLeaf {
  u16 start, place;
  u8 len, quads, joins, unused;
};
// A head's dim. `plain`: shared memory has the order of memory.
struct Dim {
  u32 len, leaves, chunks, plain;
  DimLeaf leaf[32];
};

struct AttentionCall {
  // The strides of batch, head and row, in elements.
  u64 q[3], k[3], v[3], o[3], grad[3];
  // The draw's extents, and the offset of this part.
  u64 draw_heads, draw_queries, draw_keys, first_batch, first_head, first_query;
  // The strides of bias and mask, 0 along a dim in which they repeat; those of batch of the documents.
  u64 bias[4], mask[4], documents[2];
  Draw draw;
  f64 scale, factor, cap;
  u32 batch, heads, groups, queries, keys, q_start;
  // Dropout: 0 none, 1 by the draw, 2 everything.
  u32 dropout, threshold;
  // The most finished nodes that wait at once: of the longer sum, of a row.
  u32 levels, row_levels;
  // The keys before and after its own position that a query sees; and what else decides the scores.
  u32 before, after, extras;
  // The dtype of the bias: the kernel's own, or one that it widens.
  u32 bias_dtype;
};
enum BiasDtype : u32 { OWN_DTYPE, IS_F16, IS_BF16 };
enum ScoreExtra : u32 { SOFT_CAP = 1, BIAS = 2, MASK = 4, DOCUMENTS = 8 };

// The optional operands of the scores; any pointer if there is none.
struct ScoreGiven {
  const void* bias;
  const bool* mask;
  const i64 *of_queries, *of_keys;
};

// Keeps loops from being unrolled further: the registers are needed for more warps.
#ifdef ISO_SHIM
#define TWICE
#define ONCE
#else
#define TWICE _Pragma("unroll 2")
#define ONCE _Pragma("unroll 1")
#endif

template <class T_, int R_, int C_, int N_, int DEPTH_, bool CHUNKED_, bool EXTRAS_>
struct Tiles {
  typedef T_ T;
  typedef Wide<T_> A;
  enum { R = R_, C = C_, N = N_, DEPTH = DEPTH_, CHUNKED = CHUNKED_, EXTRAS = EXTRAS_ };
  enum { ROWS = 64, COLS = 16 * C_, CHUNK = 64 * N_, THREADS = 1024 / R_, WARPS = THREADS / 32 };
  // The pitch of rows of operands and of scores keeps 16 rows in different banks.
  enum { PITCH = CHUNK + 16 / (int)sizeof(A), STEP = ROWS + 16 / (int)sizeof(A) };
};

template <class A>
struct alignas(16) Four {
  A x[4];
};
template <class A>
DEVICE Four<A> four(const A* at) {
  return *(const Four<A>*)at;
}
// The identity of a sum, which changes no bit.
template <class A>
DEVICE A nothing() {
  return (A)-0.0;
}

DEVICE int tile_x() { return threadIdx.x & 15; }
DEVICE int tile_y() { return threadIdx.x >> 4; }
template <class S>
DEVICE int tile_row(int r) {
  return r / 4 * (S::THREADS / 4) + 4 * tile_y() + r % 4;
}

// ---- loops over a thread's elements --------------------------------------------------------------------------------

template <class S>
DEVICE void fill(typename S::A (&s)[S::R][S::C], typename S::A x) {
  UNROLL
  for (int r = 0; r < S::R; r++) {
    UNROLL
    for (int c = 0; c < S::C; c++) s[r][c] = x;
  }
}

template <class A>
DEVICE void exchange(A& x, A& y) {
  A held = x;
  x = y;
  y = held;
}
template <class A, int N>
DEVICE void exchange(A (&x)[N], A (&y)[N]) {
  UNROLL
  for (int i = 0; i < N; i++) exchange(x[i], y[i]);
}
// Moves the first row behind the last one, and the first column of each row behind its last one.
template <class X, int N>
DEVICE void turn_rows(X (&x)[N]) {
  UNROLL
  for (int i = 0; i + 1 < N; i++) exchange(x[i], x[i + 1]);
}
template <class A, int R, int C>
DEVICE void turn_columns(A (&x)[R][C]) {
  UNROLL
  for (int r = 0; r < R; r++) turn_rows(x[r]);
}

// Calls f with each row's number, and this row of each tile. Long code is not repeated: the tiles' rows take turns.
template <class S, class F, class... Tiles>
DEVICE void by_rows(F f, Tiles&... tiles) {
  if constexpr (S::EXTRAS) {
    ONCE
    for (int r = 0; r < S::R; r++) {
      f(r, tiles[0]...);
      (turn_rows(tiles), ...);
    }
  } else {
    UNROLL
    for (int r = 0; r < S::R; r++) f(r, tiles[r]...);
  }
}

// Calls f with each column's number, and the column that it has in `tile`.
template <class S, class F>
DEVICE void by_columns(F f, typename S::A (&tile)[S::R][S::C]) {
  if constexpr (S::EXTRAS) {
    ONCE
    for (int c = 0; c < S::C; c++) {
      f(c, 0);
      turn_columns(tile);
    }
  } else {
    UNROLL
    for (int c = 0; c < S::C; c++) f(c, c);
  }
}

// ---- the tree over a range -----------------------------------------------------------------------------------------

// The leaf that holds index `at` of [0, len): the joins that follow it, and the left halves on its path from the
// root.
struct Node {
  u32 start, len, joins, lefts;
};
DEVICE Node leaf_of(u32 at, u32 len, u32 leaf) {
  Node node = {0, len, 0, 0};
  while (node.len > leaf) {
    u32 half = left_of(node.len);
    if (at - node.start < half) {
      node.len = half;
      node.joins = 0;
    } else {
      node.start += half;
      node.len -= half;
      node.joins++;
      node.lefts++;
    }
  }
  return node;
}

// The tree of a sum over keys, which is split at the largest power of two below its length: leaves are whole, and the
// tree of a longer sum, restricted to a prefix, is the prefix's.
DEVICE u32 ones_of(u32 x) {
  u32 count = 0;
  for (; x; x &= x - 1) count++;
  return count;
}
DEVICE Node leaf_of_keys(u32 at, u32 len) {
  u32 leaf = at / LEAF, start = leaf * LEAF, rest = len - start, ones = 0;
  bool last = rest <= LEAF;
  for (u32 bits = leaf; bits & 1; bits >>= 1) ones++;
  return Node{start, last ? rest : (u32)LEAF, last ? ones_of(leaf) : ones, ones_of(leaf)};
}

// ---- scores --------------------------------------------------------------------------------------------------------

// The keys in the window of the query at `position`.
DEVICE u32 window_start(const AttentionCall& call, u32 position) {
  return position > call.before ? min(position - call.before, call.keys) : 0;
}
DEVICE u32 window_end(const AttentionCall& call, u32 position) { return min(position + call.after + 1, call.keys); }

// A tile of scores: `queries` queries and `keys` keys from the given ones on.
struct TileAt {
  u32 batch, head, query, queries, key, keys;
};

// The index of bias or mask.
DEVICE u64 index_of(const u64 (&step)[4], const TileAt& at, u32 query, u32 key) {
  return at.batch * step[0] + at.head * step[1] + query * step[2] + key * step[3];
}

// Tells whether a query sees a key; `i` and `j` are their places in the tile.
template <class S>
DEVICE bool sees(const AttentionCall& call, const ScoreGiven& given, const TileAt& at, u32 i, u32 j) {
  u32 query = at.query + i, key = at.key + j, position = call.q_start + query;
  bool seen = i < at.queries && j < at.keys && key + call.before >= position && key <= position + call.after;
  if (!S::EXTRAS || !seen) return seen;
  if ((call.extras & MASK) && !given.mask[index_of(call.mask, at, query, key)]) return false;
  if (!(call.extras & DOCUMENTS)) return true;
  return given.of_queries[at.batch * call.documents[0] + query] == given.of_keys[at.batch * call.documents[1] + key];
}

// Bit r C + c tells whether the query of row r sees the key of column c; or the query of column c the key of row r if
// `BY_KEYS`.
template <class S, bool BY_KEYS>
DEVICE u32 seen_tile(const AttentionCall& call, const ScoreGiven& given, const TileAt& at) {
  u32 seen = 0;
  ONCE
  for (int r = 0; r < S::R; r++) {
    UNROLL
    for (int c = 0; c < S::C; c++) {
      u32 row = tile_row<S>(r), col = tile_x() + 16 * c;
      seen |= (u32)sees<S>(call, given, at, BY_KEYS ? col : row, BY_KEYS ? row : col) << (r * S::C + c);
    }
  }
  return seen;
}

template <class A>
DEVICE A bias_at(const AttentionCall& call, const ScoreGiven& given, u64 at) {
  if (call.bias_dtype == IS_F16) return (A)widen(((const f16*)given.bias)[at]);
  if (call.bias_dtype == IS_BF16) return (A)widen(((const bf16*)given.bias)[at]);
  return ((const A*)given.bias)[at];
}

// The score of a product that is scaled already, for a query and key that see each other. `slope` is the score's
// derivative by the product.
template <class S>
DEVICE typename S::A score_of(const AttentionCall& call, const ScoreGiven& given, typename S::A s, const TileAt& at,
                              u32 i, u32 j, typename S::A& slope) {
  typedef typename S::A A;
  slope = (A)1.0;
  if (!S::EXTRAS) return s;
  if (call.extras & SOFT_CAP) {
    A t = tanh_(s / (A)call.cap);
    s = (A)call.cap * t;
    slope = (A)1.0 - t * t;
  }
  if (call.extras & BIAS) s = s + bias_at<A>(call, given, index_of(call.bias, at, at.query + i, at.key + j));
  return s;
}

// Tells whether a value is the -0 that stands for a key that is left out.
DEVICE bool is_absent(f32 x) { return bits_of(x) == 0x80000000u; }
DEVICE bool is_absent(f64 x) { return bits_of(x) == 0x8000000000000000ull; }

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

// ---- dropout -------------------------------------------------------------------------------------------------------

// Bits that tell which of the four elements from `e` on dropout keeps.
DEVICE u32 keep_four(const AttentionCall& call, u64 e) {
  if (call.dropout == 2) return 0;
  u32 kept = 0, over = (u32)e & 3;
  Words words = philox(call.draw, e >> 2);
  UNROLL
  for (int i = 0; i < 4; i++) kept |= (u32)(words.word[i] >= call.threshold) << i;
  if (over) {
    words = philox(call.draw, (e >> 2) + 1);
    UNROLL
    for (int i = 0; i < 4; i++) kept |= (u32)(words.word[i] >= call.threshold) << (4 + i);
  }
  return kept >> over & 15;
}

// The draw's first element of a row of scores: that of the query with local index `row`.
DEVICE u64 drawn_row(const AttentionCall& call, u32 batch, u32 head, u32 row) {
  u64 whole = (call.first_batch + batch) * call.draw_heads + call.first_head + head;
  return (whole * call.draw_queries + call.first_query + row) * call.draw_keys;
}

// If rows are queries, bit r C + c tells whether column c of row r is kept. Sixteen threads share their Philox
// blocks.
template <class S>
DEVICE u32 keep_tile(const AttentionCall& call, const TileAt& at) {
  u32 mine = 0, kept = 0;
  int tx = tile_x();
  ONCE
  for (int r = 0; r < S::R; r++) {
    u64 e = drawn_row(call, at.batch, at.head, at.query + tile_row<S>(r)) + at.key + 4 * (tx % (4 * S::C));
    mine |= keep_four(call, e) << 4 * r;
  }
  UNROLL
  for (int c = 0; c < S::C; c++) {
    u32 theirs = __shfl_sync(0xffffffffu, mine, (int)(threadIdx.x & 16) | (tx / 4 + 4 * c));
    UNROLL
    for (int r = 0; r < S::R; r++) kept |= (theirs >> (4 * r + tx % 4) & 1) << (r * S::C + c);
  }
  return kept;
}

// If rows are keys, bit r C + c tells whether row r of column c is kept.
template <class S>
DEVICE u32 keep_tile_by_keys(const AttentionCall& call, const TileAt& at) {
  u32 kept = 0;
  ONCE
  for (int c = 0; c < S::C; c++) {
    u64 row = drawn_row(call, at.batch, at.head, at.query + tile_x() + 16 * c) + at.key;
    UNROLL
    for (int r = 0; r < S::R; r += 4) {
      u32 bits = keep_four(call, row + tile_row<S>(r));
      UNROLL
      for (int i = 0; i < 4; i++) kept |= (bits >> i & 1) << ((r + i) * S::C + c);
    }
  }
  return kept;
}

// ---- blocks of queries ---------------------------------------------------------------------------------------------

// Queries between two multiples of 64 of their position, and the keys in the windows of a full block. `from` is a
// multiple of 64.
struct QueryBlock {
  u32 start, global, rows, from, keys, width;
};
DEVICE u32 query_blocks(const AttentionCall& call) {
  return (call.q_start + call.queries - 1) / 64 - call.q_start / 64 + 1;
}
DEVICE QueryBlock query_block(const AttentionCall& call, u32 index) {
  u32 first = (call.q_start / 64 + index) * 64, end = first + 64;
  QueryBlock block;
  block.global = max(first, call.q_start);
  block.start = block.global - call.q_start;
  block.rows = min(end - block.global, call.queries - block.start);
  block.from = window_start(call, first) / 64 * 64;
  block.keys = max(window_end(call, end - 1), block.from);
  block.width = (block.keys + 63) / 64 * 64;
  return block;
}
