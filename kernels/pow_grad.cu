// The derivatives of x^y: of (dz, x, y), dz y x^(y - 1); and of (dz, x, z), dz z ln x
#include "pow.cuh"

TERNARY_FLOATS(pow_grad_base, z == A(0) ? A(0) : x * (z * of<A>(power(y, z - A(1)))))
TERNARY_FLOATS(pow_grad_exponent, y == A(0) || z == A(0) ? A(0) : x * (z * ln_(y)))
