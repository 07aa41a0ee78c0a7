// |x|
#include "pointwise.cuh"

UNARY_FLOATS(abs, abs_(x))
