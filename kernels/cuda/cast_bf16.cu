// From bf16 to every dtype
#include "cast.cuh"

CASTS_FROM(bf16)
