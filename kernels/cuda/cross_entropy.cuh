// The terms that the loss of a class and its gradient share.
#pragma once
#include "num.cuh"

// The attributes of ops::CrossEntropyTerms. A factor of 0 leaves its term out.
struct Terms {
  f64 nll, z;
  i64 ignored;
  u64 ignores;
  DEVICE bool ignore(i64 target) const { return ignores != 0 && target == ignored; }
  // nll (ln(s) - (logit - m)) + z (ln(s) + m)^2
  template <class A>
  DEVICE A loss(A logit, A m, A s) const {
    A log = ln_(s), loss = A(0);
    if (nll != 0.0) loss = (log - (logit - m)) * of<A>(nll);
    if (z != 0.0) {
      A lse = log + m;
      loss = loss + lse * lse * of<A>(z);
    }
    return loss;
  }
  // The factor of the softmax in the gradient, before the division by s.
  template <class A>
  DEVICE A softmax_factor(A m, A s) const {
    return z == 0.0 ? of<A>(nll) : of<A>(nll) + (ln_(s) + m) * of<A>(2.0 * z);
  }
};
