// Optimizer steps over a list of tensors in one launch.
#pragma once
#include "num.cuh"

const u32 TENSORS = 48;

// One address per tensor.
struct Addresses {
  u64 at[TENSORS];
};
// Tensor k has `len[k]` elements and the blocks from `block[k]` on; `value[k]` is its own attribute.
struct Pieces {
  u64 len[TENSORS];
  f64 value[TENSORS];
  u32 block[TENSORS];
  u32 tensors, unused;
};

template <class T, u32 N>
struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Pack {
  T v[N];
};

// A tensor to which the new parameter is rounded, or none for `void`: `R` is f16 or bf16, and the parameter f32.
template <class R>
struct Rounded {
  R* at;
  DEVICE Rounded(u64 address) : at((R*)address) {}
  DEVICE bool is_aligned() const { return ((u64)at & (alignof(Pack<R, 4>) - 1)) == 0; }
  DEVICE void one(u64 i, f32 x) const { at[i] = narrow<R>(x); }
  DEVICE void four(u64 i, const Pack<f32, 4>& x) const {
    Pack<R, 4> y;
    UNROLL for (u32 j = 0; j < 4; ++j) y.v[j] = narrow<R>(x.v[j]);
    *(Pack<R, 4>*)(at + i) = y;
  }
};
template <>
struct Rounded<void> {
  DEVICE Rounded(u64) {}
  DEVICE bool is_aligned() const { return true; }
  template <class T>
  DEVICE void one(u64, T) const {}
  template <class T>
  DEVICE void four(u64, const Pack<T, 4>&) const {}
};

// The work of one block: calls vector(i) for packs of four elements that begin at i, and scalar(i) for the others.
const u32 STEP_THREADS = 256, STEP_PACKS = 4;

// The tensor that a block works on.
DEVICE u32 tensor_of(const Pieces& pieces) {
  u32 low = 0, high = pieces.tensors;
  while (high - low > 1) {
    u32 middle = (low + high) / 2;
    if (pieces.block[middle] <= blockIdx.x) low = middle;
    else high = middle;
  }
  return low;
}

// Calls pack(i) for every aligned group of four of the block's elements of tensor k, and one(i) for the rest.
template <class Four, class One>
DEVICE void each_element(const Pieces& pieces, u32 k, bool aligned, Four pack, One one) {
  u64 n = pieces.len[k], start = (u64)(blockIdx.x - pieces.block[k]) * (STEP_THREADS * STEP_PACKS * 4);
  UNROLL for (u32 p = 0; p < STEP_PACKS; ++p) {
    u64 at = start + (p * STEP_THREADS + threadIdx.x) * 4;
    if (aligned && at + 4 <= n) {
      pack(at);
    } else {
      for (u64 i = at; i < at + 4 && i < n; ++i) one(i);
    }
  }
}

// True if a pointer is aligned to a pack of four.
template <class T>
DEVICE bool is_aligned(const T* at) {
  return ((u64)at & (alignof(Pack<T, 4>) - 1)) == 0;
}
