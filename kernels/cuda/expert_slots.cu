// The slots of assignments of tokens to experts, in a list that is sorted by expert.
//
// 1. `positions`: one block per batch entry and expert walks over the entry's assignments, 256 at a time, and writes
//    how many earlier ones have the same expert, and the total.
// 2. `slots`: adds the first slot of the expert.
#include "num.cuh"

KERNEL(positions_i64, 256, (const i64* expert, i64* position, i64* counts, u64 each, u32 experts)) {
  SHARED u32 sums[256];
  u32 t = threadIdx.x;
  u64 entry = blockIdx.x / experts;
  i64 mine = blockIdx.x - entry * experts;
  const i64* of = expert + entry * each;
  i64* out = position + entry * each;
  u64 before = 0;
  for (u64 tile = 0; tile < each; tile += 256) {
    u64 i = tile + t;
    bool hit = i < each && of[i] == mine;
    sums[t] = hit;
    __syncthreads();
    for (u32 step = 1; step < 256; step *= 2) {
      u32 more = t >= step ? sums[t - step] : 0;
      __syncthreads();
      sums[t] += more;
      __syncthreads();
    }
    if (hit) out[i] = (i64)(before + sums[t] - 1);
    before += sums[255];
    __syncthreads();
  }
  if (t == 0) counts[blockIdx.x] = (i64)before;
}

// A negative capacity means that experts have as many slots as assignments.
KERNEL(slots_i64, 256, (const i64* expert, const i64* counts, i64* slot, u64 all, u64 each, u64 experts, i64 capacity, u32 code,
                        Fault* faults)) {
  for (u64 i = thread_index(); i < all; i += threads_len()) {
    u64 e = (u64)expert[i];
    if (e >= experts) {
      report(faults, code, (i64)e);
      slot[i] = -1;
      continue;
    }
    i64 position = slot[i], start = 0;
    if (capacity < 0) {
      const i64* of = counts + i / each * experts;
      for (u64 other = 0; other < e; ++other) start += of[other];
    } else {
      start = (i64)e * capacity;
    }
    slot[i] = capacity >= 0 && position >= capacity ? -1 : start + position;
  }
}
