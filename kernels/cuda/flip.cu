// Reverses the indices of a dim of `len` indices with `inner` elements each. Elements are moved unchanged, so a type
// stands for all types of its size.
#include "iso.cuh"

template <class T>
DEVICE void flip(const T* x, T* out, u64 all, u64 len, u64 inner) {
  for (u64 e = thread_index(); e < all; e += threads_len()) {
    u64 row = e / inner, block = row / len;
    u64 from = (block * len + (len - 1 - (row - block * len))) * inner + (e - row * inner);
    out[e] = x[from];
  }
}

#define ENTRY(T) \
  KERNEL(flip_##T, 256, (const T* x, T* out, u64 all, u64 len, u64 inner)) { flip(x, out, all, len, inner); }
ENTRY(u8)
ENTRY(bf16)
ENTRY(i32)
ENTRY(i64)
