// Of (dy, y): dy where y is above 0
#include "pointwise.cuh"

BINARY_FLOATS(relu_grad, y <= A(0) ? A(0) : x)
