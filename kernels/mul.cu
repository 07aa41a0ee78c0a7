// x y
#include "pointwise.cuh"

BINARY_NUMBERS(mul, mul_(x, y))
