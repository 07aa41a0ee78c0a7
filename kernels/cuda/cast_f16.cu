// From f16 to every dtype
#include "cast.cuh"

CASTS_FROM(f16)
