// Tiles of fast attention: products on matrix units between operands in shared memory. Their errors are a few
// roundings to the storage type.
//
// A block of four warps has ROWS rows (MT times 16 per warp) and NT times 8 columns. Operands are stored
// by rows of the head's dim D, padded by 16 bytes, so that eight rows are in different banks.
#pragma once
#include "attention.cuh"
#include "mma.cuh"

template <class T_, int D_, int MT_, int NT_, bool DROPOUT_>
struct Flash {
  typedef T_ T;
  enum { D = D_, MT = MT_, NT = NT_, THREADS = 128, ROWS = 64 * MT_, COLS = 8 * NT_, PITCH = D_ + 8, DROPOUT = DROPOUT_ };
  // The accumulators of scores and of a result.
  typedef f32 Scores[MT_][NT_][4];
  typedef f32 Result[MT_][D_ / 8][4];
  // Scores as the left operand of the next product.
  typedef u32 Packed[MT_][NT_ / 2][4];
};

DEVICE int lane_g() { return threadIdx.x % 32 / 4; }
DEVICE int lane_t() { return threadIdx.x % 4; }
// The row of a block's tile that holds element i of the m-th sixteen rows.
template <class S>
DEVICE u32 flash_row(int m, int i) {
  return threadIdx.x / 32 * (16 * S::MT) + 16 * m + lane_g() + (i / 2) * 8;
}
DEVICE u32 flash_col(int n, int i) { return 8 * n + 2 * lane_t() + i % 2; }

// Starts to copy `rows` rows of `dim` elements; the rest becomes 0.
template <class S, int ROWS>
DEVICE void fetch(typename S::T* to, const typename S::T* from, u64 step, u32 rows, u32 dim) {
  enum { ACROSS = S::D / 8 };
  UNROLL
  for (u32 i = threadIdx.x; i < (u32)(ROWS * ACROSS); i += S::THREADS) {
    u32 row = i / ACROSS, col = i % ACROSS * 8;
    bool there = row < rows && col < dim;
    copy_async(to + row * S::PITCH + col, there ? from + row * step + col : from, there);
  }
}

