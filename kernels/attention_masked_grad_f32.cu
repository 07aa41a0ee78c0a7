// The gradient of exact attention in f32 with a soft cap, a bias, a mask or documents.
#include "attention_backward.cuh"

NARROW(f32, true)
WIDE(f32, true)
ANY(f32, true)
