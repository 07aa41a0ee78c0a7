// x - y
#include "pointwise.cuh"

BINARY_NUMBERS(sub, sub_(x, y))
