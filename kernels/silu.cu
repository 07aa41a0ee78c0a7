// x sigmoid x
#include "pointwise.cuh"

// Minus infinity times 0 would be NaN; long before it the sigmoid is 0.
template <class A>
DEVICE A silu_of(A x) {
  x = x < A(-1e4) ? A(-1e4) : x;
  return x * sigmoid_(x);
}

UNARY_FLOATS(silu, silu_of(x))
