// Attention, forward, with the bits of kernels/src/attention/forward.rs, and without a matrix of all scores.
//
// A block of threads has 64 queries of one head and loops twice over the keys that they attend to: first for the
// rows' maxima, then for the exponentials, their sums and their product with v. The CPU's bits require two passes: an
// exponential is taken of a score minus its row's final maximum, and cannot be computed with a running maximum and
// corrected later, as flash attention does. So there are three products of T^2 D / 2 fused multiply-adds per head, on
// the scalar units (matrix units do not compute a chain of IEEE operations); a flash kernel has two products on
// matrix units.
//
// The loops of products wait for shared memory most. Dropout costs one Philox block per four scores. benches/results/2026-11-27-h200.md has times.
#pragma once
#include "attention_tiles.cuh"

// The sums of rows of exponentials, which arrive as tiles by columns. Neighbouring elements of a leaf are added in
// pairs, one warp per row's leaf, eight rows at once; then the tree over leaves follows, whose waiting nodes are in
// shared memory. A tile has whole leaves, and as many nodes wait before a leaf as its index has ones.
template <class S>
struct RowSums {
  typedef typename S::A A;
  enum { GROUPS = 8 / S::WARPS };
  A* stack;
  A* sums;

  // Columns begin with `from`. The nodes before it are absent: they add nothing.
  DEVICE void begin(u32 from) {
    u32 waiting = ones_of(from / LEAF);
    for (u32 i = threadIdx.x; i < waiting * S::ROWS; i += S::THREADS) stack[i] = nothing<A>();
  }

  // Columns [first, first + COLS) of `width`.
  DEVICE void take(const A* p, u32 first, u32 width) {
    u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    ONCE
    for (u32 at = first; at < width && at < first + S::COLS; at += LEAF) {
      Node leaf = leaf_of_keys(at, width);
      UNROLL
      for (int g = 0; g < GROUPS; g++) {
        A part[8];
        UNROLL
        for (int i = 0; i < 8; i += 4) {
          Four<A> four_ = four(p + (at - first + lane) * S::STEP + 8 * (warp * GROUPS + g) + i);
          UNROLL
          for (int e = 0; e < 4; e++) part[i + e] = four_.x[e];
        }
        join(8 * (warp * GROUPS + g), fold(part), leaf, at + LEAF >= width);
      }
    }
  }

  // Lane l has the whole leaf's sum of row (l & 1) * 4 + (l & 2) + (l >> 2 & 1).
  DEVICE A fold(const A (&x)[8]) {
    u32 lane = threadIdx.x & 31;
    A four_[4], two[2];
    UNROLL
    for (int i = 0; i < 4; i++) {
      A keep = lane & 1 ? x[i + 4] : x[i], give = lane & 1 ? x[i] : x[i + 4];
      four_[i] = keep + __shfl_xor_sync(0xffffffffu, give, 1);
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
      A keep = lane & 2 ? four_[i + 2] : four_[i], give = lane & 2 ? four_[i] : four_[i + 2];
      two[i] = keep + __shfl_xor_sync(0xffffffffu, give, 2);
    }
    A keep = lane & 4 ? two[1] : two[0], give = lane & 4 ? two[0] : two[1];
    A one = keep + __shfl_xor_sync(0xffffffffu, give, 4);
    one = one + __shfl_xor_sync(0xffffffffu, one, 8);
    return one + __shfl_xor_sync(0xffffffffu, one, 16);
  }

  DEVICE void join(u32 rows, A sum, Node leaf, bool last) {
    u32 lane = threadIdx.x & 31, level = leaf.lefts;
    if (lane >= 8) return;
    u32 row = rows + (lane & 1) * 4 + (lane & 2) + (lane >> 2 & 1);
    for (u32 i = 0; i < leaf.joins; i++) sum = stack[--level * S::ROWS + row] + sum;
    if (last) sums[row] = sum;
    else stack[level * S::ROWS + row] = sum;
  }
};

template <class S>
struct Forward {
  typedef typename S::T T;
  typedef typename S::A A;
  const AttentionCall& call;
  const Dim& d;
  const Dim& dv;
  ScoreGiven given;
  // Shared memory: queries, keys or values, scores.
  A *x, *y, *p;
  RowSums<S> row_sums;

