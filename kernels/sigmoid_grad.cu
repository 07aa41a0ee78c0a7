// Of (dy, y): dy y (1 - y)
#include "pointwise.cuh"

BINARY_FLOATS(sigmoid_grad, x * (y * (A(1) - y)))
