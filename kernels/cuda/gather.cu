// Elements along a dim by index, one thread per element of the result.
#include "num.cuh"

// The result's extents, fastest first, and the strides of the operand (0 along the dim) and of the index.
struct Places {
  u64 x[6], index[6];
  u32 len[6];
  u32 rank, unused;
};

template <class T>
DEVICE void gather(const T* x, const i64* index, T* out, const Places& places, u64 all, u64 stride, u64 held, u64 n, u64 start,
                   u32 code, Fault* faults) {
  for (u64 e = thread_index(); e < all; e += threads_len()) {
    u64 at_x = 0, at_index = 0, rest = e;
    UNROLL for (u32 d = 0; d < 6; ++d) {
      if (d >= places.rank) continue;
      u64 above = rest >> 32 ? rest / places.len[d] : (u32)rest / places.len[d], i = rest - above * places.len[d];
      rest = above;
      at_x += i * places.x[d], at_index += i * places.index[d];
    }
    u64 chosen = (u64)index[at_index], place = chosen - start;
    if (chosen >= n) {
      report(faults, code, (i64)chosen);
      place = held;
    }
    out[e] = place < held ? x[at_x + place * stride] : sum_identity<T>();
  }
}

#define ENTRY(T)                                                                                                      \
  KERNEL(gather_##T, 256, (const T* x, const i64* index, T* out, Places places, u64 all, u64 stride, u64 held, u64 n, \
                           u64 start, u32 code, Fault* faults)) {                                                     \
    gather(x, index, out, places, all, stride, held, n, start, code, faults);                                         \
  }
ALL_TYPES(ENTRY)
