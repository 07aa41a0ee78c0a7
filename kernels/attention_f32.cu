// Exact attention in f32.
#include "attention_forward.cuh"

NARROW_AND_WIDE(f32)
ENTRY(any, f32, 256, 256, 4, 4, 1, 5)
