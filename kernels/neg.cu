// -x; integers wrap
#include "pointwise.cuh"

DEVICE f32 negative(f32 x) { return -x; }
DEVICE f64 negative(f64 x) { return -x; }
template <class A>
DEVICE A negative(A x) {
  return sub_(A(0), x);
}

UNARY_NUMBERS(neg, negative(x))
