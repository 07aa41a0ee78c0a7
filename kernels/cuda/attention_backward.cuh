// Attention, backward, with the bits of kernels/src/attention/backward.rs, and without a matrix of all scores.
//
// In addition to attention_delta.cu there are two kernels. A dq block has 64 queries of one head. A dkv block has 64
// keys of one key head, and loops over all queries of all heads that attend to them, in the order of the tree. Both
// recompute the probabilities from lse: 3 and 4 products of T^2 D / 2 fused multiply-adds per head. A flash kernel
// needs 5 in all, because it adds up the gradient of the queries in any order of blocks.
//
// The sum over queries is one tree: heads are halved down to single ones, then queries down to leaves of 32. The CPU
// computes up to 64 queries as one product, whose own tree has the same shape. A leaf of 64 queries that attends to
// none of a block's keys is skipped, as on the CPU. Skipped or masked values can only change the sign of a zero, and
// no sum stays -0.
//
// benches/results/2026-11-27-h200.md has times.
#pragma once
#include "attention_tiles.cuh"

// A query and a key of a tile, and the query's numbers.
template <class A>
struct Pair {
  u32 query, key;
  bool seen, kept;
  A lse, delta;
};

// Turns the products of a query and a key, `s`, and of the gradient and a value, `ds`, into the probability, with
// dropout's factor, and the gradient of the first product, or of the score if `OF_SCORE`. Both become -0 if the query
// does not see the key.
template <class S, bool OF_SCORE>
DEVICE void slopes(const AttentionCall& call, const ScoreGiven& given, const TileAt& at, const Pair<typename S::A>& pair,
                   typename S::A& s, typename S::A& ds) {
  typedef typename S::A A;
  A slope = (A)1.0, score = (A)-inf_f64();
  if (pair.seen) score = score_of<S>(call, given, (A)call.scale * s, at, pair.query, pair.key, slope);
  bool none = score == (A)-inf_f64();
  A factor = !S::DROPOUT ? (A)1.0 : pair.kept ? (A)call.factor : (A)0.0;
  A p = exp_(score - (pair.lse == (A)-inf_f64() ? (A)0.0 : pair.lse));
  A dp = !S::DROPOUT ? ds : pair.kept ? ds * factor : (A)0.0;
  A change = p * (dp - pair.delta);
  if (!OF_SCORE && S::EXTRAS && (call.extras & SOFT_CAP)) change = slope * change;
  if (!OF_SCORE) change = (A)call.scale * change;
  s = none ? nothing<A>() : S::DROPOUT ? p * factor : p;
  ds = none ? nothing<A>() : change + (A)0.0;
}

// The operands that all blocks of threads read.
template <class S>
struct Given {
  const typename S::T *q, *k, *v, *grad;
  const typename S::A *lse, *delta;
  ScoreGiven scores;
};

template <class S>
struct Backward {
  typedef typename S::T T;
  typedef typename S::A A;
  const AttentionCall& call;
  const Dim& d;
  const Dim& dv;
  // Shared memory: two operands for rows, two for columns, and scores.
  A *x[2], *y[2], *p;

  DEVICE Backward(const AttentionCall& call_, const Dim& d_, const Dim& dv_, A* shared)
      : call(call_), d(d_), dv(dv_) {
    x[0] = shared;
    x[1] = x[0] + S::ROWS * S::PITCH;
    y[0] = x[1] + S::ROWS * S::PITCH;
    y[1] = y[0] + S::COLS * S::PITCH;
    p = y[1] + S::COLS * S::PITCH;
  }

  // True if shared memory holds the whole head's dim.
  DEVICE static bool whole(const Dim& dim) { return !S::CHUNKED || dim.chunks == 1; }

  // Loads the columns' operands. All threads have met since the last product.
  DEVICE void load_tile(const Side<S> (&ys)[2]) {
    if (whole(d)) load_cols(ys[0], d, 0);
    if (whole(dv)) load_cols(ys[1], dv, 0);
    __syncthreads();
  }

