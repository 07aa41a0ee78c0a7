// Of (dy, y): dy (1 - y^2)
#include "pointwise.cuh"

BINARY_FLOATS(tanh_grad, x * (A(1) - y * y))
