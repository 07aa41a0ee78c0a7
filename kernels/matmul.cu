// matmul: products in exact mode, for every dtype, without matrix units: the CPU's bits.
#include "matmul_tile.cuh"

#define OPERANDS(T)                                                                                               \
  (const T* a, const T* b, T* c, Wide<T>* sums, Wide<T>* far, const Leaf* leaves, const Part* parts, Job job)
#define MULTIPLY(T, ...) multiply<T, __VA_ARGS__>(a, b, c, sums, far, leaves, parts, job)

// Large products: 8x8 elements a thread (8x4 of f64).
#define LARGE(T) \
  KERNEL(matmul_large_##T, THREADS, OPERANDS(T)) { MULTIPLY(T, 128, 64, 16, 8, 8, 8, 2); }
LARGE(f32)
LARGE(f16)
LARGE(bf16)
KERNEL(matmul_large_f64, THREADS, OPERANDS(f64)) { MULTIPLY(f64, 64, 64, 16, 8, 4, 8, 1); }

// Small ones: 4x4 elements a thread.
#define SMALL(T) \
  KERNEL(matmul_small_##T, THREADS, OPERANDS(T)) { MULTIPLY(T, 32, 64, 16, 4, 4, 4, 2); }
FLOATS(SMALL)

// Few rows, and one.
#define FEW(T) \
  KERNEL(matmul_few_##T, THREADS, OPERANDS(T)) { MULTIPLY(T, 8, 128, 32, 8, 1, 1, 1); }
FLOATS(FEW)
#define ONE(T) \
  KERNEL(matmul_one_##T, THREADS, OPERANDS(T)) { MULTIPLY(T, 1, 128, 32, 1, 1, 1, 1); }
FLOATS(ONE)

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

// Joins the parts of a contraction cut in 2^depth.
#define JOIN(T)                                                                          \
  KERNEL(matmul_join_##T, 256, (const Wide<T>* sums, T* c, u64 len, u32 depth)) {        \
    switch (depth) {                                                                     \
      case 1: return join_all<1>(sums, c, len);                                          \
      case 2: return join_all<2>(sums, c, len);                                          \
      case 3: return join_all<3>(sums, c, len);                                          \
      case 4: return join_all<4>(sums, c, len);                                          \
      case 5: return join_all<5>(sums, c, len);                                          \
      default: return join_all<6>(sums, c, len);                                         \
    }                                                                                    \
  }
FLOATS(JOIN)
