// Of (dy, x): dy s (1 + x (1 - s)) with s = sigmoid x
#include "pointwise.cuh"

// Beyond the bounds the derivative is 0 or 1; infinity times 0 would be NaN.
template <class A>
DEVICE A silu_grad_of(A dy, A x) {
  x = abs_(x) > A(1e4) ? copysign_(A(1e4), x) : x;
  A s = sigmoid_(x);
  return dy * (s * (x * (A(1) - s) + A(1)));
}

BINARY_FLOATS(silu_grad, silu_grad_of(x, y))