  // Both products of a tile: q times k into `s`, grad times v into `ds`.
  DEVICE void products(A (&s)[S::R][S::C], A (&ds)[S::R][S::C], const Side<S> (&xs)[2], const Side<S> (&ys)[2]) {
    load_tile(ys);
    dot<S, true>(s, xs[0], ys[0], d, p);
    dot<S, true>(ds, xs[1], ys[1], dv, p);
  }

  DEVICE void load_resident(const Side<S> (&xs)[2]) {
    __syncthreads();
    if (whole(d)) load_rows(xs[0], d, 0);
    if (whole(dv)) load_rows(xs[1], dv, 0);
  }

  // Loads a chunk of the columns' operand for the next product, unless it is loaded already.
  DEVICE void load_chunk(const Side<S>& y, const Dim& dim, u32 chunk) {
    if (whole(dim)) return;
    __syncthreads();
    load_cols(y, dim, chunk);
  }

  DEVICE void queries(const QueryBlock& block, u32 batch, u32 head, u32 chunk, const Given<S>& given, T* dq, A* stack) {
    u32 group = head / (call.heads / call.groups);
    const T* q = given.q + batch * call.q[0] + head * call.q[1] + block.start * call.q[2];
    const T* grad = given.grad + batch * call.grad[0] + head * call.grad[1] + block.start * call.grad[2];
    const T* k = given.k + batch * call.k[0] + group * call.k[1];
    const T* v = given.v + batch * call.v[0] + group * call.v[1];
    u64 first = ((u64)batch * call.heads + head) * call.queries + block.start;
    Side<S> xs[2] = {{x[0], q, call.q[2], block.rows}, {x[1], grad, call.grad[2], block.rows}};
    load_resident(xs);
    A lse[S::R], delta[S::R];
    UNROLL
    for (int r = 0; r < S::R; r++) {
      u32 row = tile_row<S>(r);
      lse[r] = row < block.rows ? given.lse[first + row] : (A)0.0;
      delta[r] = row < block.rows ? given.delta[first + row] : (A)0.0;
    }
    Sum<S, true> sum;
    sum.begin(stack);
    sum.skip_to(block.from, block.keys);
    for (u32 key = block.from; key < block.keys; key += S::COLS) {
      u32 keys = min(block.keys - key, (u32)S::COLS);
      TileAt at = {batch, head, block.start, block.rows, key, keys};
      u32 seen = seen_tile<S, false>(call, given.scores, at);
      TileKind kind = EMPTY;
      if (__syncthreads_or(seen != 0)) {
        Side<S> ys[2] = {{y[0], k + key * call.k[2], call.k[2], keys}, {y[1], v + key * call.v[2], call.v[2], keys}};
        A s[S::R][S::C], ds[S::R][S::C];
        products(s, ds, xs, ys);
        u32 kept = S::DROPOUT ? keep_tile<S>(call, at) : 0;
        by_rows<S>(
            [&](int r, A(&s)[S::C], A(&ds)[S::C], A& lse, A& delta) {
              UNROLL
              for (int c = 0; c < S::C; c++) {
                u32 bit = r * S::C + c;
                Pair<A> pair = {(u32)tile_row<S>(r), (u32)(tile_x() + 16 * c), (bool)(seen >> bit & 1),
                                (bool)(kept >> bit & 1), lse, delta};
                slopes<S, false>(call, given.scores, at, pair, s[c], ds[c]);
              }
            },
            s, ds, lse, delta);
        load_chunk(ys[0], d, chunk);
        put<S>(p, ds);
        __syncthreads();
        kind = kind_of<S>(ds, y[0], keys);
      }
      sum.add(p, y[0], key, keys, block.keys, 0, true, kind);
    }
    u64 step = (u64)call.heads * d.len;
    T* to = dq + ((u64)batch * call.queries + block.start) * step + (u64)head * d.len;
    sum.store(to, step, block.rows, d, chunk, [](int, A x) { return x + (A)0.0; });
  }

