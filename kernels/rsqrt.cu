// 1 / sqrt x
#include "pointwise.cuh"

UNARY_FLOATS(rsqrt, recip_(sqrt_(x)))
