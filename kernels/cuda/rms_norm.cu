// x / sqrt(mean(x^2) + eps) * weight along rows.
// One dtype at a time: f64, f32, f16, bf16.
#include "norm.cuh"

template <class T, class Row>
DEVICE void rms_norm_rows(Row& row, const T* x, const T* weight, T* y, Wide<T>* rstds, f64 eps) {
  norm_rows<false>(row, x, weight, (const T*)nullptr, y, (Wide<T>*)nullptr, rstds, eps);
}

#define ENTRY(T) \
  ROWS(rms_norm, T, WITH(const T* x, const T* weight, T* y, Wide<T>* rstds, f64 eps), x, weight, y, rstds, eps)
FLOATS(ENTRY)
