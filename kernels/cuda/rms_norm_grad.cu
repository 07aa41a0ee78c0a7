// The gradients of rms_norm, computed as those of layer_norm are.
// One dtype at a time: f64, f32, f16, bf16.
#include "norm.cuh"

template <class T, class Row>
DEVICE void rms_norm_grad_rows(Row& row, const T* dy, const T* x, const T* weight, const Wide<T>* rstds, T* dx) {
  norm_grad_rows(row, dy, x, weight, (const Wide<T>*)nullptr, rstds, dx);
}

#define ENTRY(T)                                                                                                       \
  ROWS(rms_norm_grad, T, WITH(const T* dy, const T* x, const T* weight, const Wide<T>* rstds, T* dx), dy, x, weight, rstds, \
       dx)                                                                                                             \
  KERNEL(weights_##T, 256, (const T* dy, const T* x, const Wide<T>* rstds, Wide<T>* dw, u64 outer, u32 width, u32 n,   \
                            u32 depth, u32 split, u32 team)) {                                                         \
    norm_weights<T>(dy, x, (const Wide<T>*)nullptr, rstds, dw, (Wide<T>*)nullptr, outer, width, n, depth, split, team); \
  }
FLOATS(ENTRY)
