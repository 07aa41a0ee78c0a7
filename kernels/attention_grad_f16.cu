// The gradient of exact attention in f16, masked by positions alone.
#include "attention_backward.cuh"

NARROW(f16, false)
WIDE(f16, false)
