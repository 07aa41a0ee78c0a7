// e^x / sum(e^x) along rows.
// One dtype at a time: f64, f32, f16, bf16.
#include "rows.cuh"

template <class T, class Row>
DEVICE void softmax_rows(Row& row, const T* x, T* y) {
  typedef Wide<T> A;
  auto held = row.hold(x);
  A most[Row::ALL], all[Row::ALL];
  fold_largest(row, most, held);
  auto power = [&](u32 j, u32 i) { return exp_(held.at(j, i) - most[row.of(j)]); };
  typename Row::template Again<A> e;
  row.template fold<Sum>(all, [&](u32 j, u32 i) { return e.keep(j, power(j, i)); });
  UNROLL for (u32 k = 0; k < Row::ALL; ++k) all[k] = recip_(all[k]);
  row.store(y, [&](u32 j, u32 i) { return e.get(j, [&] { return power(j, i); }) * all[row.of(j)]; });
}

#define ENTRY(T) ROWS(softmax, T, WITH(const T* x, T* y), x, y)
FLOATS(ENTRY)
