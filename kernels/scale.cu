// x s
#include "pointwise.cuh"

UNARY_FLOATS(scale, x * of<A>(s))
