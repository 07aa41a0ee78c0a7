// Exact attention in bf16, masked by positions alone.
#include "attention_forward.cuh"

NARROW(bf16, false)
WIDE(bf16, false)
