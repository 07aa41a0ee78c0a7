// Sets an element to zero if its random word is below the threshold, else scales it.
#include "random.cuh"

template <class T>
DEVICE void dropout(const T* x, T* out, Place place, Draw draw, u32 threshold, Wide<T> scale) {
  bool packed = is_packed<4>(x, place);
  fill_rounded<4>(out, place, [=](Group group, Wide<T>(&y)[4]) {
    T from[4];
    load_group<4>(x, packed, group, narrow<T>(0), from);
    Words words = philox(draw, group.block);
    UNROLL
    for (int i = 0; i < 4; i++) y[i] = words.word[i] >= threshold ? widen(from[i]) * scale : (Wide<T>)0;
  });
}

#define ENTRIES(T)                                                                                             \
  KERNEL(dropout_##T, 256, (const T* x, T* out, Place place, Draw draw, u32 threshold, Wide<T> scale)) {        \
    dropout(x, out, place, draw, threshold, scale);                                                            \
  }
FLOATS(ENTRIES)
