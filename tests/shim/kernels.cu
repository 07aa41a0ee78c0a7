// Kernels for the shim's own tests: correct ones, and ones that commit one fault each.
#include "iso.cuh"

// ---- Correct.
// --------------------------------------------------------------------------------------------------------

template <class T>
DEVICE T sum_of_warp(T value) {
  UNROLL
  for (int by = 16; by > 0; by /= 2) value += __shfl_xor_sync(0xffffffffu, value, by);
  return value;
}

KERNEL(sum_by_warps_i32, 1024, (const i32* __restrict__ x, i32* __restrict__ out, u32 n)) {
  SHARED i32 of_warp[32];
  i32 sum = 0;
  for (u32 i = threadIdx.x; i < n; i += blockDim.x) sum += __ldg(x + i);
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = sum_of_warp(threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : 0);
    if (threadIdx.x == 0) *out = sum;
  }
}

KERNEL(sum_by_halves_i32, 1024, (const i32* x, i32* out, u32 n)) {
  DYNAMIC_SHARED(memory);
  i32* part = (i32*)memory;
  part[threadIdx.x] = 0;
  for (u32 i = threadIdx.x; i < n; i += blockDim.x) part[threadIdx.x] += x[i];
  u32 left = blockDim.x;
  while (left > 1) {
    u32 half = (left + 1) / 2;
    __syncthreads();
    if (threadIdx.x + half < left) part[threadIdx.x] += part[threadIdx.x + half];
    left = half;
  }
  if (threadIdx.x == 0) *out = part[0];
}

struct By {
  u8 tag;
  f32 scale;
  u64 n;
  u8 tail;
};

KERNEL(parameters_f32, 256, (const f32* x, u8 a, const By by, i64 b, bool yes, f32* y)) {
  for (u64 i = thread_index(); i < by.n; i += threads_len()) {
    if (yes) y[i] = fmaf(x[i], by.scale, y[i]) + (f32)(by.tag + a + by.tail + (i32)b);
  }
}

KERNEL(nothing, 1024, ()) {}

KERNEL(places, 64, (u32* out)) {
  u32 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  u32 threads = blockDim.x * blockDim.y * blockDim.z;
  u32* mine = out + (block * threads + thread) * 8;
  mine[0] = threadIdx.x, mine[1] = threadIdx.y, mine[2] = threadIdx.z;
  mine[3] = blockIdx.x, mine[4] = blockIdx.y, mine[5] = blockIdx.z;
  mine[6] = thread % warpSize;
  mine[7] = gridDim.x * gridDim.y * gridDim.z * 1000 + threads;
}

KERNEL(lanes, 64, (u64* out)) {
  const u32 all = 0xffffffff;
  u32 t = threadIdx.x, lane = t % 32;
  u64* mine = out + t * 12;
  mine[0] = __shfl_sync(all, (u64)t, 7);
  mine[1] = __shfl_sync(all, t, lane + 3, 8);
  mine[2] = __shfl_up_sync(all, t, 5);
  mine[3] = (u64)__shfl_up_sync(all, (i32)t, 3, 16);
  mine[4] = __shfl_down_sync(all, (u64)t, 7);
  mine[5] = __shfl_down_sync(all, t, 2, 8);
  mine[6] = (u64)__shfl_xor_sync(all, (f32)t, 21);
  mine[7] = bits_of(__shfl_xor_sync(all, (f64)t + 0.5, 1));
  mine[8] = __ballot_sync(all, t % 3 == 0);
  mine[9] = (u64)__any_sync(all, t == 5);
  __syncwarp();
  mine[10] = (u64)__all_sync(all, t >= 32);
  // The halves of a warp run separately.
  if (lane < 16) {
    mine[11] = __shfl_xor_sync(0x0000ffffu, t, 15);
  } else {
    mine[11] = __shfl_xor_sync(0xffff0000u, t, 15);
  }
}

KERNEL(votes, 64, (u32* out)) {
  u32 i = (u32)thread_index();
  atomicAdd(out, 1u);
  atomicMax(out + 1, 3 * i + 1);
  atomicMin(out + 2, 3 * i + 1);
  atomicOr(out + 3, 1u << i % 5);
  int some = __syncthreads_count(threadIdx.x % 3 == 0);
  int all = __syncthreads_and(threadIdx.x < 50), none = __syncthreads_or(threadIdx.x > 49);
  atomicAdd(out + 4, (u32)some);
  atomicAdd(out + 5, (u32)all);
  atomicAdd(out + 6, (u32)none);
  atomicCAS(out + 7, 9u, i % 9);
}

KERNEL(small_blocks, 64, (u32* out)) { *out = 1; }
KERNEL(add_one, 64, (u32* x)) { x[threadIdx.x] += 1; }
KERNEL(double_it, 64, (u32* x)) { x[threadIdx.x] *= 2; }

