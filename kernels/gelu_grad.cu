// Of (dy, x): dy gelu'(x), of the exact function and of the usual approximation
#include "gelu.cuh"

template <class A>
DEVICE A gelu_grad_erf_of(A dy, A x) {
  x = bounded(x);
  A density = exp_(x * x * A(-0.5)) * A(GELU_DENSITY);
  return dy * fma_(x, density, phi(x));
}

template <class A>
DEVICE A gelu_grad_tanh_of(A dy, A x) {
  x = bounded(x);
  A square = x * x;
  A s = sigmoid_(x * fma_(square, A(GELU_V * GELU_C), A(GELU_V)));
  A slope = fma_(square, A(3.0 * GELU_V * GELU_C), A(GELU_V));
  return dy * (s * fma_(x * (A(1) - s), slope, A(1)));
}

BINARY_FLOATS(gelu_grad_erf, gelu_grad_erf_of(x, y))
BINARY_FLOATS(gelu_grad_tanh, gelu_grad_tanh_of(x, y))
