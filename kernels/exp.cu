// e^x
#include "pointwise.cuh"

UNARY_FLOATS(exp, exp_(x))
