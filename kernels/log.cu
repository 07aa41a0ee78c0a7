// ln x
#include "pointwise.cuh"

UNARY_FLOATS(log, ln_(x))
