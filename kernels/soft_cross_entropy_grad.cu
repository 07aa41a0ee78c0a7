// dy (sum e^(logits - m) / s - q), with the sum of each row of q as a number or in `sums`.
//
// Long rows are divided into pieces of 2048 elements, one per block; in short rows, threads count through all elements.
#include "num.cuh"

const u32 PIECE = 2048;

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
  DEVICE T at(T x, u64 i) const { return narrow<T>(exp_(widen(x) - m) * share - dy * q[i]); }
};

template <class T>
DEVICE void soft_cross_entropy_grad(const T* x, const Wide<T>* q, const T* m, const Wide<T>* s, const Wide<T>* dy,
                                    const Wide<T>* sums, T* out, f64 number, u64 step, u64 rows, u32 held, u32 pieces) {
  if (pieces == 0) {
    u64 e = thread_index(), row = e / held;
    if (row >= rows) return;
    SoftRow<T> loss(q, m, s, dy, sums, number, row, step);
    out[e] = loss.at(x[e], e - row * held);
    return;
  }
  u64 row = blockIdx.x / pieces;
  SoftRow<T> loss(q, m, s, dy, sums, number, row, step);
  x += row * held, out += row * held;
  u32 start = blockIdx.x % pieces * PIECE, end = start + PIECE < held ? start + PIECE : held;
  for (u32 i = start + threadIdx.x; i < end; i += 256) out[i] = loss.at(x[i], i);
}

#define ENTRY(T)                                                                                                          \
  KERNEL(soft_cross_entropy_grad_##T, 256,                                                                                \
         (const T* x, const Wide<T>* q, const T* m, const Wide<T>* s, const Wide<T>* dy, const Wide<T>* sums, T* out,     \
          f64 number, u64 step, u64 rows, u32 held, u32 pieces)) {                                                        \
    soft_cross_entropy_grad<T>(x, q, m, s, dy, sums, out, number, step, rows, held, pieces);                              \
  }
FLOATS(ENTRY)
