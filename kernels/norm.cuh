// Layer norm and root-mean-square norm along rows, and their gradients (src/ops/norm/cpu.rs). The latter has no mean
// and does not centre.
#pragma once
#include "rows.cuh"

// Weight, bias and mean may be null; statistics are stored in the type that sums are computed in.
template <class T, class Row>
DEVICE void norm_rows(Row& row, const T* x, const T* weight, const T* bias, T* y, Wide<T>* means, Wide<T>* rstds, f64 eps) {
  typedef Wide<T> A;
  auto held = row.hold(x);
  const A count = (A)row.n;
  A mean[Row::ALL], rstd[Row::ALL];
  if (means) {
    row.template fold<Sum>(mean, [&](u32 j, u32 i) { return held.at(j, i); });
    UNROLL for (u32 k = 0; k < Row::ALL; ++k) mean[k] = mean[k] / count;
  } else {
    UNROLL for (u32 k = 0; k < Row::ALL; ++k) mean[k] = A(0);
  }
  row.template fold<Sum>(rstd, [&](u32 j, u32 i) {
    A from = held.at(j, i) - mean[row.of(j)];
    return from * from;
  });
  UNROLL for (u32 k = 0; k < Row::ALL; ++k) rstd[k] = recip_(sqrt_(rstd[k] / count + of<A>(eps)));
  row.once([&](u32 j, u64 index) {
    if (means) means[index] = mean[row.of(j)];
    rstds[index] = rstd[row.of(j)];
  });
  row.each([&](u32 j, u32 i) {
    A out = (held.at(j, i) - mean[row.of(j)]) * rstd[row.of(j)];
    if (weight && bias) {
      out = fma_(out, widen(weight[i]), widen(bias[i]));
    } else if (weight) {
      out = out * widen(weight[i]);
    } else if (bias) {
      out = out + widen(bias[i]);
    }
    y[row.base(j) + i] = narrow<T>(out);
  });
}

template <class T, class Row>
DEVICE void norm_grad_rows(Row& row, const T* dy, const T* x, const T* weight, const Wide<T>* means, const Wide<T>* rstds,
                           T* dx) {
  typedef Wide<T> A;
  auto held_dy = row.hold(dy);
  auto held_x = row.hold(x);
  const A count = (A)row.n;
  A mean[Row::ALL], rstd[Row::ALL], c1[Row::ALL], c2[Row::ALL];
  UNROLL for (u32 k = 0; k < Row::ALL; ++k) {
    mean[k] = means ? means[row.index(k)] : A(0);
    rstd[k] = rstds[row.index(k)];
    c1[k] = A(0);
  }
  auto grad = [&](u32 j, u32 i) { return weight ? held_dy.at(j, i) * widen(weight[i]) : held_dy.at(j, i); };
  auto normal = [&](u32 j, u32 i) { return (held_x.at(j, i) - mean[row.of(j)]) * rstd[row.of(j)]; };
  if (means) {
    row.template fold<Sum>(c1, grad);
    UNROLL for (u32 k = 0; k < Row::ALL; ++k) c1[k] = c1[k] / count;
  }
  row.template fold<Sum>(c2, [&](u32 j, u32 i) { return grad(j, i) * normal(j, i); });
  UNROLL for (u32 k = 0; k < Row::ALL; ++k) c2[k] = c2[k] / count;
  row.each([&](u32 j, u32 i) {
    u32 k = row.of(j);
    dx[row.base(j) + i] = narrow<T>(fma_(normal(j, i), -c2[k], grad(j, i) - c1[k]) * rstd[k]);
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
      [&](u64 column, u32 i) {
        u64 row = column / width * n + i, at = row * width + column % width;
        Wide<T> g = widen(dy[at]), mean = means ? means[row] : Wide<T>(0);
        return V{g * ((widen(x[at]) - mean) * rstds[row]), g};
      },
      [&](u64 column, u32 part, V all) {
        u64 at = ((column / width << split) + part) * width + column % width;
        dw[at] = all.weight;
        if (db) db[at] = all.bias;
      });
}
