// Exact attention in bf16.
#include "attention_forward.cuh"

NARROW_AND_WIDE(bf16)
