// x Phi(x), exact and by the usual approximation
#include "gelu.cuh"

template <class A>
DEVICE A gelu_erf_of(A x) {
  // Minus infinity times 0 would be NaN.
  A b = bounded(x);
  return (x < b ? b : x) * phi(b);
}

template <class A>
DEVICE A gelu_tanh_of(A x) {
  A b = bounded(x), v = b * fma_(b * b, A(GELU_V * GELU_C), A(GELU_V));
  return (x < b ? b : x) * sigmoid_(v);
}

UNARY_FLOATS(gelu_erf, gelu_erf_of(x))
UNARY_FLOATS(gelu_tanh, gelu_tanh_of(x))
