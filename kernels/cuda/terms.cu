// Sums of terms: of a function of each element and of one value per row or column. One launch sums the innermost
// reduced dim; sum.cu sums the others.
// One dtype at a time: f64, f32, f16, bf16.
#include "reduce.cuh"

// The terms; `with` has the result's shape. A is the type of the sums.
template <class A>
struct Deviation {
  static constexpr bool WITH = true;
  const A* values;
  DEVICE Deviation(const A* values, f64) : values(values) {}
  DEVICE A with(u64 to) const { return values[to]; }
  template <class In>
  DEVICE A of(In x, A m) const {
    return (A)widen(x) - m;
  }
};
template <class A>
struct SquaredDeviation : Deviation<A> {
  using Deviation<A>::Deviation;
  template <class In>
  DEVICE A of(In x, A m) const {
    A d = (A)widen(x) - m;
    return d * d;
  }
};
template <class A>
struct ExpDifference : Deviation<A> {
  using Deviation<A>::Deviation;
  template <class In>
  DEVICE A of(In x, A m) const {
    return exp_((A)widen(x) - m);
  }
};
// |x scale|^2: the term of Power for p = 2, without its loop.
template <class A>
struct Square : Deviation<A> {
  using Deviation<A>::Deviation;
  template <class In>
  DEVICE A of(In x, A scale) const {
    A y = abs_((A)widen(x) * scale);
    return y * y;
  }
};
// |x scale|^p: a product for p from 1 to 8, else e^(p ln |x scale|).
template <class A>
struct Power : Deviation<A> {
  f64 p;
  DEVICE Power(const A* values, f64 p) : Deviation<A>(values, p), p(p) {}
  template <class In>
  DEVICE A of(In x, A scale) const {
    A y = abs_((A)widen(x) * scale);
    if (p >= 1.0 && p <= 8.0 && floor_(p) == p) {
      A product = y;
      for (f64 k = 1.0; k < p; k += 1.0) product = product * y;
      return product;
    }
    return exp_((A)p * ln_(y));
  }
};

#define ENTRIES(name, TERM, T, A)                                                                                     \
  ROWS_ENTRY(name##_rows_##T, false, TERM, T, A)                                                                      \
  KERNEL(name##_columns_##T, 256, (const T* x, const A* with, A* out, KeptDims nest, u64 columns, u64 stride,         \
                                   u64 apart, u32 n, u32 depth, u32 split, u32 team, u32 halved, f64 p)) {            \
    reduce_columns<Sum>(x, out, nest, columns, stride, apart, n, depth, split, team, halved, TERM<A>(with, p));       \
  }
#define ROWS_ENTRY(NAME, PACKED, TERM, T, A)                                                                          \
  KERNEL(NAME, 256, (const T* x, const A* with, A* out, KeptDims nest, u64 rows, u64 apart, u32 n, u32 depth,         \
                     u32 split, u32 team, u32 halved, f64 p)) {                                                       \
    reduce_rows<Sum, PACKED>(x, out, nest, rows, apart, n, depth, split, team, halved, TERM<A>(with, p));             \
  }
// Powers are long code that memory does not bound, and have no entry for leaves of packs.
#define BOTH(name, TERM, T, A)    \
  ENTRIES(name, TERM, T, A)       \
  ROWS_ENTRY(name##_packed_rows_##T, true, TERM, T, A)
#define EACH(T)                                        \
  BOTH(deviation, Deviation, T, Wide<T>)               \
  BOTH(squared_deviation, SquaredDeviation, T, Wide<T>) \
  BOTH(exp_difference, ExpDifference, T, Wide<T>)      \
  BOTH(square, Square, T, Wide<T>)                     \
  ENTRIES(power, Power, T, Wide<T>)
FLOATS(EACH)
#define WIDE_POWER(T)              \
  BOTH(wide_square, Square, T, f64) \
  ENTRIES(wide_power, Power, T, f64)
UP_TO_F32(WIDE_POWER)
