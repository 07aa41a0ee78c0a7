// The index of the first largest element. NaN counts as largest and zeros are equal, so the order of comparisons does
// not matter.
#include "reduce.cuh"

// A value with its index, compared and exchanged between lanes.
template <class T>
struct CompareAs {
  typedef Wide<T> type;
};
template <>
struct CompareAs<u8> {
  typedef u32 type;
};
template <>
struct CompareAs<bool> {
  typedef u32 type;
};

template <class A>
struct Best {
  A value;
  u32 index;
  DEVICE void meet(A other, u32 at) {
    bool nan = is_nan(value), other_nan = is_nan(other);
    bool equal = nan ? other_nan : other == value;
    bool wins = nan ? false : other_nan || other > value;
    if (wins || (equal && at < index)) value = other, index = at;
  }
};

// One warp per row; for a team, all 8 warps of the block.
template <class T>
DEVICE void argmax_rows(const T* x, i64* out, const KeptDims& nest, u64 rows, u32 n, u32 team) {
  typedef typename CompareAs<T>::type A;
  u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warps = 1u << team;
  u64 row = (thread_index() / LANES) >> team, from, to;
  bool live = row < rows;
  nest.offsets((u32)(live ? row : rows - 1), from, to);
  const T* at = x + from;
  Best<A> best{(A)widen(at[0]), 0};
  constexpr u32 V = PACK_LEN<T>;
  by_packs<V, 2>(
      at, n, (warp & (warps - 1)) * LANES + lane, LANES * warps,
      [&](u32 i) {
        Pack<T, V> pack = load_pack<V>(at + i);
        UNROLL for (u32 e = 0; e < V; ++e) best.meet((A)widen(pack.at[e]), i + e);
      },
      [&](u32 i) { best.meet((A)widen(at[i]), i); });
  UNROLL for (u32 bit = 1; bit < LANES; bit *= 2) {
    A value = __shfl_xor_sync(ALL_LANES, best.value, bit);
    best.meet(value, __shfl_xor_sync(ALL_LANES, best.index, bit));
  }
  SHARED A values[8];
  SHARED u32 indices[8];
  if (team > 0) {
    if (lane == 0) values[warp] = best.value, indices[warp] = best.index;
    __syncthreads();
    ROLLED for (u32 w = 0; w < warps; ++w) best.meet(values[w], indices[w]);
  }
  if (live && lane == 0 && (warp & (warps - 1)) == 0) out[to] = best.index;
}

// One thread per column.
template <class T>
DEVICE void argmax_columns(const T* x, i64* out, const KeptDims& nest, u64 columns, u64 stride, u32 n) {
  typedef typename CompareAs<T>::type A;
  u64 column = thread_index(), from, to;
  if (column >= columns) return;
  nest.offsets((u32)column, from, to);
  const T* at = x + from;
  Best<A> best{(A)widen(at[0]), 0};
  _Pragma("unroll 8") for (u32 i = 1; i < n; ++i) best.meet((A)widen(at[i * stride]), i);
  out[to] = best.index;
}

#define ENTRY(T)                                                                                             \
  KERNEL(rows_##T, 256, (const T* x, i64* out, KeptDims nest, u64 rows, u32 n, u32 team)) {                      \
    argmax_rows(x, out, nest, rows, n, team);                                                                \
  }                                                                                                          \
  KERNEL(columns_##T, 256, (const T* x, i64* out, KeptDims nest, u64 columns, u64 stride, u32 n)) {              \
    argmax_columns(x, out, nest, columns, stride, n);                                                        \
  }
ALL_TYPES(ENTRY)
