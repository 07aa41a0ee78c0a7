// Exact matrix products in f16.
#include "matmul.cuh"

MATMUL(f16, 3, 128, 64, 16, 8, 8, 8, 2)
