// Layer norm and root-mean-square norm along rows, and their gradients (src/ops/norm/cpu.rs). The latter has no mean
// and does not centre.
#pragma once
#include "reduce.cuh"
#include "rows.cuh"

// Rows whose squares overflow are multiplied by this power of two first.
template <class A>
DEVICE A overflow_scale() {
  return of<A>(f64_of((1023ull - (sizeof(A) == 4 ? 100ull : 600ull)) << 52));
}

// Elements of a row from its statistics. In rows of large elements, whose distance to the mean may overflow, x and mean
// are divided by 16 first.
template <class A>
struct Normal {
  A h, mean, rstd;
  DEVICE Normal() {}
  DEVICE Normal(A mean_, A rstd_) {
    A bound = of<A>(f64_of((1023ull - (sizeof(A) == 4 ? 60ull : 500ull)) << 52));
    h = rstd_ < bound ? A(0.0625) : A(1);
    mean = mean_ * h;
    rstd = rstd_ * (rstd_ < bound ? A(16) : A(1));  // rstd_ / h, which has the same bits
  }
  DEVICE A of_element(A x) const { return (x * h - mean) * rstd; }
};

// Weight and bias may be null, and so are means unless the norm is CENTRED; statistics are stored in the type that sums are computed in.
template <bool CENTRED, class T, class Row>
DEVICE void norm_rows(Row& row, const T* x, const T* weight, const T* bias, T* y, Wide<T>* means, Wide<T>* rstds, f64 eps) {
  typedef Wide<T> A;
  auto held = row.hold(x);
  const A count = (A)row.n;
  A mean[Row::ALL], rstd[Row::ALL], h[Row::ALL];
  UNROLL for (u32 k = 0; k < Row::ALL; ++k) h[k] = A(1), mean[k] = A(0);
  ROLLED for (int pass = 0; pass < 2; ++pass) {
    if constexpr (CENTRED) {
      row.template fold<Sum>(mean, [&](u32 j, u32 i) { return held.at(j, i) * h[row.of(j)]; });
      UNROLL for (u32 k = 0; k < Row::ALL; ++k) mean[k] = mean[k] / count;
    }
    row.template fold<Sum>(rstd, [&](u32 j, u32 i) {
      A from = held.at(j, i) * h[row.of(j)] - mean[row.of(j)];
      return from * from;
    });
    bool overflow = false;
    UNROLL for (u32 k = 0; k < Row::ALL; ++k) {
      rstd[k] = rstd[k] / count;
      overflow = overflow || rstd[k] - rstd[k] != A(0);
    }
    // All threads of the block fold, or none.
    if (pass == 1 || !__syncthreads_or(overflow)) break;
    UNROLL for (u32 k = 0; k < Row::ALL; ++k) h[k] = rstd[k] - rstd[k] != A(0) ? overflow_scale<A>() : A(1);
  }
  UNROLL for (u32 k = 0; k < Row::ALL; ++k) {
    A sum = rstd[k] + of<A>(eps * (f64)h[k] * (f64)h[k]);
    // Beside the variance 0 of large equal elements the scaled eps underflows.
    rstd[k] = sum == A(0) ? recip_(sqrt_(of<A>(eps))) / h[k] : recip_(sqrt_(sum));
  }
  row.once([&](u32 j, u64 index) {
    u32 k = row.of(j);
    if constexpr (CENTRED) means[index] = mean[k] / h[k];
    rstds[index] = rstd[k] * h[k];
  });
  auto weights = row.repeat(weight);
  auto biases = row.repeat(bias);
  auto out = [&](u32 j, u32 i) {
    u32 k = row.of(j);
    A normal = (held.at(j, i) * h[k] - mean[k]) * rstd[k];
    // The same bits as without a weight of 1 and a bias of -0.
    return fma_(normal, weight ? weights.at(j, i) : A(1), bias ? biases.at(j, i) : A(-0.0));
  };
  // Beside the two sums of a long row, packs of results would spill registers.
  if constexpr (CENTRED && Row::ONE_PER_BLOCK) row.template store_by<1>(y, out);
  else row.store(y, out);
}

template <class T, class Row>
DEVICE void norm_grad_rows(Row& row, const T* dy, const T* x, const T* weight, const Wide<T>* means, const Wide<T>* rstds,
                           T* dx) {
  typedef Wide<T> A;
  auto held_dy = row.hold(dy);
  auto held_x = row.hold(x);
  auto weights = row.repeat(weight);
  const A count = (A)row.n;
  Normal<A> to_normal[Row::ALL];
  A rstd[Row::ALL], c1[Row::ALL], c2[Row::ALL];
  UNROLL for (u32 k = 0; k < Row::ALL; ++k) {
    rstd[k] = rstds[row.index(k)];
    to_normal[k] = Normal<A>(means ? means[row.index(k)] : A(0), rstd[k]);
    c1[k] = A(0);
  }
  auto grad = [&](u32 j, u32 i) { return weight ? held_dy.at(j, i) * weights.at(j, i) : held_dy.at(j, i); };
  auto normal = [&](u32 j, u32 i) { return to_normal[row.of(j)].of_element(held_x.at(j, i)); };
  if (means) {
    row.template fold<Sum>(c1, grad);
    UNROLL for (u32 k = 0; k < Row::ALL; ++k) c1[k] = c1[k] / count;
  }
  row.template fold<Sum>(c2, [&](u32 j, u32 i) { return grad(j, i) * normal(j, i); });
  UNROLL for (u32 k = 0; k < Row::ALL; ++k) c2[k] = c2[k] / count;
  row.store(dx, [&](u32 j, u32 i) {
    u32 k = row.of(j);
    return fma_(normal(j, i), -c2[k], grad(j, i) - c1[k]) * rstd[k];
  });
}

// The gradients of weight and bias together: columns of dy x-hat and of dy.
template <class A>
struct Both {
  A weight, bias;
};
struct SumBoth {
  template <class V>
  static DEVICE V pad() {
    typedef decltype(V().weight) A;
    return V{Sum::pad<A>(), Sum::pad<A>()};
  }
  template <class V>
  static DEVICE V join(V a, V b) {
    return V{a.weight + b.weight, a.bias + b.bias};
  }
};

// x and dy are [outer, n, width]; dw and db are [outer, 2^split, width]; db is null if it is not needed.
template <class T>
DEVICE void norm_weights(const T* dy, const T* x, const Wide<T>* means, const Wide<T>* rstds, Wide<T>* dw, Wide<T>* db,
                         u64 outer, u32 width, u32 n, u32 depth, u32 split, u32 team) {
  typedef Both<Wide<T>> V;
  fold_columns<SumBoth, V>(
      outer * width, n, depth, split, team, false,
      [=](u64 column) {
        u64 first = column / width * n, start = first * width + column % width;
        return [=](u32 i) {
          u64 at = start + (u64)i * width;
          Wide<T> g = widen(dy[at]), mean = means ? means[first + i] : Wide<T>(0);
          return V{g * Normal<Wide<T>>(mean, rstds[first + i]).of_element(widen(x[at])), g};
        };
      },
      [&](u64 column, u32 part, V all) {
        u64 at = ((column / width << split) + part) * width + column % width;
        dw[at] = all.weight;
        if (db) db[at] = all.bias;
      });
}
