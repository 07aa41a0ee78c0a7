// Copies between strided layouts. Only the size of an element matters; the dtypes of the entries stand for sizes.
#include "pointwise.cuh"

// Copies if both layouts have the same innermost dim.
struct copy_formula {
  template <class A>
  static DEVICE A at(f64, f64, A x) {
    return x;
  }
};
POINTWISE_1(copy, copy_formula, u8, u8, u8)
POINTWISE_1(copy, copy_formula, f16, u16, u16)
POINTWISE_1(copy, copy_formula, i32, u32, u32)
POINTWISE_1(copy, copy_formula, i64, u64, u64)

// Copies if the source is contiguous along another dim (rows) than the result (columns): tiles go through shared
// memory, so that reads and writes are both coalesced. A walk visits the other dims.
struct TiledTranspose {
  StridedWalk around;
  u64 column_stride, row_stride;
  u32 columns, rows;
};

// An odd number of words per row puts the elements of a tile's column into different banks.
template <class T, int TILE>
DEVICE void transpose(const T* x, T* out, const TiledTranspose& transpose) {
  constexpr int PITCH = TILE + (sizeof(T) < 4 ? 4 / (int)sizeof(T) : 1), LINES = (int)POINTWISE_THREADS / 32;
  SHARED T tile[TILE][PITCH];
  u32 across = (transpose.columns + TILE - 1) / TILE, down = (transpose.rows + TILE - 1) / TILE;
  u32 c0 = blockIdx.x % across * TILE, r0 = blockIdx.x / across % down * TILE;
  Places<2> at = places<2>(transpose.around, blockIdx.x / across / down);
  u32 lane = threadIdx.x % 32, line = threadIdx.x / 32;
  UNROLL for (int c = 0; c < TILE; c += LINES) {
    UNROLL for (int r = 0; r < TILE; r += 32) {
      u32 column = c0 + c + line, row = r0 + r + lane;
      if (column < transpose.columns && row < transpose.rows)
        tile[c + line][r + lane] = x[at.at[1] + column * transpose.column_stride + row];
    }
  }
  __syncthreads();
  UNROLL for (int r = 0; r < TILE; r += LINES) {
    UNROLL for (int c = 0; c < TILE; c += 32) {
      u32 column = c0 + c + lane, row = r0 + r + line;
      if (column < transpose.columns && row < transpose.rows)
        out[at.at[0] + row * transpose.row_stride + column] = tile[c + lane][r + line];
    }
  }
}

// src/tensor/cuda/copy.rs uses the same tile sizes.
KERNEL(copy_transposed_u8, POINTWISE_THREADS, (const u8* x, u8* out, TiledTranspose by)) { transpose<u8, 64>(x, out, by); }
KERNEL(copy_transposed_f16, POINTWISE_THREADS, (const u16* x, u16* out, TiledTranspose by)) { transpose<u16, 64>(x, out, by); }
KERNEL(copy_transposed_i32, POINTWISE_THREADS, (const u32* x, u32* out, TiledTranspose by)) { transpose<u32, 32>(x, out, by); }
KERNEL(copy_transposed_i64, POINTWISE_THREADS, (const u64* x, u64* out, TiledTranspose by)) { transpose<u64, 32>(x, out, by); }
