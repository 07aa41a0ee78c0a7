// The gradient of exact attention in f64 with a soft cap, a bias, a mask or documents.
#include "attention_backward.cuh"

ANY(f64, true)
