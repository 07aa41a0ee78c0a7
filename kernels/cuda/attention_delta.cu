// The dot products of the rows of attention's output and its gradient, with which both backward passes start. They
// have the CPU's bits and are bound by memory.
#include "attention.cuh"
#include "packs.cuh"

// The rows of o and of its gradient, by index.
template <class T>
struct DeltaRows {
  const AttentionCall& call;
  const T *o, *grad;
  // Moves both pointers to a row. Divisions of 32 bits are several times as fast.
  DEVICE void at(u64 row, const T*& os, const T*& gs) const {
    u64 head = row >> 32 ? row / call.queries : (u32)row / call.queries, i = row - head * call.queries;
    u64 b = head >> 32 ? head / call.heads : (u32)head / call.heads, h = head - b * call.heads;
    os = o + b * call.o[0] + h * call.o[1] + i * call.o[2];
    gs = grad + b * call.grad[0] + h * call.grad[1] + i * call.grad[2];
  }
};

// Rows whose length is a power of two, by packs: the tree of such a row is perfect, and neighbours in it are neighbours in
// a pack, then in lanes. A warp takes 32 V / len rows at a time.
template <u32 V, class T>
DEVICE void delta_by_packs(const DeltaRows<T>& of, u32 len, u64 rows, Wide<T>* delta) {
  u32 lane = threadIdx.x & 31, lanes = len / V, each = 32 / lanes;
  u64 warps = threads_len() / 32;
  for (u64 first = thread_index() / 32 * each; first < rows; first += warps * each) {
    u64 row = first + lane / lanes;
    const T *os, *gs;
    of.at(row < rows ? row : rows - 1, os, gs);
    Pack<T, V> x = load_pack<V>(os + lane % lanes * V), y = load_pack<V>(gs + lane % lanes * V);
    Wide<T> v[V];
    UNROLL for (u32 e = 0; e < V; ++e) v[e] = widen(x.at[e]) * widen(y.at[e]);
    UNROLL for (u32 by = 1; by < V; by *= 2) {
      UNROLL for (u32 e = 0; e < V; e += 2 * by) v[e] = v[e] + v[e + by];
    }
    for (u32 by = 1; by < lanes; by *= 2) v[0] = v[0] + __shfl_xor_sync(0xffffffffu, v[0], by);
    if (row < rows && lane % lanes == 0) delta[row] = v[0];
  }
}

// The sum of o times its gradient per row, one warp per row: neighbouring elements of a leaf are added in pairs.
template <class T>
DEVICE void attention_delta(const AttentionCall& call, u32 len, const T* o, const T* grad, Wide<T>* delta) {
  typedef Wide<T> A;
  u32 lane = threadIdx.x & 31;
  u64 rows = (u64)call.batch * call.heads * call.queries, warps = threads_len() / 32;
  DeltaRows<T> of{call, o, grad};
  constexpr u32 V = PACK_LEN<T>;
  u64 places = (u64)o / sizeof(T) | (u64)grad / sizeof(T);
  UNROLL for (int d = 0; d < 3; ++d) places |= call.o[d] | call.grad[d];
  if (places % V == 0 && (len & (len - 1)) == 0 && len >= V && len <= 32 * V) {
    return delta_by_packs<V>(of, len, rows, delta);
  }
  for (u64 row = thread_index() / 32; row < rows; row += warps) {
    const T *os, *gs;
    of.at(row, os, gs);
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
