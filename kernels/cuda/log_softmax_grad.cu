// dy - e^y sum(dy) along rows.
// One dtype at a time: f64, f32, f16, bf16.
#include "rows.cuh"

template <class T, class Row>
DEVICE void log_softmax_grad_rows(Row& row, const T* dy, const T* y, T* dx) {
  typedef Wide<T> A;
  auto held_dy = row.hold(dy);
  auto held_y = row.hold(y);
  A sum[Row::ALL];
  row.template fold<Sum>(sum, [&](u32 j, u32 i) { return held_dy.at(j, i); });
  row.store(dx, [&](u32 j, u32 i) { return fma_(-exp_(held_y.at(j, i)), sum[row.of(j)], held_dy.at(j, i)); });
}

#define ENTRY(T) ROWS(log_softmax_grad, T, WITH(const T* dy, const T* y, T* dx), dy, y, dx)
FLOATS(ENTRY)
