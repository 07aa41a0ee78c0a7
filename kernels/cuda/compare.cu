// Compares two tensors element by element. A NaN is unequal to everything, and neither less nor greater.
#include "pointwise.cuh"

#define TO_BOOL(name, T) POINTWISE_2(name, name##_formula, T, bool, T, T)
#define RELATION(name, ...)                                \
  struct name##_formula {                                  \
    template <class A>                                     \
    static DEVICE bool at(f64, f64, A x, A y) {            \
      return __VA_ARGS__;                                  \
    }                                                      \
  };                                                       \
  EACH_TYPE(TO_BOOL, name)

RELATION(compare_eq, x == y)
RELATION(compare_ne, x != y)
RELATION(compare_lt, x < y)
RELATION(compare_le, x <= y)
