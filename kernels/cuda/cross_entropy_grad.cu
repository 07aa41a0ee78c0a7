// dy (factor e^(logits - m) / s - nll onehot(target)), and 0 in ignored rows.
//
// Long rows are divided into pieces, one per block; in short rows, threads count through all elements (pieces.cuh).
// One dtype at a time: f64, f32, f16, bf16.
#include "cross_entropy.cuh"
#include "pieces.cuh"

template <class T>
struct LossRow {
  Wide<T> m, share, dy;
  u64 place;
  bool ignored;
  DEVICE LossRow(const i64* target, const T* ms, const Wide<T>* s, const Wide<T>* dys, u64 row, u64 start, const Terms& terms)
      : m(widen(ms[row])),
        share(dys[row] * terms.softmax_factor(m, s[row]) / s[row]),
        dy(dys[row] * of<Wide<T>>(terms.nll)),
        place((u64)target[row] - start),
        ignored(terms.ignore(target[row])) {}
  // Reports a target that is no class.
  static DEVICE void check(const i64* target, u64 row, u64 classes, const Terms& terms, u32 code, Fault* faults) {
    if ((u64)target[row] >= classes && !terms.ignore(target[row])) report(faults, code, target[row]);
  }
  DEVICE T at(T x, u64 i) const {
    if (ignored) return narrow<T>(Wide<T>(0));
    Wide<T> out = exp_(widen(x) - m) * share;
    return narrow<T>(i == place ? out - dy : out);
  }
  // The same for the elements of a pack, from index i on.
  template <u32 V>
  DEVICE void each(Pack<T, V>& pack, u64 i) const {
    UNROLL for (u32 e = 0; e < V; ++e) pack.at[e] = at(pack.at[e], i + e);
  }
};

template <class T>
DEVICE void cross_entropy_grad(const T* x, const i64* target, const T* m, const Wide<T>* s, const Wide<T>* dy, T* out, u64 rows,
                               u32 held, u64 classes, u64 start, u32 pieces, u32 each, const Terms& terms, u32 code, Fault* faults) {
  if (pieces == 0) {
    u64 e = thread_index() * each, row = e / held;
    if (row >= rows) return;
    u32 i = (u32)(e - row * held);
    if (i == 0) LossRow<T>::check(target, row, classes, terms, code, faults);
    LossRow<T> loss(target, m, s, dy, row, start, terms);
    gradient_of_few(loss, x + e, out + e, i, each);
    return;
  }
  u64 row = blockIdx.x / pieces;
  u32 piece = blockIdx.x % pieces;
  if (piece == 0 && threadIdx.x == 0) LossRow<T>::check(target, row, classes, terms, code, faults);
  LossRow<T> loss(target, m, s, dy, row, start, terms);
  gradient_of_piece(loss, x + row * held, out + row * held, piece, held);
}

#define ENTRY(T)                                                                                                         \
  KERNEL(cross_entropy_grad_##T, 256,                                                                                    \
         (const T* x, const i64* target, const T* m, const Wide<T>* s, const Wide<T>* dy, T* out, u64 rows, u32 held,    \
          u64 classes, u64 start, u32 pieces, u32 each, Terms terms, u32 code, Fault* faults)) {                         \
    cross_entropy_grad<T>(x, target, m, s, dy, out, rows, held, classes, start, pieces, each, terms, code, faults);      \
  }
FLOATS(ENTRY)
