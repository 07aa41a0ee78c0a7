// The smaller
#include "pointwise.cuh"

BINARY_NUMBERS(minimum, min_(x, y))
