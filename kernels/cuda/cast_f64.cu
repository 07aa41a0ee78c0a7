// From f64 to every dtype
#include "cast.cuh"

CASTS_FROM(f64)
