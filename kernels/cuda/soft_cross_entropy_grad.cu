// dy (sum e^(logits - m) / s - q), with the sum of each row of q as a number or in `sums`.
//
// Long rows are divided into pieces, one per block; in short rows, threads count through all elements (pieces.cuh).
// One dtype at a time: f64, f32, f16, bf16.
#include "num.cuh"
#include "pieces.cuh"

template <class T>
struct SoftRow {
  Wide<T> m, share, dy;
  const Wide<T>* q;
  DEVICE SoftRow(const Wide<T>* q, const T* ms, const Wide<T>* s, const Wide<T>* dys, const Wide<T>* sums, f64 number, u64 row,
                 u64 step)
      : m(widen(ms[row])),
        share(dys[row] * (sums ? sums[row] : of<Wide<T>>(number)) / s[row]),
        dy(dys[row]),
        q(q + row * step) {}
  DEVICE T element(T x, Wide<T> weight) const { return narrow<T>(exp_(widen(x) - m) * share - dy * weight); }
  DEVICE T at(T x, u64 i) const { return element(x, q[i]); }
  // The same for the elements of a pack, from index i on.
  template <u32 V>
  DEVICE void each(Pack<T, V>& pack, u64 i) const {
    Pack<Wide<T>, V> weights = load_any<V>(q + i);
    UNROLL for (u32 e = 0; e < V; ++e) pack.at[e] = element(pack.at[e], weights.at[e]);
  }
};

template <class T>
DEVICE void soft_cross_entropy_grad(const T* x, const Wide<T>* q, const T* m, const Wide<T>* s, const Wide<T>* dy,
                                    const Wide<T>* sums, T* out, f64 number, u64 step, u64 rows, u32 held, u32 pieces, u32 each) {
  if (pieces == 0) {
    u64 e = thread_index() * each, row = e / held;
    if (row >= rows) return;
    SoftRow<T> loss(q, m, s, dy, sums, number, row, step);
    gradient_of_few(loss, x + e, out + e, (u32)(e - row * held), each);
    return;
  }
  u64 row = blockIdx.x / pieces;
  SoftRow<T> loss(q, m, s, dy, sums, number, row, step);
  gradient_of_piece(loss, x + row * held, out + row * held, blockIdx.x % pieces, held);
}

#define ENTRY(T)                                                                                                          \
  KERNEL(soft_cross_entropy_grad_##T, 256,                                                                                \
         (const T* x, const Wide<T>* q, const T* m, const Wide<T>* s, const Wide<T>* dy, const Wide<T>* sums, T* out,     \
          f64 number, u64 step, u64 rows, u32 held, u32 pieces, u32 each)) {                                                        \
    soft_cross_entropy_grad<T>(x, q, m, s, dy, sums, out, number, step, rows, held, pieces, each);                              \
  }
FLOATS(ENTRY)
