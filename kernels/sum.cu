// Sums over any dims: one launch per dim, from the innermost reduced dim outwards. Narrow integers and bools are summed
// in i64.
#include "reduce.cuh"

#define SAME(T) REDUCTION(Sum, T)
#define HALF(T) REDUCTION_OF_HALVES(Sum, T)
NUMBERS(SAME)
HALF(f16)
HALF(bf16)
WIDE_REDUCTION(Sum, i32, i64)
WIDE_REDUCTION(Sum, u8, i64)
WIDE_REDUCTION(Sum, bool, i64)
