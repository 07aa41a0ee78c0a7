// The gradient of causal attention on matrix units in f16.
#include "attention_fast_backward.cuh"

SIZES(f16)
