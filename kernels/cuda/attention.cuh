// Code that attention's kernels share: tiles of queries and keys, the CPU's summation trees
// (kernels/src/attention/{forward,query_block,backward}.rs), the treatment of scores, and dropout.
//
// A block of threads has 64 rows and COLS columns of scores. Its threads form a grid 16 wide: thread (tx, ty) has
// rows 4 ty to 4 ty + 3 (and the same number 4 THREADS / 16 further on), and columns tx, tx + 16, ... Shared memory
// holds the operands by rows, as in memory but widened, in chunks of CHUNK elements of the head's dim.
//
// R is 4. A thread's rows have 16 C columns of scores and 64 N columns of results. Kernels that are not CHUNKED
// hold the whole head's dim in shared memory. Kernels without EXTRAS know a window of positions (causal, full or
// sliding), and no other treatment of the scores, which needs registers that the most frequent calls keep. Kernels with
// DROPOUT have sources of their own for the same reason: kernels/src/cuda/variants.rs lists all variants.
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

template <class T_, int R_, int C_, int N_, int DEPTH_, bool CHUNKED_, bool EXTRAS_, bool DROPOUT_>
struct Tiles {
  typedef T_ T;
  typedef Wide<T_> A;
  enum { R = R_, C = C_, N = N_, DEPTH = DEPTH_, CHUNKED = CHUNKED_, EXTRAS = EXTRAS_, DROPOUT = DROPOUT_ };
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
DEVICE void swap_(A& x, A& y) {
  A held = x;
  x = y;
  y = held;
}
template <class A, int N>
DEVICE void swap_(A (&x)[N], A (&y)[N]) {
  UNROLL
  for (int i = 0; i < N; i++) swap_(x[i], y[i]);
}
// Moves the first row behind the last one, and the first column of each row behind its last one.
template <class X, int N>
DEVICE void rotate_rows(X (&x)[N]) {
  UNROLL
  for (int i = 0; i + 1 < N; i++) swap_(x[i], x[i + 1]);
}
template <class A, int R, int C>
DEVICE void rotate_columns(A (&x)[R][C]) {
  UNROLL
  for (int r = 0; r < R; r++) rotate_rows(x[r]);
}

// Calls f with each row's number, and this row of each tile. Long code is not repeated: the tiles' rows take turns.
template <class S, class F, class... Tiles>
DEVICE void by_rows(F f, Tiles&... tiles) {
  if constexpr (S::EXTRAS) {
    ONCE
    for (int r = 0; r < S::R; r++) {
      f(r, tiles[0]...);
      (rotate_rows(tiles), ...);
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
      rotate_columns(tile);
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
