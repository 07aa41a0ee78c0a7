// Products in exact mode, without matrix units: the CPU's bits. The entries of one dtype.
//
// What large f32 products are expected to cost on Hopper; counted in machine code, measured nowhere yet.
// Instructions of a thread for a leaf of 32 indices: 2048 multiply-adds, 128 16-byte reads of shared memory, 50 around those
// loops, 300 to bring the operands (48 of them copy, where the contraction's indices lie side by side), 120 to fold: one node
// of 64 values written and one read and added. So 77% of all instructions are multiply-adds: exactness costs 5%, and some
// 45 TFLOP/s are expected of an H100's 67. Leaves of 24 (contractions of 768, 3072): 75%.
// Bytes at full speed, for each clock of a multiprocessor: 64 of 128 from shared memory for operands, and 12 for the slots
// there; 12 from the second cache for operands, 4 read and 4 written for slots beyond shared memory.
// Registers: 211, without spills; two blocks of 128 threads, each with 25 KiB of panels and 32 KiB a slot.
// Few rows: the right operand is read once, at what memory gives; four blocks have 64 KiB on their way to a multiprocessor.
#pragma once
#include "matmul_tile.cuh"

// The sum over 2^D parts, whose node they are halves of halves of.
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

// Large products; small ones, 4x4 elements a thread; few rows, and one; and what joins the parts of a contraction cut in
// 2^depth. The extents of `large` are the tile's rows and columns, the contraction's indices at a time, a thread's rows and
// columns, a warp's threads down, and warps below one another.
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
