// From i32 to every dtype
#include "cast.cuh"

CASTS_FROM(i32)
