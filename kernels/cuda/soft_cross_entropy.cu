// sum(q (ln(s) - (logits - m))) along rows. The rows of q are `step` apart; classes with q = 0 contribute 0.
// One dtype at a time: f64, f32, f16, bf16.
#include "rows.cuh"

template <class T, class Row>
DEVICE void soft_cross_entropy_rows(Row& row, const T* x, const Wide<T>* q, const T* m, const Wide<T>* s, Wide<T>* out,
                                    u64 step) {
  typedef Wide<T> A;
  A most[Row::ALL], log[Row::ALL], all[Row::ALL];
  UNROLL for (u32 k = 0; k < Row::ALL; ++k) {
    most[k] = widen(m[row.index(k)]);
    log[k] = ln_(s[row.index(k)]);
  }
  auto held = row.hold(x);
  auto weights = row.hold(q, step == 0);
  row.template fold<Sum>(all, [&](u32 j, u32 i) {
    A weight = weights.at(j, i);
    A loss = weight * (log[row.of(j)] - (held.at(j, i) - most[row.of(j)]));
    return weight == A(0) ? A(0) : loss;
  });
  row.once([&](u32 j, u64 index) { out[index] = all[row.of(j)]; });
}

#define ENTRY(T)                                                                                                        \
  ROWS(soft_cross_entropy, T,                                                                                           \
       WITH(const T* x, const Wide<T>* q, const T* m, const Wide<T>* s, Wide<T>* out, u64 step), x, q, m, s, out, step)
FLOATS(ENTRY)