  DEVICE void keys(u32 key, u32 batch, u32 group, u32 chunk, const Given<S>& given, T* dk, T* dvs, A* stack) {
    u32 rows = min(call.keys - key, 64u), each = call.heads / call.groups;
    Side<S> xs[2] = {{x[0], given.k + batch * call.k[0] + group * call.k[1] + key * call.k[2], call.k[2], rows},
                     {x[1], given.v + batch * call.v[0] + group * call.v[1] + key * call.v[2], call.v[2], rows}};
    load_resident(xs);
    Sum<S, false> sums[2];
    sums[0].begin(stack);
    sums[1].begin(stack + (u64)call.levels * (S::ROWS * S::CHUNK));
    // The first query whose window has any of these keys, and the first of its leaf of 64.
    u32 start = key > call.after ? key - call.after : 0, first = start > call.q_start ? start - call.q_start : 0;
    bool any = first < call.queries;
    u32 from = any ? leaf_of(first, call.queries, 64).start : call.queries;
    for (u32 i = 0; any && i < each; i++) {
      u32 head = group * each + i, more = leaf_of(i, each, 1).joins;
      sums[0].skip_to(from, call.queries);
      sums[1].skip_to(from, call.queries);
      for (u32 query = from; query < call.queries; query += S::COLS) {
        TileAt at = {batch, head, query, min(call.queries - query, (u32)S::COLS), key, rows};
        tile(at, more, i + 1 == each, chunk, given, xs, sums);
      }
    }
    u64 at = (u64)batch * call.keys + key, step = (u64)call.groups * d.len, step_v = (u64)call.groups * dv.len;
    // No sum stays -0; an empty sum is 0.
    auto whole = [=](int, A x) { return any ? x + (A)0.0 : (A)0.0; };
    if (chunk < d.chunks) sums[0].store(dk + at * step + (u64)group * d.len, step, rows, d, chunk, whole);
    if (chunk < dv.chunks) sums[1].store(dvs + at * step_v + (u64)group * dv.len, step_v, rows, dv, chunk, whole);
  }

  // Adds the queries of a tile to the sums over queries. `s` waits in shared memory while `ds` is computed.
  DEVICE void tile(const TileAt& at, u32 more, bool last, u32 chunk, const Given<S>& given, const Side<S> (&xs)[2],
                   Sum<S, false> (&sums)[2]) {
    u32 count = at.queries, seen = seen_tile<S, true>(call, given.scores, at);
    bool any = __syncthreads_or(seen != 0);
    TileKind kind = EMPTY;
    A ds[S::R][S::C];
    const T* q = given.q + at.batch * call.q[0] + at.head * call.q[1] + at.query * call.q[2];
    const T* grad = given.grad + at.batch * call.grad[0] + at.head * call.grad[1] + at.query * call.grad[2];
    Side<S> ys[2] = {{y[0], q, call.q[2], count}, {y[1], grad, call.grad[2], count}};
    if (any) {
      A s[S::R][S::C];
      load_tile(ys);
      dot<S, false>(s, xs[0], ys[0], d, p);
      put<S>(p, s);
      dot<S, false>(ds, xs[1], ys[1], dv, p);
      u32 kept = S::DROPOUT ? keep_tile_by_keys<S>(call, at) : 0;
      u64 first = ((u64)at.batch * call.heads + at.head) * call.queries + at.query;
      bool hole = false;
      by_columns<S>(
          [&](int c, int column) {
            u32 col = tile_x() + 16 * c;
            bool there = col < count;
            A lse = there ? given.lse[first + col] : (A)0.0, delta = there ? given.delta[first + col] : (A)0.0;
            UNROLL
            for (int r = 0; r < S::R; r += 4) {
              Four<A>* held = (Four<A>*)(p + col * S::STEP + tile_row<S>(r));
              Four<A> s = *held;
              UNROLL
              for (int i = 0; i < 4; i++) {
                u32 bit = (r + i) * S::C + c;
                Pair<A> pair = {col, (u32)tile_row<S>(r + i), (bool)(seen >> bit & 1), (bool)(kept >> bit & 1), lse, delta};
                slopes<S, false>(call, given.scores, at, pair, s.x[i], ds[r + i][column]);
                hole |= is_absent(s.x[i]);
              }
              *held = s;
            }
          },
          ds);
      load_chunk(ys[1], dv, chunk);
      __syncthreads();
      kind = kind_of<S>(hole, y[1], count);
    }
    sums[1].add(p, y[1], at.query, count, call.queries, more, last, kind);
    if (any) {
      __syncthreads();
      load_chunk(ys[0], d, chunk);
      put<S>(p, ds);
      __syncthreads();
      kind = kind_of<S>(ds, y[0], count);
    }
    sums[0].add(p, y[0], at.query, count, call.queries, more, last, kind);
  }
};

