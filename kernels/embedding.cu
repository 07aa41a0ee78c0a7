// Rows of a table by index, 16 bytes per thread if rows are aligned to that. A row that another rank stores gives the
// identity of the sum, -0 or 0.
#include "num.cuh"

template <class T, u32 N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

template <class T>
DEVICE T nothing() {
  return narrow<T>(Num<Wide<T>>::sum_pad());
}
template <>
DEVICE bool nothing<bool>() {
  return false;
}

// `width` counts packs.
template <class T, u32 N>
DEVICE void embedding(const T* table, const i64* index, T* out, u64 tokens, u32 width, u64 held, u64 rows, u64 start, u32 code,
                      Fault* faults) {
  typedef Pack<T, N> P;
  u64 all = tokens * width;
  for (u64 e = thread_index(); e < all; e += threads_len()) {
    u64 token = all >> 32 ? e / width : (u32)e / width;
    u32 column = (u32)(e - token * width);
    u64 row = (u64)index[token], place = row - start;
    if (row >= rows) {
      if (column == 0) report(faults, code, (i64)row);
      place = held;
    }
    P pack;
    if (place < held) {
      pack = ((const P*)table)[place * width + column];
    } else {
      UNROLL for (u32 k = 0; k < N; ++k) pack.v[k] = nothing<T>();
    }
    ((P*)out)[e] = pack;
  }
}

#define ENTRY(T)                                                                                                         \
  KERNEL(embedding_##T, 256, (const T* table, const i64* index, T* out, u64 tokens, u32 width, u64 held, u64 rows,       \
                              u64 start, u32 code, Fault* faults)) {                                                     \
    embedding<T, 1>(table, index, out, tokens, width, held, rows, start, code, faults);                                  \
  }                                                                                                                      \
  KERNEL(packed_##T, 256, (const T* table, const i64* index, T* out, u64 tokens, u32 width, u64 held, u64 rows,          \
                           u64 start, u32 code, Fault* faults)) {                                                        \
    embedding<T, 16 / sizeof(T)>(table, index, out, tokens, width, held, rows, start, code, faults);                     \
  }
ALL_TYPES(ENTRY)
