// A step of gradient descent with momentum on a list of parameters, in place (src/ops/step/sgd.rs).
#include "step.cuh"

struct Rates {
  f64 momentum, decay, step;
  u64 nesterov;
};

template <class A>
struct Update {
  A scale, momentum, decay, step;
  bool nesterov;
  DEVICE Update(const Rates& r, A scale)
      : scale(scale), momentum(of<A>(r.momentum)), decay(of<A>(r.decay)), step(of<A>(r.step)), nesterov(r.nesterov) {}
  DEVICE A at(A p, A g, A& b) const {
    A d = fma_(scale, g, decay * p);
    b = fma_(momentum, b, d);
    A direction = nesterov ? fma_(momentum, b, d) : b;
    return fma_(step, direction, p);
  }
};

template <class T, class R>
DEVICE void sgd(const Addresses& ps, const Addresses& gs, const Addresses& bs, const Addresses* rs, const Wide<T>* scale,
                const Pieces& pieces, const Rates& rates) {
  typedef Wide<T> A;
  u32 k = tensor_of(pieces);
  Rounded<R> rounded(rs ? rs->at[k] : 0);
  T* p = (T*)ps.at[k];
  const T* g = (const T*)gs.at[k];
  A* b = (A*)bs.at[k];
  Update<A> update(rates, *scale);
  each_element(
      pieces, k, is_aligned(p) && is_aligned(g) && is_aligned(b) && rounded.is_aligned(),
      [&](u64 i) {
        Pack<T, 4> pp = *(Pack<T, 4>*)(p + i), gg = *(const Pack<T, 4>*)(g + i);
        Pack<A, 4> bb = *(Pack<A, 4>*)(b + i);
        UNROLL for (u32 j = 0; j < 4; ++j) pp.v[j] = narrow<T>(update.at(widen(pp.v[j]), widen(gg.v[j]), bb.v[j]));
        *(Pack<T, 4>*)(p + i) = pp;
        rounded.four(i, pp);
        *(Pack<A, 4>*)(b + i) = bb;
      },
      [&](u64 i) {
        p[i] = narrow<T>(update.at(widen(p[i]), widen(g[i]), b[i]));
        rounded.one(i, p[i]);
      });
}

#define ENTRY(T)                                                                                                            \
  KERNEL(sgd_##T, 256, (Addresses ps, Addresses gs, Addresses bs, const Wide<T>* scale, Pieces pieces, Rates rates)) {      \
    sgd<T, void>(ps, gs, bs, nullptr, scale, pieces, rates);                                                                \
  }
FLOATS(ENTRY)

#define ROUNDING(R)                                                                                                         \
  KERNEL(sgd_to_##R##_f32, 256, (Addresses ps, Addresses gs, Addresses bs, Addresses rs, const f32* scale, Pieces pieces,   \
                                 Rates rates)) {                                                                            \
    sgd<f32, R>(ps, gs, bs, &rs, scale, pieces, rates);                                                                     \
  }
ROUNDING(bf16)
ROUNDING(f16)
