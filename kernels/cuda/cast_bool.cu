// From bool to every dtype
#include "cast.cuh"

CASTS_FROM(bool)
