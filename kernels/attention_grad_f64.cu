// The gradient of exact attention in f64.
#include "attention_backward.cuh"

ENTRIES(any, f64, 256, 256, 4, 2, 1, 5)
