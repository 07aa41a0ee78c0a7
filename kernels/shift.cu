// x + s
#include "pointwise.cuh"

UNARY_FLOATS(shift, x + of<A>(s))
