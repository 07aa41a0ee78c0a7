// Exact matrix products in f16.
#include "matmul.cuh"

MATMUL(f16, 128, 64, 32, 8, 8, 8, 2)
