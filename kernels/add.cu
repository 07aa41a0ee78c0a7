// x + y
#include "pointwise.cuh"

BINARY_NUMBERS(add, add_(x, y))
