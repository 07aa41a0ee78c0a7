// Exact attention in f64 with a soft cap, a bias, a mask or documents.
#include "attention_forward.cuh"

ANY(f64, true)
