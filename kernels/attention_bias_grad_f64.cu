// The gradient of the bias of exact attention in f64.
#include "attention_backward.cuh"

ANY_BIAS(f64)
