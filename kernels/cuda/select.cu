// Takes (condition, x, y): x if the condition holds, else y
#include "pointwise.cuh"

struct select_formula {
  template <class A>
  static DEVICE A at(f64, f64, bool condition, A x, A y) {
    return condition ? x : y;
  }
};
#define SELECT(name, T) POINTWISE_3(name, select_formula, T, T, bool, T, T)
EACH_TYPE(SELECT, select)
