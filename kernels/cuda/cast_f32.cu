// From f32 to every dtype
#include "cast.cuh"

CASTS_FROM(f32)
