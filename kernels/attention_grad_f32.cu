// The gradient of exact attention in f32.
#include "attention_backward.cuh"

NARROW_AND_WIDE(f32)
ENTRIES(any, f32, 256, 256, 4, 4, 1, 5)
