// Two tensors, element by element, to bools. A NaN is unequal to everything, and neither less nor greater.
#include "pointwise.cuh"

#define TO_BOOL(name, T) POINTWISE_2(name, name##_formula, T, bool, T, T)
#define RELATION(name, ...) FORMULA_2(name, __VA_ARGS__) EACH_TYPE(TO_BOOL, name)

RELATION(compare_eq, x == y)
RELATION(compare_ne, x != y)
RELATION(compare_lt, x < y)
RELATION(compare_le, x <= y)
