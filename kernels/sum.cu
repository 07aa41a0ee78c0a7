// Sums over any dims, one dim a launch: from the innermost reduced one out.
#include "reduce.cuh"

#define SAME(T) REDUCTION(Sum, T)
#define HALF(T) REDUCTION_OF_HALVES(Sum, T)
NUMBERS(SAME)
HALF(f16)
HALF(bf16)
