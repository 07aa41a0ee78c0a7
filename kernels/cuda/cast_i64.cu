// From i64 to every dtype
#include "cast.cuh"

CASTS_FROM(i64)
