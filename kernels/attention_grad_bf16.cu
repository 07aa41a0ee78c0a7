// attention_grad of bf16.
#include "attention_backward.cuh"

NARROW_AND_WIDE(bf16)