  DEVICE Forward(const AttentionCall& call_, const Dim& d_, const Dim& dv_, const ScoreGiven& given_, A* shared)
      : call(call_), d(d_), dv(dv_), given(given_), x(shared), y(x + S::ROWS * S::PITCH), p(y + S::COLS * S::PITCH) {
    row_sums.sums = p + S::COLS * S::STEP;
    row_sums.stack = row_sums.sums + S::ROWS;
  }

  // The scores of a tile; -inf for keys that are left out. False if all are.
  DEVICE bool scores(A (&s)[S::R][S::C], const TileAt& at, const T* q, const T* k) {
    u32 seen = seen_tile<S, false>(call, given, at);
    bool any = __syncthreads_or(seen != 0);
    if (any) {
      Side<S> xs = {x, q, call.q[2], at.queries}, ys = {y, k + at.key * call.k[2], call.k[2], at.keys};
      if (!S::CHUNKED || d.chunks == 1) load_cols(ys, d, 0);
      __syncthreads();
      dot<S, true>(s, xs, ys, d, p);
    }
    by_rows<S>(
        [&](int r, A(&s)[S::C]) {
          UNROLL
          for (int c = 0; c < S::C; c++) {
            A slope, product = (A)call.scale * s[c];
            s[c] = (A)-inf_f64();
            if (seen >> (r * S::C + c) & 1) {
              s[c] = score_of<S>(call, given, product, at, tile_row<S>(r), tile_x() + 16 * c, slope);
            }
          }
        },
        s);
    return any;
  }

  DEVICE void run(const QueryBlock& block, u32 batch, u32 head, u32 chunk, const T* q, const T* k, const T* v, T* o,
                  A* lse, A* stack) {
    A s[S::R][S::C], max[S::R];
    UNROLL
    for (int r = 0; r < S::R; r++) max[r] = (A)-inf_f64();
    fill<S>(s, (A)0.0);
    __syncthreads();
    if (threadIdx.x < S::ROWS) row_sums.sums[threadIdx.x] = (A)0.0;
    if (!S::CHUNKED || d.chunks == 1) load_rows(Side<S>{x, q, call.q[2], block.rows}, d, 0);
    row_sums.begin(block.from);
    Sum<S, true> sum;
    sum.begin(stack);
    sum.skip_to(block.from, block.keys);
    bool any = false, single = block.width <= block.from + S::COLS;
    // The first pass takes the maxima; the second one adds.
    ONCE
    for (u32 pass = 0; pass < 2; pass++) {
      for (u32 key = block.from; key < block.width; key += S::COLS) {
        u32 keys = key < block.keys ? min(block.keys - key, (u32)S::COLS) : 0;
        TileAt at = {batch, head, block.start, block.rows, key, keys};
        // A single tile's scores are still there.
        if (pass == 0 || !single) any = scores(s, at, q, k);
        if (pass == 0) {
          UNROLL
          for (int r = 0; r < S::R; r++) {
            UNROLL
            for (int c = 0; c < S::C; c++) max[r] = s[r][c] > max[r] ? s[r][c] : max[r];
          }
          continue;
        }
        by_rows<S>(
            [&](int, A(&s)[S::C], A& max) {
              UNROLL
              for (int c = 0; c < S::C; c++) s[c] = s[c] == (A)-inf_f64() ? nothing<A>() : exp_(s[c] - max);
            },
            s, max);
        put<S>(p, s);
        __syncthreads();
        row_sums.take(p, key, block.width);
        TileKind kind = EMPTY;
        if (any) {
          load_cols(Side<S>{y, v + key * call.v[2], call.v[2], keys}, dv, chunk);
          if constexpr (S::DROPOUT) {
            u32 kept = keep_tile<S>(call, at);
            UNROLL
            for (int r = 0; r < S::R; r++) {
              UNROLL
              for (int c = 0; c < S::C; c++) {
                s[r][c] = s[r][c] * (kept >> (r * S::C + c) & 1 ? (A)call.factor : (A)0.0);
              }
            }
            __syncthreads();
            put<S>(p, s);
          }
          __syncthreads();
          kind = kind_of<S>(s, y, keys);
        }
        sum.add(p, y, key, keys, block.keys, 0, true, kind);
      }
      if (pass > 0) break;
      UNROLL
      for (int r = 0; r < S::R; r++) {
        UNROLL
        for (int lane = 8; lane > 0; lane /= 2) {
          A other = __shfl_xor_sync(0xffffffffu, max[r], lane);
          max[r] = other > max[r] ? other : max[r];
        }
        if (max[r] == (A)-inf_f64()) max[r] = (A)0.0;
      }
    }
    __syncthreads();
    store(sum, max, block, batch, head, chunk, o, lse);
  }

