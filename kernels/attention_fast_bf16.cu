// Causal attention on matrix units in bf16.
#include "attention_fast_forward.cuh"

SIZES(bf16)
