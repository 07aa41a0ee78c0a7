// y (dy - sum(y dy)) along rows.
// One dtype at a time: f64, f32, f16, bf16.
#include "rows.cuh"

template <class T, class Row>
DEVICE void softmax_grad_rows(Row& row, const T* dy, const T* y, T* dx) {
  typedef Wide<T> A;
  auto held_dy = row.hold(dy);
  auto held_y = row.hold(y);
  A dot[Row::ALL];
  row.template fold<Sum>(dot, [&](u32 j, u32 i) { return held_dy.at(j, i) * held_y.at(j, i); });
  row.store(dx, [&](u32 j, u32 i) { return held_y.at(j, i) * (held_dy.at(j, i) - dot[row.of(j)]); });
}

#define ENTRY(T) ROWS(softmax_grad, T, WITH(const T* dy, const T* y, T* dx), dy, y, dx)
FLOATS(ENTRY)
