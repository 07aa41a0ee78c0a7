// Causal attention on matrix units in f16.
#include "attention_fast_forward.cuh"

SIZES(f16)
