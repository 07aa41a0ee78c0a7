// Sums over any dims: one launch per dim, from the innermost reduced dim outwards. Narrow integers and bools are summed
// in i64.
// One dtype at a time: f64, f32, f16, bf16, i64, i32, u8, bool.
#include "reduce.cuh"

#define SAME(T) REDUCTION(Sum, T)
#define WIDE(T) WIDE_REDUCTION(Sum, T, i64)
#define HALF(T) REDUCTION_OF_HALVES(Sum, T)
NUMBERS(SAME)
HALVES(HALF)
SMALL_TYPES(WIDE)
