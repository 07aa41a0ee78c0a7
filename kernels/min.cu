// Minima over any dims, one dim a launch: from the innermost reduced one out.
#include "reduce.cuh"

#define SAME(T) REDUCTION(Min, T)
#define HALF(T) REDUCTION_OF_HALVES(Min, T)
NUMBERS(SAME)
HALF(f16)
HALF(bf16)
