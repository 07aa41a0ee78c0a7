// ln(s) + m - logits[target], one thread per row. The rank that stores the first class adds the statistics, and the
// rank that stores the target's class subtracts its logit.
#include "num.cuh"

template <class T>
DEVICE void cross_entropy(const T* logits, const i64* target, const T* m, const Wide<T>* s, Wide<T>* out, u64 rows, u64 held,
                          u64 classes, u64 start, u32 code, Fault* faults) {
  u64 r = thread_index();
  if (r >= rows) return;
  u64 index = (u64)target[r], place = index - start;
  if (index >= classes) {
    report(faults, code, (i64)index);
    place = held;
  }
  Wide<T> o = Num<Wide<T>>::sum_pad();
  if (held > 0 && start == 0) o = ln_(s[r]) + widen(m[r]);
  if (place < held) o = o - widen(logits[r * held + place]);
  out[r] = o;
}

#define ENTRY(T)                                                                                                          \
  KERNEL(cross_entropy_##T, 256, (const T* logits, const i64* target, const T* m, const Wide<T>* s, Wide<T>* out, u64 rows, \
                                  u64 held, u64 classes, u64 start, u32 code, Fault* faults)) {                           \
    cross_entropy<T>(logits, target, m, s, out, rows, held, classes, start, code, faults);                                \
  }
FLOATS(ENTRY)
