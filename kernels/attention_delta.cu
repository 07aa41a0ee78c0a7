// The dot products of the rows of attention's output and its gradient, with which both backward passes start. They
// have the CPU's bits and are bound by memory.
#include "attention.cuh"

// The sum of o times its gradient per row, one warp per row: neighbouring elements of a leaf are added in pairs.
template <class T>
DEVICE void attention_delta(const AttentionCall& call, u32 len, const T* o, const T* grad, Wide<T>* delta) {
  typedef Wide<T> A;
  u32 lane = threadIdx.x & 31;
  u64 rows = (u64)call.batch * call.heads * call.queries, warps = threads_len() / 32;
  for (u64 row = thread_index() / 32; row < rows; row += warps) {
    u64 head = row / call.queries, i = row % call.queries, b = head / call.heads, h = head % call.heads;
    const T* os = o + b * call.o[0] + h * call.o[1] + i * call.o[2];
    const T* gs = grad + b * call.grad[0] + h * call.grad[1] + i * call.grad[2];
    // The stack of finished nodes: a head's dim has at most 32 leaves.
    A node[5], sum = (A)0.0;
    for (u32 at = 0; at < len;) {
      Node leaf = leaf_of(at, len, 32);
      sum = lane < leaf.len ? widen(os[at + lane]) * widen(gs[at + lane]) : nothing<A>();
      UNROLL
      for (int by = 1; by < 32; by *= 2) sum = sum + __shfl_xor_sync(0xffffffffu, sum, by);
      for (u32 join = 0; join < leaf.joins; join++) {
        sum = node[0] + sum;
        UNROLL
        for (int n = 0; n < 4; n++) node[n] = node[n + 1];
      }
      UNROLL
      for (int n = 4; n > 0; n--) node[n] = node[n - 1];
      node[0] = sum;
      at += leaf.len;
    }
    if (lane == 0) delta[row] = sum;
  }
}

#define DELTA(T)                                                                                              \
  KERNEL(delta_##T, 256, (AttentionCall call, u32 len, const T* o, const T* grad, Wide<T>* delta)) {          \
    attention_delta(call, len, o, grad, delta);                                                               \
  }
FLOATS(DELTA)
