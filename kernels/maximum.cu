// The larger
#include "pointwise.cuh"

BINARY_NUMBERS(maximum, max_(x, y))
