// Exact matrix products in bf16.
#include "matmul.cuh"

MATMUL(bf16, 128, 64, 32, 8, 8, 8, 2)
