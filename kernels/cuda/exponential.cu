// Exponential numbers, with one rate for all elements or one per element.
#include "draws.cuh"
#include "parameters.cuh"

template <class T>
DEVICE void fill(T* out, Place place, Draw draw, Wide<T> rate) {
  const int PER = PER_BLOCK<T>;
  fill_rounded<PER>(out, place, [=](Group group, Wide<T>(&x)[PER]) {
    exponentials(philox(draw, group.block), x);
    UNROLL
    for (int i = 0; i < PER; i++) x[i] = x[i] / rate;
  });
}

template <class T>
DEVICE void fill_each(const T* rates, T* out, Place place, Draw draw, Fault* fault) {
  const int PER = PER_BLOCK<T>;
  bool packed = is_packed<PER>(rates, place);
  fill_rounded<PER>(out, place, [=](Group group, Wide<T>(&x)[PER]) {
    T rate[PER];
    load_group<PER>(rates, packed, group, narrow<T>(1), rate);
    exponentials(philox(draw, group.block), x);
    UNROLL
    for (int i = 0; i < PER; i++) {
      Wide<T> r = widen(rate[i]);
      if (!is_positive_finite(r)) report_parameter(fault, EXPONENTIAL_RATE, group.block * PER + i, r);
      x[i] = x[i] / r;
    }
  });
}

#define ENTRIES(T)                                                                                             \
  KERNEL(exponential_##T, 256, (T * out, Place place, Draw draw, Wide<T> rate)) { fill(out, place, draw, rate); } \
  KERNEL(exponential_each_##T, 256, (const T* rates, T* out, Place place, Draw draw, Fault* fault)) {           \
    fill_each(rates, out, place, draw, fault);                                                                 \
  }
FLOATS(ENTRIES)