// Rows of x times rows of y.
template <class S>
DEVICE void flash_dot(typename S::Scores& s, const typename S::T* x, const typename S::T* y) {
  u32 lane = threadIdx.x % 32;
  const typename S::T* xs = x + (threadIdx.x / 32 * (16 * S::MT) + lane % 16) * S::PITCH + lane / 16 * 8;
  const typename S::T* ys = y + (lane % 8 + lane / 16 * 8) * S::PITCH + lane / 8 % 2 * 8;
  UNROLL
  for (int m = 0; m < S::MT; m++) {
    UNROLL
    for (int n = 0; n < S::NT; n++) {
      UNROLL
      for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
    }
  }
  UNROLL
  for (int k = 0; k < S::D; k += 16) {
    u32 a[S::MT][4];
    UNROLL
    for (int m = 0; m < S::MT; m++) load_matrices(a[m], xs + 16 * m * S::PITCH + k);
    UNROLL
    for (int n = 0; n < S::NT; n += 2) {
      u32 b[4];
      load_matrices(b, ys + 8 * n * S::PITCH + k);
      UNROLL
      for (int m = 0; m < S::MT; m++) {
        MatrixUnit<typename S::T>::mma(s[m][n], a[m], b[0], b[1]);
        MatrixUnit<typename S::T>::mma(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <class S>
DEVICE void flash_pack(typename S::Packed& p, const typename S::Scores& s) {
  typedef MatrixUnit<typename S::T> Unit;
  UNROLL
  for (int m = 0; m < S::MT; m++) {
    UNROLL
    for (int n = 0; n < S::NT; n += 2) {
      UNROLL
      for (int i = 0; i < 4; i++) p[m][n / 2][i] = Unit::pack(s[m][n + i / 2][i % 2 * 2], s[m][n + i / 2][i % 2 * 2 + 1]);
    }
  }
}

// Adds scores times y, whose rows are the scores' columns.
template <class S>
DEVICE void flash_chain(typename S::Result& sum, const typename S::Packed& p, const typename S::T* y) {
  u32 lane = threadIdx.x % 32;
  const typename S::T* ys = y + (lane % 16) * S::PITCH + lane / 16 * 8;
  UNROLL
  for (int k = 0; k < S::NT / 2; k++) {
    UNROLL
    for (int n = 0; n < S::D / 8; n += 2) {
      u32 b[4];
      load_transposed(b, ys + 16 * k * S::PITCH + 8 * n);
      UNROLL
      for (int m = 0; m < S::MT; m++) {
        MatrixUnit<typename S::T>::mma(sum[m][n], p[m][k], b[0], b[1]);
        MatrixUnit<typename S::T>::mma(sum[m][n + 1], p[m][k], b[2], b[3]);
      }
    }
  }
}

template <class S>
DEVICE void flash_clear(typename S::Result& sum) {
  UNROLL
  for (int m = 0; m < S::MT; m++) {
    UNROLL
    for (int n = 0; n < S::D / 8; n++) {
      UNROLL
      for (int i = 0; i < 4; i++) sum[m][n][i] = 0.0f;
    }
  }
}

// Stores `rows` rows of `dim` elements; row (m, i) is multiplied by scale[m][i / 2].
template <class S>
DEVICE void flash_store(typename S::T* to, u64 step, u32 rows, u32 dim, const typename S::Result& sum,
                        const f32 (&scale)[S::MT][2]) {
  UNROLL
  for (int m = 0; m < S::MT; m++) {
    UNROLL
    for (int i = 0; i < 4; i += 2) {
      u32 row = flash_row<S>(m, i);
      UNROLL
      for (int n = 0; n < S::D / 8; n++) {
        u32 col = flash_col(n, 0);
        f32 by = scale[m][i / 2];
        u32 pair = MatrixUnit<typename S::T>::pack(sum[m][n][i] * by, sum[m][n][i + 1] * by);
        if (row < rows && col < dim) *(u32*)(to + row * step + col) = pair;
      }
    }
  }
}

// ---- dropout -------------------------------------------------------------------------------------------------------

// If rows are queries: for the m-th sixteen rows, bit 4 n + i tells whether element i of columns from 8 n on is kept.
// Two lanes share a Philox block.
template <class S>
DEVICE u32 flash_keep_rows(const AttentionCall& call, u32 batch, u32 head, u32 query, u32 key, int m) {
  u32 mine = 0, kept = 0;
  int t = lane_t(), half = t & 1;
  u64 e = drawn_row(call, batch, head, query + flash_row<S>(m, 2 * half)) + key + (t & 2) * 2;
  UNROLL
  for (int n = 0; n < S::NT; n++) mine |= keep_four(call, e + 8 * n) << 4 * n;
  u32 other = __shfl_xor_sync(0xffffffffu, mine, 1), first = half ? other : mine, second = half ? mine : other;
  UNROLL
  for (int n = 0; n < S::NT; n++) {
    kept |= (first >> (4 * n + 2 * half) & 3) << 4 * n | (second >> (4 * n + 2 * half) & 3) << (4 * n + 2);
  }
  return kept;
}

// If rows are keys and columns queries: four lanes share four Philox blocks.
template <class S>
DEVICE u32 flash_keep_cols(const AttentionCall& call, u32 batch, u32 head, u32 query, u32 key, int m) {
  u32 mine = 0, kept = 0;
  int g = lane_g(), which = g & 3;
  u32 row = key + (flash_row<S>(m, which) - which);
  UNROLL
  for (int n = 0; n < S::NT; n++) {
    mine |= keep_four(call, drawn_row(call, batch, head, query + flash_col(n, which)) + row) << 4 * n;
  }
  UNROLL
  for (int i = 0; i < 4; i++) {
    u32 theirs = __shfl_sync(0xffffffffu, mine, (int)(threadIdx.x & 19) | i << 2);
    UNROLL
    for (int n = 0; n < S::NT; n++) kept |= (theirs >> (4 * n + which) & 1) << (4 * n + i);
  }
  return kept;
}
