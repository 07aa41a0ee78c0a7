// A step of AdamW on a list of parameters, in place (src/ops/step/adamw.rs).
#include "step.cuh"

struct Rates {
  f64 beta1, beta2, rest1, rest2, eps, step, root;
};

template <class A>
struct Update {
  A scale, beta1, beta2, rest1, rest2, eps, keep, step, root;
  DEVICE Update(const Rates& r, f64 keep, A scale)
      : scale(scale), beta1(of<A>(r.beta1)), beta2(of<A>(r.beta2)), rest1(of<A>(r.rest1)), rest2(of<A>(r.rest2)),
        eps(of<A>(r.eps)), keep(of<A>(keep)), step(of<A>(r.step)), root(of<A>(r.root)) {}
  DEVICE A at(A p, A g, A& m, A& v) const {
    g = g * scale;
    m = fma_(beta1, m, rest1 * g);
    v = fma_(beta2, v, rest2 * (g * g));
    A below = fma_(sqrt_(v), root, eps);
    return fma_(step, m / below, keep * p);
  }
};

// `value` of a piece is the factor that weight decay leaves of the parameter.
template <class T, class R>
DEVICE void adamw(const Addresses& ps, const Addresses& gs, const Addresses& ms, const Addresses& vs, const Addresses* rs,
                  const Wide<T>* scale, const Pieces& pieces, const Rates& rates) {
  typedef Wide<T> A;
  u32 k = tensor_of(pieces);
  Rounded<R> rounded(rs ? rs->at[k] : 0);
  T* p = (T*)ps.at[k];
  const T* g = (const T*)gs.at[k];
  A *m = (A*)ms.at[k], *v = (A*)vs.at[k];
  Update<A> update(rates, pieces.value[k], *scale);
  bool aligned = is_aligned(p) && is_aligned(g) && is_aligned(m) && is_aligned(v) && rounded.is_aligned();
  each_element(
      pieces, k, aligned,
      [&](u64 i) {
        Pack<T, 4> pp = *(Pack<T, 4>*)(p + i), gg = *(const Pack<T, 4>*)(g + i);
        Pack<A, 4> mm = *(Pack<A, 4>*)(m + i), vv = *(Pack<A, 4>*)(v + i);
        UNROLL for (u32 j = 0; j < 4; ++j) pp.v[j] = narrow<T>(update.at(widen(pp.v[j]), widen(gg.v[j]), mm.v[j], vv.v[j]));
        *(Pack<T, 4>*)(p + i) = pp;
        rounded.four(i, pp);
        *(Pack<A, 4>*)(m + i) = mm;
        *(Pack<A, 4>*)(v + i) = vv;
      },
      [&](u64 i) {
        p[i] = narrow<T>(update.at(widen(p[i]), widen(g[i]), m[i], v[i]));
        rounded.one(i, p[i]);
      });
}

#define ENTRY(T)                                                                                                         \
  KERNEL(adamw_##T, 256, (Addresses ps, Addresses gs, Addresses ms, Addresses vs, const Wide<T>* scale, Pieces pieces,   \
                          Rates rates)) {                                                                                \
    adamw<T, void>(ps, gs, ms, vs, nullptr, scale, pieces, rates);                                                       \
  }
FLOATS(ENTRY)

#define ROUNDING(R)                                                                                                      \
  KERNEL(adamw_to_##R##_f32, 256, (Addresses ps, Addresses gs, Addresses ms, Addresses vs, Addresses rs,                 \
                                   const f32* scale, Pieces pieces, Rates rates)) {                                      \
    adamw<f32, R>(ps, gs, ms, vs, &rs, scale, pieces, rates);                                                            \
  }
ROUNDING(bf16)
ROUNDING(f16)
