// x^y
#include "pow.cuh"

BINARY_FLOATS(pow, of<A>(power(x, y)))
