// The gradient of the bias of exact attention in f32.
#include "attention_backward.cuh"

NARROW_BIAS(f32)
ANY_BIAS(f32)
