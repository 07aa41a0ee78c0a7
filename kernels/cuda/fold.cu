// Folds the parts of several ranks in a given order (src/comm/transport/fold.rs), element by element, rounded to the
// type after every join. The steps of the stack machine are the same for all elements, so no branch diverges. The top
// of the stack is in registers, the rest in shared memory. A thread folds 16 bytes if everything is aligned to that.
#include "num.cuh"

const u32 PARTS = 64, STEPS = 256;
const u8 JOIN = 254, EMPTY = 255;  // a smaller step pushes the part of its number

struct Parts {
  u64 at[PARTS];
};
struct Program {
  u8 step[STEPS];
};

enum Operation { SUM, MAX, MIN };

template <class T>
DEVICE T join(u32 op, T a, T b) {
  Wide<T> x = widen(a), y = widen(b);
  return narrow<T>(op == SUM ? add_(x, y) : op == MAX ? max_(x, y) : min_(x, y));
}
DEVICE bool join(u32 op, bool a, bool b) { return op == MIN ? a & b : a | b; }

template <class T, u32 N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

template <class T, u32 N>
DEVICE void fold(const Parts& parts, const Program& program, T* out, u64 packs, u32 steps, u32 op, Pack<T, N>* stack) {
  typedef Pack<T, N> P;
  u64 e = thread_index();
  if (e >= packs) return;
  stack += threadIdx.x;
  P top;
  UNROLL for (u32 k = 0; k < N; ++k) top.v[k] = T();
  u32 height = 0;
  for (u32 s = 0; s < steps; ++s) {
    u8 step = program.step[s];
    if (step == JOIN) {
      P left = stack[(height - 2) * blockDim.x];
      UNROLL for (u32 k = 0; k < N; ++k) top.v[k] = join(op, left.v[k], top.v[k]);
      height -= 1;
      continue;
    }
    if (height > 0) stack[(height - 1) * blockDim.x] = top;
    height += 1;
    if (step == EMPTY) {
      UNROLL for (u32 k = 0; k < N; ++k) top.v[k] = T();
    } else {
      top = ((const P*)parts.at[step])[e];
    }
  }
  for (u32 k = 0; k + 1 < height; ++k) ((P*)out)[k * packs + e] = stack[k * blockDim.x];
  if (height > 0) ((P*)out)[(height - 1) * packs + e] = top;
}

#define ENTRY(T)                                                                                                       \
  KERNEL(fold_##T, 256, (Parts parts, Program program, T* out, u64 packs, u32 steps, u32 op)) {                        \
    DYNAMIC_SHARED(stack);                                                                                             \
    fold<T, 1>(parts, program, out, packs, steps, op, (Pack<T, 1>*)stack);                                             \
  }                                                                                                                    \
  KERNEL(packed_##T, 256, (Parts parts, Program program, T* out, u64 packs, u32 steps, u32 op)) {                      \
    DYNAMIC_SHARED(stack);                                                                                             \
    fold<T, 16 / sizeof(T)>(parts, program, out, packs, steps, op, (Pack<T, 16 / sizeof(T)>*)stack);                   \
  }
ALL_TYPES(ENTRY)
