// Exact matrix products in bf16.
#include "matmul.cuh"

MATMUL(bf16, 3, 128, 64, 16, 8, 8, 8, 2)
