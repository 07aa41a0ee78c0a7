// The gradient of exact attention in f64, masked by positions alone.
#include "attention_backward.cuh"

ANY(f64, false)
