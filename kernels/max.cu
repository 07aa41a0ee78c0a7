// Maxima over any dims, one dim a launch: from the innermost reduced one out.
#include "reduce.cuh"

#define SAME(T) REDUCTION(Max, T)
#define HALF(T) REDUCTION_OF_HALVES(Max, T)
NUMBERS(SAME)
HALF(f16)
HALF(bf16)
