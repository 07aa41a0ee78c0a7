// A stable sort of 32-bit keys, 8 bits per pass (src/ops/index/radix.rs). Each block counts the digits of its range; the
// offsets are ordered by digit, then block; each block places its range in order.
#include "iso.cuh"

#define LANES 32u
#define ALL_LANES 0xffffffffu

// Counts the keys of the block's range by digit: counts[digit][block].
KERNEL(count_i64, 256, (const u32* keys, u32* counts, u64 hits, u64 stretch, u32 shift)) {
  SHARED u32 found[256];
  found[threadIdx.x] = 0;
  __syncthreads();
  u64 start = blockIdx.x * stretch, end = start + stretch < hits ? start + stretch : hits;
  for (u64 h = start + threadIdx.x; h < end; h += 256) atomicAdd(&found[keys[h] >> shift & 255], 1u);
  __syncthreads();
  counts[threadIdx.x * gridDim.x + blockIdx.x] = found[threadIdx.x];
}

// Replaces every count by the sum of those before it. One block of 1024 threads.
KERNEL(scan_i64, 1024, (u32* counts, u32 n)) {
  SHARED u32 sums[1024];
  u32 each = (n + 1023) / 1024, start = threadIdx.x * each, end = start + each < n ? start + each : n, sum = 0;
  for (u32 i = start; i < end; ++i) sum += counts[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (u32 step = 1; step < 1024; step *= 2) {
    u32 before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  u32 at = sums[threadIdx.x] - sum;
  for (u32 i = start; i < end; ++i) {
    u32 count = counts[i];
    counts[i] = at;
    at += count;
  }
}

// Moves the range's keys and positions to their places, in order. A null `from` means that position = place.
KERNEL(place_i64, 256, (const u32* keys, const u32* from, u32* sorted, u32* to, const u32* offsets, u64 hits, u64 stretch,
                        u32 shift)) {
  SHARED u32 next[256];
  SHARED u32 found[8][256];
  u32 t = threadIdx.x, lane = t % LANES, warp = t / LANES;
  next[t] = offsets[t * gridDim.x + blockIdx.x];
  u64 start = blockIdx.x * stretch, end = start + stretch < hits ? start + stretch : hits;
  for (u64 tile = start; tile < end; tile += 256) {
    for (u32 w = 0; w < 8; ++w) found[w][t] = 0;
    __syncthreads();
    u64 h = tile + t;
    bool there = h < end;
    u32 key = there ? keys[h] : 0, digit = key >> shift & 255;
    u32 alike = __ballot_sync(ALL_LANES, there);
    UNROLL for (u32 bit = 0; bit < 8; ++bit) {
      u32 set = __ballot_sync(ALL_LANES, digit >> bit & 1);
      alike &= digit >> bit & 1 ? set : ~set;
    }
    u32 before = __popc(alike & ((1u << lane) - 1));
    if (there && before == 0) found[warp][digit] = __popc(alike);
    __syncthreads();
    u32 at = next[t];
    for (u32 w = 0; w < 8; ++w) {
      u32 count = found[w][t];
      found[w][t] = at;
      at += count;
    }
    next[t] = at;
    __syncthreads();
    if (there) {
      u32 place = found[warp][digit] + before;
      sorted[place] = key;
      to[place] = from ? from[h] : (u32)h;
    }
    __syncthreads();
  }
}
