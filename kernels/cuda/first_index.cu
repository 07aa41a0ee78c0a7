// The first index along a dim at which an element equals a value, plus `start`, or the largest i64. A NaN equals a NaN.
#include "reduce.cuh"

template <class A>
DEVICE bool is_same(A x, A value) {
  return x == value;
}
DEVICE bool is_same(f32 x, f32 value) { return is_nan(value) ? is_nan(x) : x == value; }
DEVICE bool is_same(f64 x, f64 value) { return is_nan(value) ? is_nan(x) : x == value; }

DEVICE i64 index_or_none(u32 found, u64 start) { return found == ~0u ? 0x7fffffffffffffffll : (i64)(start + found); }

// One warp per row.
template <class T>
DEVICE void first_in_rows(const T* x, const T* value, i64* out, const KeptDims& nest, u64 rows, u64 start, u32 n) {
  u32 lane = threadIdx.x % LANES, found = ~0u;
  u64 row = thread_index() / LANES, from, to;
  bool live = row < rows;
  nest.offsets((u32)(live ? row : rows - 1), from, to);
  Wide<T> of = widen(value[to]);
  ROLLED for (u32 i = lane; i < n && found == ~0u; i += LANES) {
    if (is_same(widen(x[from + i]), of)) found = i;
  }
  UNROLL for (u32 bit = 1; bit < LANES; bit *= 2) {
    u32 other = __shfl_xor_sync(ALL_LANES, found, bit);
    found = other < found ? other : found;
  }
  if (live && lane == 0) out[to] = index_or_none(found, start);
}

// One thread per column.
template <class T>
DEVICE void first_in_columns(const T* x, const T* value, i64* out, const KeptDims& nest, u64 columns, u64 stride, u64 start,
                             u32 n) {
  u64 column = thread_index(), from, to;
  if (column >= columns) return;
  nest.offsets((u32)column, from, to);
  Wide<T> of = widen(value[to]);
  u32 i = 0;
  while (i < n && !is_same(widen(x[from + i * stride]), of)) i++;
  out[to] = index_or_none(i < n ? i : ~0u, start);
}

#define ENTRY(T)                                                                                                    \
  KERNEL(rows_##T, 256, (const T* x, const T* value, i64* out, KeptDims nest, u64 rows, u64, u64 start, u32 n)) {   \
    first_in_rows(x, value, out, nest, rows, start, n);                                                             \
  }                                                                                                                 \
  KERNEL(columns_##T, 256, (const T* x, const T* value, i64* out, KeptDims nest, u64 columns, u64 stride, u64 start, \
                            u32 n)) {                                                                               \
    first_in_columns(x, value, out, nest, columns, stride, start, n);                                               \
  }
ALL_TYPES(ENTRY)