// The gradient of the bias, `[batch, heads, queries or 1, keys]`: the sum of the scores' gradients over the dims along
// which the bias repeats. `joins` lists, for each index of these dims, how many nodes of the reduction tree it ends.
struct BiasShape {
  u32 batch, heads, over_queries, levels;
};

template <class S>
struct BiasGradient {
  typedef typename S::T T;
  typedef typename S::A A;
  Backward<S> tiles;
  // Memory for unfinished nodes: THREADS by R times C per level.
  A* stack;
  u32 top;

  DEVICE void push(A (&x)[S::R][S::C], u32 joins) {
    for (u32 join = 0; join < joins; join++) {
      top--;
      UNROLL
      for (int r = 0; r < S::R; r++) {
        UNROLL
        for (int c = 0; c < S::C; c++) x[r][c] = *node(top, r * S::C + c) + x[r][c];
      }
    }
    UNROLL
    for (int r = 0; r < S::R; r++) {
      UNROLL
      for (int c = 0; c < S::C; c++) *node(top, r * S::C + c) = x[r][c];
    }
    top++;
  }

  DEVICE void push_one(A x, u32 joins) {
    for (u32 join = 0; join < joins; join++) x = *node(--top, 0) + x;
    *node(top++, 0) = x;
  }

  DEVICE void store_bias(void* out, u64 at, A x) const {
    if (tiles.call.bias_dtype == IS_F16) ((f16*)out)[at] = narrow<f16>((f32)x);
    else if (tiles.call.bias_dtype == IS_BF16) ((bf16*)out)[at] = narrow<bf16>((f32)x);
    else ((A*)out)[at] = x;
  }

  DEVICE A* node(u32 level, u32 slot) const {
    return stack + ((u64)level * (S::R * S::C) + slot) * S::THREADS + threadIdx.x;
  }

  // The gradients of the scores of a tile; 0 for keys that are left out.
  DEVICE void tile(A (&ds)[S::R][S::C], const Given<S>& given, const TileAt& at) {
    const AttentionCall& call = tiles.call;
    u32 group = at.head / (call.heads / call.groups);
    const T* q = given.q + at.batch * call.q[0] + at.head * call.q[1] + at.query * call.q[2];
    const T* grad = given.grad + at.batch * call.grad[0] + at.head * call.grad[1] + at.query * call.grad[2];
    const T* k = given.k + at.batch * call.k[0] + group * call.k[1] + at.key * call.k[2];
    const T* v = given.v + at.batch * call.v[0] + group * call.v[1] + at.key * call.v[2];
    Side<S> xs[2] = {{tiles.x[0], q, call.q[2], at.queries}, {tiles.x[1], grad, call.grad[2], at.queries}};
    Side<S> ys[2] = {{tiles.y[0], k, call.k[2], at.keys}, {tiles.y[1], v, call.v[2], at.keys}};
    A s[S::R][S::C];
    tiles.load_resident(xs);
    tiles.products(s, ds, xs, ys);
    u32 seen = seen_tile<S, false>(call, given.scores, at), kept = S::DROPOUT ? keep_tile<S>(call, at) : 0;
    u64 first = ((u64)at.batch * call.heads + at.head) * call.queries + at.query;
    by_rows<S>(
        [&](int r, A(&s)[S::C], A(&ds)[S::C]) {
          u32 row = tile_row<S>(r);
          bool there = row < at.queries;
          A lse = there ? given.lse[first + row] : (A)0.0, delta = there ? given.delta[first + row] : (A)0.0;
          UNROLL
          for (int c = 0; c < S::C; c++) {
            u32 bit = r * S::C + c;
            Pair<A> pair = {row, (u32)(tile_x() + 16 * c), (bool)(seen >> bit & 1), (bool)(kept >> bit & 1), lse, delta};
            slopes<S, true>(call, given.scores, at, pair, s[c], ds[c]);
            ds[c] = ds[c] + (A)0.0;
          }
        },
        s, ds);
  }

