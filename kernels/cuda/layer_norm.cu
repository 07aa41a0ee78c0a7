// (x - mean) / sqrt(variance + eps) * weight + bias along rows.
// One dtype at a time: f64, f32, f16, bf16.
#include "norm.cuh"

template <class T, class Row>
DEVICE void layer_norm_rows(Row& row, const T* x, const T* weight, const T* bias, T* y, Wide<T>* means, Wide<T>* rstds, f64 eps) {
  norm_rows<true>(row, x, weight, bias, y, means, rstds, eps);
}

#define ENTRY(T)                                                                                                         \
  ROWS(layer_norm, T, WITH(const T* x, const T* weight, const T* bias, T* y, Wide<T>* means, Wide<T>* rstds, f64 eps), x, \
       weight, bias, y, means, rstds, eps)
FLOATS(ENTRY)
