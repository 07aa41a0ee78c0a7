// Exact attention in f16, masked by positions alone.
#include "attention_forward.cuh"

NARROW(f16, false)
WIDE(f16, false)
