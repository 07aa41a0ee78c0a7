// Exact attention in f16.
#include "attention_forward.cuh"

NARROW_AND_WIDE(f16)
