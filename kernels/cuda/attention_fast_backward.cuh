// Causal attention, backward, in fast mode: on matrix units, in f16 and bf16 (Dao, *FlashAttention-2*, 2023).
//
// A dq block has 64 queries of one head and loops over the keys that they attend to; a dkv block has 64 keys of one
// key head and loops over the queries that attend to them. No two blocks add to the same memory, so each run has the
// same bits, at the cost of 7 products instead of the 5 of a kernel that adds dq with atomics. Probabilities and
// their gradients are rounded to the storage type before their products. benches/results/2026-11-27-h200.md
// has times.
#pragma once
#include "flash.cuh"

// Turns a tile's scores into probabilities, with dropout's factor, and its products with grad into the scores'
// gradients.
template <class S>
DEVICE void fast_slope(const AttentionCall& call, f32& s, f32& ds, f32 base, f32 lse, f32 delta, bool shown, bool kept) {
  f32 p = exp2_fast(fmaf(s, base, lse * -1.44269504088896340736f)), factor = !S::DROPOUT ? 1.0f : kept ? (f32)call.factor : 0.0f;
  s = shown ? p * factor : 0.0f;
  ds = shown ? (f32)call.scale * (p * (ds * factor - delta)) : 0.0f;
}

template <class S>
struct FastGiven {
  const typename S::T *q, *k, *v, *grad;
  const f32 *lse, *delta;
};

template <class S>
DEVICE void fast_dq(const AttentionCall& call, u32 d, u32 dv, FastGiven<S> given, typename S::T* dq) {
  typedef typename S::T T;
  DYNAMIC_SHARED(shared);
  T* qs = (T*)shared;
  T *gs = qs + S::ROWS * S::PITCH, *ks = gs + S::ROWS * S::PITCH, *vs = ks + 2 * S::COLS * S::PITCH;
  u32 blocks = (call.queries + S::ROWS - 1) / S::ROWS, pairs = call.batch * call.heads;
  u32 query = (blocks - 1 - blockIdx.x / pairs) * S::ROWS, rows = min(call.queries - query, (u32)S::ROWS);
  u32 batch = blockIdx.x % pairs / call.heads, head = blockIdx.x % call.heads, group = head / (call.heads / call.groups);
  u32 keys = min(call.keys, call.q_start + query + rows);
  const T* k = given.k + batch * call.k[0] + group * call.k[1];
  const T* v = given.v + batch * call.v[0] + group * call.v[1];
  auto stage = [&](u32 key) {
    u32 at = key / S::COLS % 2 * (S::COLS * S::PITCH);
    fetch<S, S::COLS>(ks + at, k + key * call.k[2], call.k[2], keys - key, d);
    fetch<S, S::COLS>(vs + at, v + key * call.v[2], call.v[2], keys - key, dv);
    copies_end();
  };
  fetch<S, S::ROWS>(qs, given.q + batch * call.q[0] + head * call.q[1] + query * call.q[2], call.q[2], rows, d);
  fetch<S, S::ROWS>(gs, given.grad + batch * call.grad[0] + head * call.grad[1] + query * call.grad[2], call.grad[2],
                    rows, dv);
  stage(0);
  u64 first = ((u64)batch * call.heads + head) * call.queries + query;
  f32 lse[S::MT][2], delta[S::MT][2], scale[S::MT][2], base = (f32)(call.scale * 1.44269504088896340736);
  UNROLL
  for (int m = 0; m < S::MT; m++) {
    UNROLL
    for (int h = 0; h < 2; h++) {
      u32 row = flash_row<S>(m, 2 * h);
      lse[m][h] = row < rows ? given.lse[first + row] : 0.0f;
      delta[m][h] = row < rows ? given.delta[first + row] : 0.0f;
      scale[m][h] = 1.0f;
    }
  }
  typename S::Result sum;
  flash_clear<S>(sum);
  for (u32 key = 0; key < keys; key += S::COLS) {
    if (key + S::COLS < keys) {
      stage(key + S::COLS);
      copies_wait<1>();
    } else {
      copies_wait<0>();
    }
    __syncthreads();
    u32 at = key / S::COLS % 2 * (S::COLS * S::PITCH);
    typename S::Scores s, ds;
    flash_dot<S>(s, qs, ks + at);
    flash_dot<S>(ds, gs, vs + at);
    UNROLL
    for (int m = 0; m < S::MT; m++) {
      u32 kept = S::DROPOUT ? flash_keep_rows<S>(call, batch, head, query, key, m) : 0xffffffffu;
      UNROLL
      for (int n = 0; n < S::NT; n++) {
        UNROLL
        for (int i = 0; i < 4; i++) {
          bool shown = key + flash_col(n, i) < min(call.q_start + query + flash_row<S>(m, i) + 1, keys);
          fast_slope<S>(call, s[m][n][i], ds[m][n][i], base, lse[m][i / 2], delta[m][i / 2], shown,
                     kept >> (4 * n + i) & 1);
        }
      }
    }
    typename S::Packed p;
    flash_pack<S>(p, ds);
    flash_chain<S>(sum, p, ks + at);
    __syncthreads();
  }
  u64 step = (u64)call.heads * d;
  flash_store<S>(dq + ((u64)batch * call.queries + query) * step + (u64)head * d, step, rows, d, sum, scale);
}

