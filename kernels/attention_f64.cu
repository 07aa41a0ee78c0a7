// Exact attention in f64.
#include "attention_forward.cuh"

ENTRY(any, f64, 256, 256, 4, 2, 1, 5)
