// max(0, x)
#include "pointwise.cuh"

UNARY_FLOATS(relu, max_(A(0), x))
