// x^s. The exponent stays f64 where the elements are narrower: 1/3 is then not rounded to f32 first.
#include "pow.cuh"

UNARY_FLOATS(pow_scalar, of<A>(power(x, s)))
UNARY_FLOATS(pow_scalar_square, x * x)
UNARY_FLOATS(pow_scalar_cube, x * x * x)
UNARY_FLOATS(pow_scalar_recip, recip_(x))
