// The square root
#include "pointwise.cuh"

UNARY_FLOATS(sqrt, sqrt_(x))
