// The gradient of causal attention on matrix units in bf16.
#include "attention_fast_backward.cuh"

SIZES(bf16)
