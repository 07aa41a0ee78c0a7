// Causal attention, forward, in fast mode: one pass over the keys with a running maximum and sum, on matrix units, in
// f16 and bf16 (Dao, *FlashAttention-2*, 2023).
//
// A block has 128 queries of one head, and a warp 32, so that each fragment of keys serves two products. Keys and
// values arrive in two stages of asynchronous copies. Probabilities are rounded to the storage type before their
// product with v. benches/results/2026-11-27-h200.md has times.
#pragma once
#include "flash.cuh"

template <class S>
struct Rows {
  f32 max[S::MT][2], sum[S::MT][2];
};

// Turns scores into probabilities relative to the running maximum, and rescales sums and result to the new maximum.
// `base` is the scale times log2(e), which is positive.
template <class S>
DEVICE void soften(typename S::Scores& s, Rows<S>& rows, typename S::Result& o, f32 base) {
  UNROLL
  for (int m = 0; m < S::MT; m++) {
    UNROLL
    for (int h = 0; h < 2; h++) {
      f32 max = rows.max[m][h];
      UNROLL
      for (int n = 0; n < S::NT; n++) {
        max = fmaxf(max, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      }
      UNROLL
      for (int by = 1; by < 4; by *= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, by));
      }
      // A row without keys so far keeps sums of 0.
      f32 shift = max == -inf_f32() ? 0.0f : max * base, mend = exp2_fast(fmaf(rows.max[m][h], base, -shift));
      rows.max[m][h] = max;
      f32 sum = rows.sum[m][h] * mend;
      UNROLL
      for (int n = 0; n < S::NT; n++) {
        UNROLL
        for (int i = 2 * h; i < 2 * h + 2; i++) {
          s[m][n][i] = exp2_fast(fmaf(s[m][n][i], base, -shift));
          sum += s[m][n][i];
        }
      }
      rows.sum[m][h] = sum;
      UNROLL
      for (int n = 0; n < S::D / 8; n++) {
        o[m][n][2 * h] *= mend;
        o[m][n][2 * h + 1] *= mend;
      }
    }
  }
}

template <class S>
DEVICE void attention_fast(const AttentionCall& call, u32 d, u32 dv, const typename S::T* q, const typename S::T* k,
                           const typename S::T* v, typename S::T* o, f32* lse) {
  typedef typename S::T T;
  DYNAMIC_SHARED(shared);
  T* qs = (T*)shared;
  T *ks = qs + S::ROWS * S::PITCH, *vs = ks + 2 * S::COLS * S::PITCH;
  // The longest blocks first.
  u32 blocks = (call.queries + S::ROWS - 1) / S::ROWS, pairs = call.batch * call.heads;
  u32 query = (blocks - 1 - blockIdx.x / pairs) * S::ROWS, rows = min(call.queries - query, (u32)S::ROWS);
  u32 batch = blockIdx.x % pairs / call.heads, head = blockIdx.x % call.heads, group = head / (call.heads / call.groups);
  u32 keys = min(call.keys, call.q_start + query + rows);
  q += batch * call.q[0] + head * call.q[1] + query * call.q[2];
  k += batch * call.k[0] + group * call.k[1];
  v += batch * call.v[0] + group * call.v[1];
  auto stage = [&](u32 key) {
    u32 at = key / S::COLS % 2 * (S::COLS * S::PITCH);
    fetch<S, S::COLS>(ks + at, k + key * call.k[2], call.k[2], keys - key, d);
    fetch<S, S::COLS>(vs + at, v + key * call.v[2], call.v[2], keys - key, dv);
    copies_end();
  };
  fetch<S, S::ROWS>(qs, q, call.q[2], rows, d);
  stage(0);
  typename S::Result sum;
  flash_clear<S>(sum);
  Rows<S> stats;
  UNROLL
  for (int m = 0; m < S::MT; m++) {
    stats.max[m][0] = stats.max[m][1] = -inf_f32();
    stats.sum[m][0] = stats.sum[m][1] = 0.0f;
  }
  f32 base = (f32)(call.scale * 1.44269504088896340736);
  for (u32 key = 0; key < keys; key += S::COLS) {
    if (key + S::COLS < keys) {
      stage(key + S::COLS);
      copies_wait<1>();
    } else {
      copies_wait<0>();
    }
    __syncthreads();
    u32 at = key / S::COLS % 2 * (S::COLS * S::PITCH);
    typename S::Scores s;
    flash_dot<S>(s, qs, ks + at);
    if (key + S::COLS > min(keys, call.q_start + query + 1)) {
      UNROLL
      for (int m = 0; m < S::MT; m++) {
        UNROLL
        for (int n = 0; n < S::NT; n++) {
          UNROLL
          for (int i = 0; i < 4; i++) {
            u32 seen = min(call.q_start + query + flash_row<S>(m, i) + 1, keys);
            if (key + flash_col(n, i) >= seen) s[m][n][i] = -inf_f32();
          }
        }
      }
    }
    soften<S>(s, stats, sum, base);
    if constexpr (S::DROPOUT) {
      UNROLL
      for (int m = 0; m < S::MT; m++) {
        u32 kept = flash_keep_rows<S>(call, batch, head, query, key, m);
        UNROLL
        for (int n = 0; n < S::NT; n++) {
          UNROLL
          for (int i = 0; i < 4; i++) s[m][n][i] = kept >> (4 * n + i) & 1 ? s[m][n][i] : 0.0f;
        }
      }
    }
    typename S::Packed p;
    flash_pack<S>(p, s);
    flash_chain<S>(sum, p, vs + at);
    __syncthreads();
  }
  f32 scale[S::MT][2];
  UNROLL
  for (int m = 0; m < S::MT; m++) {
    UNROLL
    for (int h = 0; h < 2; h++) {
      f32 total = stats.sum[m][h];
      UNROLL
      for (int by = 1; by < 4; by *= 2) total += __shfl_xor_sync(0xffffffffu, total, by);
      scale[m][h] = (f32)call.factor / total;
      u32 row = flash_row<S>(m, 2 * h);
      if (row < rows && lane_t() == 0) {
        f32 log = fmaf(stats.max[m][h], (f32)call.scale, ln_f32(total));
        lse[((u64)batch * call.heads + head) * call.queries + query + row] = log;
      }
    }
  }
  u64 step = (u64)call.heads * dv;
  flash_store<S>(o + ((u64)batch * call.queries + query) * step + (u64)head * dv, step, rows, dv, sum, scale);
}

#define ENTRY(stem, T, ...)                                                                                        \
  KERNEL(stem##_##T, 128,                                                                                          \
         (AttentionCall call, u32 d, u32 dv, const T* q, const T* k, const T* v, T* o, f32* lse)) {                \
    attention_fast<Flash<T, __VA_ARGS__>>(call, d, dv, q, k, v, o, lse);                                           \
  }
#define FAST32(T, dropout) ENTRY(fast32, T, 32, 2, 8, dropout)
#define FAST64(T, dropout) ENTRY(fast64, T, 64, 2, 8, dropout)
#define FAST96(T, dropout) ENTRY(fast96, T, 96, 2, 4, dropout)
#define FAST128(T, dropout) ENTRY(fast128, T, 128, 2, 4, dropout)
