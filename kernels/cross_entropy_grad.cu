// dy (e^(logits - m) / s - onehot(target)).
//
// Long rows are divided into pieces of 2048 elements, one per block; in short rows, threads count through all elements.
#include "num.cuh"

const u32 PIECE = 2048;

template <class T>
struct LossRow {
  Wide<T> m, share, dy;
  u64 place;
  DEVICE LossRow(const i64* target, const T* ms, const Wide<T>* s, const Wide<T>* dys, u64 row, u64 start)
      : m(widen(ms[row])), share(dys[row] / s[row]), dy(dys[row]), place((u64)target[row] - start) {}
  DEVICE T at(T x, u64 i) const {
    Wide<T> out = exp_(widen(x) - m) * share;
    return narrow<T>(i == place ? out - dy : out);
  }
};

template <class T>
DEVICE void cross_entropy_grad(const T* x, const i64* target, const T* m, const Wide<T>* s, const Wide<T>* dy, T* out, u64 rows,
                               u32 held, u64 classes, u64 start, u32 pieces, u32 code, Fault* faults) {
  if (pieces == 0) {
    u64 e = thread_index(), row = e / held;
    if (row >= rows) return;
    u32 i = (u32)(e - row * held);
    if (i == 0 && (u64)target[row] >= classes) report(faults, code, target[row]);
    LossRow<T> loss(target, m, s, dy, row, start);
    out[e] = loss.at(x[e], i);
    return;
  }
  u64 row = blockIdx.x / pieces;
  u32 piece = blockIdx.x % pieces;
  if (piece == 0 && threadIdx.x == 0 && (u64)target[row] >= classes) report(faults, code, target[row]);
  LossRow<T> loss(target, m, s, dy, row, start);
  x += row * held, out += row * held;
  u32 first = piece * PIECE + threadIdx.x;
  if (piece * PIECE + PIECE <= held) {
    T v[PIECE / 256];
    UNROLL for (u32 k = 0; k < PIECE / 256; ++k) v[k] = x[first + k * 256];
    UNROLL for (u32 k = 0; k < PIECE / 256; ++k) out[first + k * 256] = loss.at(v[k], first + k * 256);
  } else {
    for (u32 i = first; i < held; i += 256) out[i] = loss.at(x[i], i);
  }
}

#define ENTRY(T)                                                                                                         \
  KERNEL(cross_entropy_grad_##T, 256,                                                                                    \
         (const T* x, const i64* target, const T* m, const Wide<T>* s, const Wide<T>* dy, T* out, u64 rows, u32 held,    \
          u64 classes, u64 start, u32 pieces, u32 code, Fault* faults)) {                                                \
    cross_entropy_grad<T>(x, target, m, s, dy, out, rows, held, classes, start, pieces, code, faults);                   \
  }
FLOATS(ENTRY)
