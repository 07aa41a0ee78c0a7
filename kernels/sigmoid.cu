// 1 / (1 + e^-x)
#include "pointwise.cuh"

UNARY_FLOATS(sigmoid, sigmoid_(x))
