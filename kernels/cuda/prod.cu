// Products of rows, and of the other elements of each column.
#include "reduce.cuh"

struct Product {
  static constexpr bool ANY_ORDER = false;
  template <class A>
  static DEVICE A pad() {
    return A(1);
  }
  template <class A>
  static DEVICE A join(A a, A b) {
    return mul_(a, b);
  }
  template <class A>
  static DEVICE A finish(A a) {
    return a;
  }
};

REDUCTION(Product, f32)
REDUCTION(Product, f64)
REDUCTION(Product, i64)

// One thread per column: the products from above, then those from below with dy.
template <class T>
DEVICE void others(const T* dy, const T* x, T* out, u64 columns, u32 n) {
  u64 column = thread_index();
  if (column >= columns) return;
  T before = T(1), after = dy[column];
  for (u32 i = 0; i < n; ++i) {
    u64 at = i * columns + column;
    out[at] = before;
    before = before * x[at];
  }
  for (u32 i = n; i-- > 0;) {
    u64 at = i * columns + column;
    out[at] = out[at] * after;
    after = after * x[at];
  }
}

#define ENTRY(T)                                                                                  \
  KERNEL(others_##T, 256, (const T* dy, const T* x, T* out, u64 columns, u32 n)) {                \
    others(dy, x, out, columns, n);                                                               \
  }
ENTRY(f32)
ENTRY(f64)
