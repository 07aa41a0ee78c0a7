// From u8 to every dtype
#include "cast.cuh"

CASTS_FROM(u8)
