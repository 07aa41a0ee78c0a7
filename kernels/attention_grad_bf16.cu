// The gradient of exact attention in bf16, masked by positions alone.
#include "attention_backward.cuh"

NARROW(bf16, false)
WIDE(bf16, false)
