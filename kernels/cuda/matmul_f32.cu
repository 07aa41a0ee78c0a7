// Exact matrix products in f32.
#include "matmul.cuh"

MATMUL(f32, 128, 64, 16, 8, 8, 8, 2)
