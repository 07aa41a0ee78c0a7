// tanh x
#include "pointwise.cuh"

UNARY_FLOATS(tanh, tanh_(x))
