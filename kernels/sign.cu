// -1 or 1; zeros and NaN stay
#include "pointwise.cuh"

UNARY_FLOATS(sign, x != A(0) && !is_nan(x) ? copysign_(A(1), x) : x)
