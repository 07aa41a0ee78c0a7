// The gradient of exact attention in bf16.
#include "attention_backward.cuh"

NARROW_AND_WIDE(bf16)
