// Exact matrix products, without matrix units, with the CPU's bits: the entries of one dtype. benches/results/2026-11-27-h200.md has times.
//
// Instructions of a thread per leaf of 32 indices: 2048 multiply-adds, 128 16-byte reads of shared memory, 50 for the
// loops, 300 to load the operands (48 copies, if the contraction's indices are contiguous), and 120 to fold: one node
// of 64 values is written and one is read and added. So most instructions are multiply-adds, and exactness costs little.
// Two warps per partition do not hide what comes between the loops (docs/cuda.md, section 9).
//
// Registers: 209 in f32, 227 in bf16, without spills; two blocks of 128 threads, each with 25 or 50 KiB of panels and 32 KiB
// per slot. On an A100 the panels of bf16 leave no room for a slot.
//
// Few rows: the right operand is read once, at the speed of memory; four blocks have 64 KiB in flight to a
// multiprocessor.
#pragma once
#include "matmul_tile.cuh"

// The sum over 2^D parts, which are the nodes at depth D.
template <u32 D, class W>
DEVICE W halves(const W* sums, u64 step) {
  if constexpr (D == 0) {
    return *sums;
  } else {
    W left = halves<D - 1>(sums, step);
    return left + halves<D - 1>(sums + (step << (D - 1)), step);
  }
}

template <u32 D, class T>
DEVICE void join_all(const Wide<T>* sums, T* c, u64 len) {
  for (u64 i = thread_index(); i < len; i += threads_len()) c[i] = narrow<T>(halves<D>(sums + i, len));
}

#define MULTIPLY(name, T, ...)                                                                                     \
  KERNEL(name##_##T, THREADS,                                                                                      \
         (const T* a, const T* b, T* c, Wide<T>* sums, Wide<T>* far, const Leaf* leaves, const Part* parts, GemmJob job)) { \
    multiply<T, __VA_ARGS__>(a, b, c, sums, far, leaves, parts, job);                                              \
  }

// The entries: large products; small ones, with 4x4 elements per thread; few rows, and one row; and the kernel that
// joins the 2^depth parts of a contraction. The extents of `large` are the tile's rows and columns, the indices of
// the contraction at a time, a thread's rows and columns, the threads of a warp down, and the warps below one
// another.
#define MATMUL(T, ...)                                                            \
  MULTIPLY(matmul_large, T, __VA_ARGS__)                                          \
  MULTIPLY(matmul_small, T, 32, 64, 16, 4, 4, 4, 2)                               \
  MULTIPLY(matmul_few, T, 8, 128, 32, 8, 1, 1, 1)                                 \
  MULTIPLY(matmul_one, T, 1, 128, 32, 1, 1, 1, 1)                                 \
  KERNEL(matmul_join_##T, 256, (const Wide<T>* sums, T* c, u64 len, u32 depth)) { \
    switch (depth) {                                                              \
      case 1: return join_all<1>(sums, c, len);                                   \
      case 2: return join_all<2>(sums, c, len);                                   \
      case 3: return join_all<3>(sums, c, len);                                   \
      case 4: return join_all<4>(sums, c, len);                                   \
      case 5: return join_all<5>(sums, c, len);                                   \
      default: return join_all<6>(sums, c, len);                                  \
    }                                                                             \
  }
