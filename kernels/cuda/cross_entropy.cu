// ln(s) - (logits[target] - m) and the square of ln(s) + m, one thread per row. The rank that stores the target's class
// computes the loss; the rank that stores the first class contributes the 0 of an ignored row.
// One dtype at a time: f64, f32, f16, bf16.
#include "cross_entropy.cuh"

template <class T>
DEVICE void cross_entropy(const T* logits, const i64* target, const T* m, const Wide<T>* s, Wide<T>* out, u64 rows, u64 held,
                          u64 classes, u64 start, const Terms& terms, u32 code, Fault* faults) {
  u64 r = thread_index();
  if (r >= rows) return;
  Wide<T> o = Num<Wide<T>>::sum_pad();
  u64 index = (u64)target[r], place = index - start;
  if (terms.ignore(target[r])) {
    if (held > 0 && start == 0) o = Wide<T>(0);
  } else if (index >= classes) {
    report(faults, code, (i64)index);
  } else if (place < held) {
    o = terms.loss(widen(logits[r * held + place]), widen(m[r]), s[r]);
  }
  out[r] = o;
}

#define ENTRY(T)                                                                                                          \
  KERNEL(cross_entropy_##T, 256, (const T* logits, const i64* target, const T* m, const Wide<T>* s, Wide<T>* out, u64 rows, \
                                  u64 held, u64 classes, u64 start, Terms terms, u32 code, Fault* faults)) {              \
    cross_entropy<T>(logits, target, m, s, out, rows, held, classes, start, terms, code, faults);                         \
  }
FLOATS(ENTRY)
