// Minima over any dims: one launch per dim, from the innermost reduced dim outwards.
// One dtype at a time: f64, f32, f16, bf16, i64, i32, u8.
#include "reduce.cuh"

#define SAME(T) REDUCTION_IN_ANY_ORDER(Min, T)
#define HALF(T) REDUCTION_OF_HALVES_IN_ANY_ORDER(Min, T)
NUMBERS(SAME)
HALVES(HALF)
