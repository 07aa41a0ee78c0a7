// Gamma numbers, with one shape for all elements or one per element. src/rng/distributions/gamma.rs documents the method and the
// words that it reads. Each thread tries until a number for its element is accepted.
#include "draws.cuh"
#include "parameters.cuh"

template <class A>
struct Setup {
  A d;
  A c;
  // d times the scale.
  A factor;
  // 1 / shape if the shape is below 1, else 0.
  A boost;
};

template <class A>
DEVICE Setup<A> setup_of(A shape, A scale) {
  bool small = shape < (A)1;
  A d = small ? shape + (A)2 / (A)3 : shape - (A)1 / (A)3;
  return Setup<A>{d, (A)1 / sqrt_((A)9 * d), d * scale, small ? (A)1 / shape : (A)0};
}

// The normal and the exponential number of attempt k, the number of attempts, and the exponential number of shapes
// below 1.
DEVICE void try_of(Draw draw, u64 e, u32 k, f32& z, f32& exponential) {
  Words words = philox(draw, e, k);
  f32 other;
  box_muller(words.word[0], words.word[1], z, other);
  exponential = unit_exponential(words.word[2]);
}
DEVICE void try_of(Draw draw, u64 e, u32 k, f64& z, f64& exponential) {
  Words words = philox(draw, e, 2 * k);
  f64 other;
  box_muller(words.pair(0), words.pair(1), z, other);
  exponential = unit_exponential(philox(draw, e, 2 * k + 1).pair(0));
}
DEVICE u32 tries_of(f32) { return 0xffff; }
DEVICE u32 tries_of(f64) { return 0x7fff; }
DEVICE f32 boost_of(Draw draw, u64 e, f32) { return unit_exponential(philox(draw, e).word[3]); }
DEVICE f64 boost_of(Draw draw, u64 e, f64) { return unit_exponential(philox(draw, e, 1).pair(1)); }

template <class A>
DEVICE A number(Draw draw, u64 e, Setup<A> s) {
  A out, z, exponential;
  bool accepted = false;
  for (u32 k = 0; !accepted && k < tries_of(A()); k++) {
    try_of(draw, e, k, z, exponential);
    A y = s.c * z, v = (A)1 + y;
    A bend = y * y * fma_(y, (A)1 / (A)3, (A)1);
    A bound = fma_((A)3 * s.d, ln_1p_rest_(v, y) - bend, (A)0.5 * z * z);
    out = s.factor * (v * v * v);
    accepted = v > (A)0 && -exponential < bound;
  }
  return s.boost == (A)0 ? out : out * exp_(-boost_of(draw, e, A()) * s.boost);
}

template <class T>
DEVICE void fill(T* out, Place place, Draw draw, Wide<T> shape, Wide<T> scale) {
  Setup<Wide<T>> setup = setup_of(shape, scale);
  each_element(place, [=](u64 e, u64 at) { out[at] = narrow<T>(number(draw, e, setup)); });
}

template <class T>
DEVICE void fill_each(const T* shapes, T* out, Place place, Draw draw, Fault* fault) {
  each_element(place, [=](u64 e, u64 at) {
    Wide<T> shape = widen(shapes[at]);
    bool sound = is_positive_finite(shape);
    if (!sound) report_parameter(fault, GAMMA_SHAPE, e, shape);
    out[at] = narrow<T>(number(draw, e, setup_of(sound ? shape : (Wide<T>)1, (Wide<T>)1)));
  });
}

#define ENTRIES(T)                                                                                      \
  KERNEL(gamma_##T, 256, (T * out, Place place, Draw draw, Wide<T> shape, Wide<T> scale)) {              \
    fill(out, place, draw, shape, scale);                                                               \
  }                                                                                                     \
  KERNEL(gamma_each_##T, 256, (const T* shapes, T* out, Place place, Draw draw, Fault* fault)) {          \
    fill_each(shapes, out, place, draw, fault);                                                         \
  }
FLOATS(ENTRIES)
