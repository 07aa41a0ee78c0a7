// Bools that are true with a probability per element. (One probability for all: random.cu.)
#include "parameters.cuh"
#include "random.cuh"

template <class T>
DEVICE void fill_each(const T* probabilities, bool* out, Place place, Draw draw, Fault* fault) {
  bool packed = is_packed<4>(probabilities, place);
  fill_groups<4>(out, place, [=](Group group, bool(&x)[4]) {
    T of[4];
    load_group<4>(probabilities, packed, group, narrow<T>(0), of);
    Words words = philox(draw, group.block);
    UNROLL
    for (int i = 0; i < 4; i++) {
      f64 p = widen(of[i]);
      if (!is_probability(p)) report_parameter(fault, BERNOULLI_PROBABILITY, group.block * 4 + i, p);
      x[i] = (f64)words.word[i] + 0.5 <= p * 4294967296.0;
    }
  });
}

#define ENTRIES(T)                                                                                            \
  KERNEL(bernoulli_each_##T, 256, (const T* probabilities, bool* out, Place place, Draw draw, Fault* fault)) { \
    fill_each(probabilities, out, place, draw, fault);                                                        \
  }
FLOATS(ENTRIES)
