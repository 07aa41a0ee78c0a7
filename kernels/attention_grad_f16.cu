// attention_grad of f16.
#include "attention_backward.cuh"

NARROW_AND_WIDE(f16)
