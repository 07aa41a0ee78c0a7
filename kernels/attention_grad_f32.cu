// The gradient of exact attention in f32, masked by positions alone.
#include "attention_backward.cuh"

NARROW(f32, false)
WIDE(f32, false)
ANY(f32, false)