  DEVICE void run(u32 item, const BiasShape& shape, const Given<S>& given, const u8* joins, void* out) {
    const AttentionCall& call = tiles.call;
    u32 key_tiles = (call.keys + S::COLS - 1) / S::COLS, key = item % key_tiles * S::COLS;
    u32 query_tiles = shape.over_queries ? 1 : (call.queries + 63) / 64, rest = item / key_tiles;
    u32 query = rest % query_tiles * 64, of_head = rest / query_tiles % shape.heads, of_batch = rest / query_tiles / shape.heads;
    bool every_batch = shape.batch != call.batch, every_head = shape.heads != call.heads;
    u32 end = shape.over_queries ? call.queries : min(query + 64, call.queries), at = 0;
    A ds[S::R][S::C];
    top = 0;
    for (u32 batch = every_batch ? 0 : of_batch; batch < (every_batch ? call.batch : of_batch + 1); batch++) {
      for (u32 head = every_head ? 0 : of_head; head < (every_head ? call.heads : of_head + 1); head++) {
        for (u32 first = query; first < end; first += 64) {
          u32 rows = min(end - first, 64u);
          tile(ds, given, {batch, head, first, rows, key, min(call.keys - key, (u32)S::COLS)});
          if (!shape.over_queries) {
            push(ds, joins[at++]);
            continue;
          }
          put<S>(tiles.p, ds);
          __syncthreads();
          for (u32 row = 0; threadIdx.x < S::COLS && row < rows; row++) {
            push_one(tiles.p[threadIdx.x * S::STEP + row], joins[at + row]);
          }
          at += rows;
          __syncthreads();
        }
      }
    }
    u64 line = (u64)of_batch * shape.heads + of_head;
    if (shape.over_queries) {
      u32 col = key + threadIdx.x;
      if (threadIdx.x < S::COLS && col < call.keys) store_bias(out, line * call.keys + col, *node(0, 0));
      return;
    }
    UNROLL
    for (int r = 0; r < S::R; r++) {
      u32 row = query + tile_row<S>(r);
      UNROLL
      for (int c = 0; c < S::C; c++) {
        u32 col = key + tile_x() + 16 * c;
        if (row < end && col < call.keys) {
          store_bias(out, (line * call.queries + row) * call.keys + col, *node(0, r * S::C + c));
        }
      }
    }
  }
};

template <class S>
DEVICE void attention_dbias(const AttentionCall& call, const Dim& d, const Dim& dv, const BiasShape& shape,
                            const Given<S>& given, const u8* joins, void* out, typename S::A* scratch) {
  DYNAMIC_SHARED(shared);
  u64 own = (u64)blockIdx.x * shape.levels * (S::R * S::C * S::THREADS);
  BiasGradient<S> gradient = {Backward<S>(call, d, dv, (typename S::A*)shared), scratch + own, 0};
  u32 queries = shape.over_queries ? 1 : (call.queries + 63) / 64;
  u32 items = shape.batch * shape.heads * queries * ((call.keys + S::COLS - 1) / S::COLS);
  for (u32 item = blockIdx.x; item < items; item += gridDim.x) gradient.run(item, shape, given, joins, out);
}

// Blocks in x share heads and blocks of queries, the longest first; blocks in y have chunks of q's dim.
template <class S>
DEVICE void attention_dq(const AttentionCall& call, const Dim& d, const Dim& dv, const Given<S>& given,
                         typename S::T* dq, typename S::A* scratch) {
  DYNAMIC_SHARED(shared);
  Backward<S> backward(call, d, dv, (typename S::A*)shared);
  u64 own = (u64)blockIdx.y * gridDim.x + blockIdx.x;
  typename S::A* stack = scratch + own * call.levels * (S::ROWS * S::CHUNK);
  u32 blocks = query_blocks(call), pairs = call.batch * call.heads;
  for (u32 item = blockIdx.x; item < blocks * pairs; item += gridDim.x) {
    QueryBlock block = query_block(call, blocks - 1 - item / pairs);
    backward.queries(block, item % pairs / call.heads, item % call.heads, blockIdx.y, given, dq, stack);
  }
}

