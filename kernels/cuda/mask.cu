// Takes (condition, x): x if the condition equals s, else 0
#include "pointwise.cuh"

struct mask_formula {
  template <class A>
  static DEVICE A at(f64 s, f64, bool condition, A x) {
    return condition == (s != 0.0) ? x : A(0);
  }
};
#define MASK(name, T) POINTWISE_2(name, mask_formula, T, T, bool, T)
EACH_TYPE(MASK, mask)
