// Minima over any dims: one launch per dim, from the innermost reduced dim outwards.
#include "reduce.cuh"

#define SAME(T) REDUCTION(Min, T)
#define HALF(T) REDUCTION_OF_HALVES(Min, T)
NUMBERS(SAME)
HALF(f16)
HALF(bf16)