// Blocks in x share heads and blocks of 64 keys, first those that most queries attend to; blocks in y have chunks of
// the dims.
template <class S>
DEVICE void attention_dkv(const AttentionCall& call, const Dim& d, const Dim& dv, const Given<S>& given,
                          typename S::T* dk, typename S::T* dvs, typename S::A* scratch) {
  DYNAMIC_SHARED(shared);
  Backward<S> backward(call, d, dv, (typename S::A*)shared);
  u64 own = (u64)blockIdx.y * gridDim.x + blockIdx.x;
  typename S::A* stack = scratch + own * 2 * call.levels * (S::ROWS * S::CHUNK);
  u32 blocks = (call.keys + 63) / 64, pairs = call.batch * call.groups;
  for (u32 item = blockIdx.x; item < blocks * pairs; item += gridDim.x) {
    u32 pair = item % pairs;
    backward.keys(item / pairs * 64, pair / call.groups, pair % call.groups, blockIdx.y, given, dk, dvs, stack);
  }
}

// `bound`: as in attention_forward.cuh.
#define ENTRIES(stem, T, bound, ...)                                                                            \
  KERNEL(stem##_dq_##T, bound,                                                                                  \
         (AttentionCall call, Dim d, Dim dv, const T* q, const T* k, const T* v, const T* grad,                 \
          const Wide<T>* lse, const Wide<T>* delta, const void* bias, const bool* mask, const i64* of_queries,  \
          const i64* of_keys, T* dq, Wide<T>* stack)) {                                                         \
    attention_dq<Tiles<T, __VA_ARGS__>>(                                                                        \
        call, d, dv, {q, k, v, grad, lse, delta, {bias, mask, of_queries, of_keys}}, dq, stack);                \
  }                                                                                                             \
  KERNEL(stem##_dkv_##T, bound,                                                                                 \
         (AttentionCall call, Dim d, Dim dv, const T* q, const T* k, const T* v, const T* grad,                 \
          const Wide<T>* lse, const Wide<T>* delta, const void* bias, const bool* mask, const i64* of_queries,  \
          const i64* of_keys, T* dk, T* dvs, Wide<T>* stack)) {                                                 \
    attention_dkv<Tiles<T, __VA_ARGS__>>(                                                                       \
        call, d, dv, {q, k, v, grad, lse, delta, {bias, mask, of_queries, of_keys}}, dk, dvs, stack);           \
  }

// The gradient of the bias.
#define BIAS_ENTRY(stem, T, bound, ...)                                                                         \
  KERNEL(stem##_dbias_##T, bound,                                                                               \
         (AttentionCall call, Dim d, Dim dv, BiasShape shape, const T* q, const T* k, const T* v, const T* grad, \
          const Wide<T>* lse, const Wide<T>* delta, const void* bias, const bool* mask, const i64* of_queries,  \
          const i64* of_keys, const u8* joins, void* out, Wide<T>* stack)) {                                    \
    attention_dbias<Tiles<T, __VA_ARGS__>>(                                                                     \
        call, d, dv, shape, {q, k, v, grad, lse, delta, {bias, mask, of_queries, of_keys}}, joins, out, stack); \
  }

// The kernels for head dims up to 64, up to 128, and up to 1024 (for which the host widens f16 and bf16).
#define NARROW(T, extras, dropout) ENTRIES(narrow, T, 512, 4, 4, 1, 1, false, extras, dropout)
#define WIDE(T, extras, dropout) ENTRIES(wide, T, 256, 4, 4, 2, 2, false, extras, dropout)
#define ANY(T, extras, dropout) ENTRIES(any, T, 256, 4, sizeof(T) == 8 ? 2 : 4, 1, 5, true, extras, dropout)
#define NARROW_BIAS(T, dropout) BIAS_ENTRY(narrow, T, 512, 4, 4, 1, 1, false, true, dropout)
#define ANY_BIAS(T, dropout) BIAS_ENTRY(any, T, 256, 4, sizeof(T) == 8 ? 2 : 4, 1, 5, true, true, dropout)
