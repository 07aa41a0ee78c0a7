// The gradients of layer_norm: dx by rows; dw and db by columns, as nodes that src/ops/norm/cuda.rs adds up.
// One dtype at a time: f64, f32, f16, bf16.
#include "norm.cuh"

template <class T, class Row>
DEVICE void layer_norm_grad_rows(Row& row, const T* dy, const T* x, const T* weight, const Wide<T>* means,
                                 const Wide<T>* rstds, T* dx) {
  norm_grad_rows(row, dy, x, weight, means, rstds, dx);
}

#define ENTRY(T)                                                                                                    \
  ROWS(layer_norm_grad, T,                                                                                          \
       WITH(const T* dy, const T* x, const T* weight, const Wide<T>* means, const Wide<T>* rstds, T* dx), dy, x, weight, \
       means, rstds, dx)                                                                                            \
  KERNEL(weights_##T, 256, (const T* dy, const T* x, const Wide<T>* means, const Wide<T>* rstds, Wide<T>* dw,       \
                            Wide<T>* db, u64 outer, u32 width, u32 n, u32 depth, u32 split, u32 team)) {            \
    norm_weights<T>(dy, x, means, rstds, dw, db, outer, width, n, depth, split, team);                              \
  }
FLOATS(ENTRY)