// ---- Faults. ---------------------------------------------------------------------------------------------------------

KERNEL(barrier_not_reached, 64, (u32* out)) {
  if (threadIdx.x == 63) return;
  __syncthreads();
  *out = 1;
}

KERNEL(other_barriers, 64, (u32* out)) {
  if (threadIdx.x < 32) {
    *out = 1;
    __syncthreads();
  } else {
    __syncthreads();
  }
}

KERNEL(other_kinds, 64, (u32* out)) {
  if (threadIdx.x % 2) __syncthreads(); else *out = (u32)__syncthreads_or(1);
}

KERNEL(warp_not_reached, 64, (u32* out)) {
  if (threadIdx.x == 63) return;
  __syncwarp();
  *out = 1;
}

KERNEL(masks_differ, 32, (u32* out)) {
  u32 mask = threadIdx.x < 16 ? 0x0000ffff : 0xffffffff;
  if (threadIdx.x == 3) mask = 0xffffffff;
  *out = __shfl_sync(mask, *out, 0);
}

KERNEL(kinds_differ, 32, (u32* out)) {
  *out = threadIdx.x % 2 ? __shfl_sync(0xffffffffu, 1u, 0) : __ballot_sync(0xffffffffu, 1);
}

KERNEL(left_out, 32, (u32* out)) { *out = __ballot_sync(0x0000ffffu, 1); }

KERNEL(reads_absent, 64, (u32* out)) { *out = __shfl_down_sync(0xffffffffu, 1u, 8); }

KERNEL(barrier_against_warp, 32, (u32* out)) {
  if (threadIdx.x < 5) __syncthreads(); else __syncwarp();
  *out = 1;
}

KERNEL(behind_shared, 32, (u32* out)) {
  DYNAMIC_SHARED(memory);
  ((u32*)memory)[17] = *out;
}

template <int N>
__noinline__ u32 deeper(u32 depth) {
  volatile u32 much[N];
  much[depth % N] = depth;
  return depth == 0 ? 0 : deeper<N>(depth - 1) + much[depth % N];
}
// Writes beyond its stack, but not beyond the next: only unused stacks are there.
KERNEL(deep, 32, (u32* out)) { *out = deeper<32>(520); }

// A frame that reaches into the slot below, and waits there.
KERNEL(large_frame, 32, (u32* out)) {
  volatile u32 much[18000];
  much[threadIdx.x] = 1;
  __syncthreads();
  *out = much[threadIdx.x];
}

struct alignas(16) Four {
  u32 x[4];
};

KERNEL(undefined, 64, (u32* out, u32 which)) {
  u32 t = threadIdx.x;
  if (which == 0) *(Four*)(out + t % 2) = Four{1, 2, 3, 4};
  u32 array[32] = {};
  if (which == 1) out[t] = array[t];
  if (which == 2) out[t] = 1u << t;
  if (which == 3) out[t] = 7 / (t % 2);
}

// ---- Barriers that are missing. --------------------------------------------------------------------------------------

template <int KIND>
DEVICE void pass_on(u32* out) {
  SHARED u32 given[96];
  u32 t = threadIdx.x, n = blockDim.x;
  given[t] = t;
  if (KIND == 1) __syncthreads();
  if (KIND == 2) __syncwarp();
  out[t] = given[(t + 1) % n];
}
KERNEL(no_syncthreads, 96, (u32* out)) { pass_on<0>(out); }
KERNEL(with_syncthreads, 96, (u32* out)) { pass_on<1>(out); }
KERNEL(no_syncwarp, 32, (u32* out)) { pass_on<0>(out); }
KERNEL(with_syncwarp, 32, (u32* out)) { pass_on<2>(out); }

// Shared memory that is overwritten before all threads have read it.
template <bool RIGHT>
DEVICE void reuse(u32* out) {
  SHARED u32 given[64];
  u32 t = threadIdx.x;
  given[t] = t;
  __syncthreads();
  u32 got = given[(t + 1) % 64];
  if (RIGHT) __syncthreads();
  given[t] = 1000;
  out[t] = got;
}
KERNEL(late_reuse, 64, (u32* out)) { reuse<false>(out); }
KERNEL(no_reuse, 64, (u32* out)) { reuse<true>(out); }

KERNEL(uninitialised, 32, (u32* out)) {
  SHARED u32 fixed[32];
  DYNAMIC_SHARED(memory);
  u32* mine = out + blockIdx.x * 64 + threadIdx.x;
  mine[0] = fixed[threadIdx.x];
  mine[32] = ((u32*)memory)[threadIdx.x];
  fixed[threadIdx.x] = ((u32*)memory)[threadIdx.x] = 5;
}
