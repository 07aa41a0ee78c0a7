// sum(e^(x - m)) along rows, for a given m.
// One dtype at a time: f64, f32, f16, bf16.
#include "rows.cuh"

template <class T, class Row>
DEVICE void sum_exp_rows(Row& row, const T* x, const T* m, Wide<T>* sums) {
  typedef Wide<T> A;
  A most[Row::ALL], all[Row::ALL];
  UNROLL for (u32 k = 0; k < Row::ALL; ++k) most[k] = widen(m[row.index(k)]);
  auto held = row.pass(x);
  row.template fold_elements<Sum>(all, held, [&](u32 j, A e) { return exp_(e - most[row.of(j)]); });
  row.once([&](u32 j, u64 index) { sums[index] = all[row.of(j)]; });
}

#define ENTRY(T) ROWS(sum_exp, T, WITH(const T* x, const T* m, Wide<T>* sums), x, m, sums)
FLOATS(ENTRY)
