// x / y
#include "pointwise.cuh"

BINARY_FLOATS(div, x / y)
