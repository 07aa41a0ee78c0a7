// Exact attention in f64, masked by positions alone.
#include "attention_forward.cuh"

ANY(f64, false)