  DEVICE void store(const Sum<S, true>& sum, const A (&max)[S::R], const QueryBlock& block, u32 batch, u32 head, u32 chunk, T* o,
                    A* lse) {
    A scale[S::R];
    UNROLL
    for (int r = 0; r < S::R; r++) {
      u32 row = tile_row<S>(r);
      A total = row_sums.sums[row];
      bool none = total == (A)0.0;
      scale[r] = none ? (A)0.0 : recip_(total);
      if (chunk == 0 && tile_x() == 0 && row < block.rows) {
        lse[((u64)batch * call.heads + head) * call.queries + block.start + row] =
            none ? (A)-inf_f64() : ln_(total) + max[r];
      }
    }
    u64 step = (u64)call.heads * dv.len;
    T* to = o + ((u64)batch * call.queries + block.start) * step + (u64)head * dv.len;
    sum.store(to, step, block.rows, dv, chunk, [&](int r, A x) { return x * scale[r] + (A)0.0; });
  }
};

// Blocks in x share heads and blocks of queries, the longest first; blocks in y have chunks of v's dim.
template <class S>
DEVICE void attention(const AttentionCall& call, const Dim& d, const Dim& dv, const typename S::T* q,
                      const typename S::T* k, const typename S::T* v, const ScoreGiven& given,
                      typename S::T* o, typename S::A* lse, typename S::A* scratch) {
  DYNAMIC_SHARED(shared);
  Forward<S> forward(call, d, dv, given, (typename S::A*)shared);
  u64 own = (u64)blockIdx.y * gridDim.x + blockIdx.x;
  typename S::A* stack = scratch + own * call.levels * (S::ROWS * S::CHUNK);
  u32 blocks = query_blocks(call), pairs = call.batch * call.heads, each = call.heads / call.groups;
  for (u32 item = blockIdx.x; item < blocks * pairs; item += gridDim.x) {
    QueryBlock block = query_block(call, blocks - 1 - item / pairs);
    u32 batch = item % pairs / call.heads, head = item % call.heads;
    forward.run(block, batch, head, blockIdx.y, q + batch * call.q[0] + head * call.q[1] + block.start * call.q[2],
                k + batch * call.k[0] + head / each * call.k[1], v + batch * call.v[0] + head / each * call.v[1], o,
                lse, stack);
  }
}

// `bound` is the number of threads that a multiprocessor is to hold, which limits the registers of each.
#define ENTRY(stem, T, bound, ...)                                                                                  \
  KERNEL(stem##_##T, bound,                                                                                         \
         (AttentionCall call, Dim d, Dim dv, const T* q, const T* k, const T* v, const void* bias, const bool* mask, \
          const i64* of_queries, const i64* of_keys, T* o, Wide<T>* lse, Wide<T>* stack)) {                         \
    attention<Tiles<T, __VA_ARGS__>>(call, d, dv, q, k, v, {bias, mask, of_queries, of_keys}, o, lse, stack);       \
  }

// The kernels for head dims up to 64, up to 128, and up to 1024 (for which the host widens f16 and bf16).
#define NARROW(T, extras, dropout) ENTRY(narrow, T, 512, 4, 4, 1, 1, false, extras, dropout)
#define WIDE(T, extras, dropout) ENTRY(wide, T, 512, 4, 4, 2, 2, false, extras, dropout)
#define ANY(T, extras, dropout) ENTRY(any, T, 256, 4, sizeof(T) == 8 ? 2 : 4, 1, 5, true, extras, dropout)