template <class S>
DEVICE void fast_dkv(const AttentionCall& call, u32 d, u32 dv, FastGiven<S> given, typename S::T* dk,
                     typename S::T* dvs) {
  typedef typename S::T T;
  DYNAMIC_SHARED(shared);
  T* ks = (T*)shared;
  T *vs = ks + S::ROWS * S::PITCH, *qs = vs + S::ROWS * S::PITCH, *gs = qs + 2 * S::COLS * S::PITCH;
  u32 pairs = call.batch * call.groups, key = blockIdx.x / pairs * S::ROWS, rows = min(call.keys - key, (u32)S::ROWS);
  u32 batch = blockIdx.x % pairs / call.groups, group = blockIdx.x % call.groups, each = call.heads / call.groups;
  fetch<S, S::ROWS>(ks, given.k + batch * call.k[0] + group * call.k[1] + key * call.k[2], call.k[2], rows, d);
  fetch<S, S::ROWS>(vs, given.v + batch * call.v[0] + group * call.v[1] + key * call.v[2], call.v[2], rows, dv);
  // Loops over the tiles of queries of all heads, from the first query that attends to a key.
  u32 from = key > call.q_start ? key - call.q_start : 0;
  u32 tiles = from < call.queries ? (call.queries - from + S::COLS - 1) / S::COLS : 0;
  auto stage = [&](u32 index) {
    u32 head = group * each + index / tiles, query = from + index % tiles * S::COLS, count = call.queries - query;
    u32 at = index % 2 * (S::COLS * S::PITCH);
    const T* q = given.q + batch * call.q[0] + head * call.q[1] + query * call.q[2];
    const T* grad = given.grad + batch * call.grad[0] + head * call.grad[1] + query * call.grad[2];
    fetch<S, S::COLS>(qs + at, q, call.q[2], count, d);
    fetch<S, S::COLS>(gs + at, grad, call.grad[2], count, dv);
    copies_end();
  };
  typename S::Result sum_k, sum_v;
  flash_clear<S>(sum_k);
  flash_clear<S>(sum_v);
  f32 scale[S::MT][2], base = (f32)(call.scale * 1.44269504088896340736);
  UNROLL
  for (int m = 0; m < S::MT; m++) scale[m][0] = scale[m][1] = 1.0f;
  if (tiles > 0) stage(0);
  for (u32 index = 0; index < tiles * each; index++) {
    if (index + 1 < tiles * each) {
      stage(index + 1);
      copies_wait<1>();
    } else {
      copies_wait<0>();
    }
    __syncthreads();
    u32 head = group * each + index / tiles, query = from + index % tiles * S::COLS;
    u32 at = index % 2 * (S::COLS * S::PITCH);
    u64 first = ((u64)batch * call.heads + head) * call.queries + query;
    typename S::Scores s, ds;
    flash_dot<S>(s, ks, qs + at);
    flash_dot<S>(ds, vs, gs + at);
    u32 kept[S::MT];
    UNROLL
    for (int m = 0; m < S::MT; m++) {
      kept[m] = S::DROPOUT ? flash_keep_cols<S>(call, batch, head, query, key, m) : 0xffffffffu;
    }
    UNROLL
    for (int n = 0; n < S::NT; n++) {
      UNROLL
      for (int e = 0; e < 2; e++) {
        u32 col = flash_col(n, e), seen = min(call.q_start + query + col + 1, call.keys);
        bool there = query + col < call.queries;
        f32 lse = there ? given.lse[first + col] : 0.0f, delta = there ? given.delta[first + col] : 0.0f;
        UNROLL
        for (int m = 0; m < S::MT; m++) {
          UNROLL
          for (int i = e; i < 4; i += 2) {
            bool shown = there && key + flash_row<S>(m, i) < seen;
            fast_slope<S>(call, s[m][n][i], ds[m][n][i], base, lse, delta, shown, kept[m] >> (4 * n + i) & 1);
          }
        }
      }
    }
    typename S::Packed p;
    flash_pack<S>(p, s);
    flash_chain<S>(sum_v, p, gs + at);
    flash_pack<S>(p, ds);
    flash_chain<S>(sum_k, p, qs + at);
    __syncthreads();
  }
  // Without tiles no group has the copies of k and v yet.
  copies_end();
  copies_wait<0>();
  u64 step = (u64)call.groups * d, step_v = (u64)call.groups * dv, at = (u64)batch * call.keys + key;
  flash_store<S>(dk + at * step + (u64)group * d, step, rows, d, sum_k, scale);
  flash_store<S>(dvs + at * step_v + (u64)group * dv, step_v, rows, dv, sum_v, scale);
}

#define ENTRY(stem, T, ...)                                                                                         \
  KERNEL(stem##_dq_##T, 128,                                                                                        \
         (AttentionCall call, u32 d, u32 dv, const T* q, const T* k, const T* v, const T* grad, const f32* lse,     \
          const f32* delta, T* dq)) {                                                                               \
    fast_dq<Flash<T, __VA_ARGS__>>(call, d, dv, {q, k, v, grad, lse, delta}, dq);                                   \
  }                                                                                                                 \
  KERNEL(stem##_dkv_##T, 128,                                                                                       \
         (AttentionCall call, u32 d, u32 dv, const T* q, const T* k, const T* v, const T* grad, const f32* lse,     \
          const f32* delta, T* dk, T* dvs)) {                                                                       \
    fast_dkv<Flash<T, __VA_ARGS__>>(call, d, dv, {q, k, v, grad, lse, delta}, dk, dvs);                             \
  }
#define FAST32(T, dropout) ENTRY(fast32, T, 32, 1, 8, dropout)
#define FAST64(T, dropout) ENTRY(fast64, T, 64, 1, 8, dropout)
#define FAST96(T, dropout) ENTRY(fast96, T, 96, 1, 4, dropout)
#define FAST128(T, dropout) ENTRY(fast128, T, 128, 1, 4, dropout)
