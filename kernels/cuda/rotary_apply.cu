// Rotates pairs of elements by given cosines and sines, with the bits of src/ops/rotary/apply.rs. One thread per pair.
#include "math.cuh"

struct Pairs {
  // -1 to rotate backwards.
  f64 sign;
  // The numbers of pairs in all and per vector; 1 if neighbours are pairs, 0 if halves are.
  u64 count, pairs, interleaved;
  // The dims before the last, outermost first: extents, and strides in x, cos and sin.
  u64 len[4], x[4], cos[4], sin[4];
};

template <class T>
DEVICE void rotary_apply(const Pairs& at, const T* x, const Wide<T>* cosines, const Wide<T>* sines, T* out) {
  typedef Wide<T> A;
  u64 e = thread_index();
  if (e >= at.count) return;
  u64 row = e / at.pairs, pair = e % at.pairs, rest = row;
  UNROLL for (int d = 3; d >= 0; --d) {
    u64 i = rest % at.len[d];
    rest /= at.len[d];
    x += i * at.x[d], cosines += i * at.cos[d], sines += i * at.sin[d];
  }
  out += row * 2 * at.pairs;
  u64 first = at.interleaved ? 2 * pair : pair, second = at.interleaved ? first + 1 : pair + at.pairs;
  A a = widen(x[first]), b = widen(x[second]), c = cosines[pair], s = sines[pair] * of<A>(at.sign);
  out[first] = narrow<T>(fma_(a, c, -(b * s)));
  out[second] = narrow<T>(fma_(b, c, a * s));
}

#define ENTRY(T)                                                                                              \
  KERNEL(rotary_apply_##T, 256, (Pairs at, const T* x, const Wide<T>* cosines, const Wide<T>* sines, T* out)) { \
    rotary_apply<T>(at, x, cosines, sines, out);                                                              \
  }
FLOATS(ENTRY)
