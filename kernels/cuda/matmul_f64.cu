// Exact matrix products in f64.
#include "matmul.cuh"

MATMUL(f64, 64, 64, 16, 8, 4, 8, 1)
