// The gradient of exact attention in f16.
#include "attention_backward.cuh"

NARROW_AND_WIDE(f16)
