// The elements that a rank holds, and their distribution over threads. Numbers of a region cost no more than those of
// the whole.
//
// A thread computes the numbers of one Philox block, and neighbouring threads write neighbouring elements. If these
// do not begin at the start of a block (because a shard boundary is inside one), a warp's elements go through shared
// memory and are still stored as whole vectors.
#pragma once
#include "philox.cuh"

// A box of global indices in contiguous local storage (rng::cuda::Place): `runs` runs of `run` elements, each also
// contiguous in the global tensor. Made for kernels with PER elements per thread.
struct Place {
  // The global index of the first element, and its offset in local storage.
  u64 first;
  u64 offset;
  u64 run;
  u64 runs;
  // The threads per run, and 2^(32 + shift) / units - 2^32, rounded up, or 0 if there are too many.
  u64 units;
  u32 magic;
  u32 shift;
  // 1 if every run begins at the start of a block, and if there are several runs, ends at the end of one.
  u32 whole;
  // The dims whose indices select a run, outermost first: their extents and global strides.
  u32 dims;
  u64 len[7];
  u64 stride[7];
};

struct Split {
  u64 whole;
  u64 rest;
};

// x / by and x % by, in 32 bits if they fit.
DEVICE Split split(u64 x, u64 by) {
  if (((x | by) >> 32) == 0) {
    u32 whole = (u32)x / (u32)by;
    return Split{whole, (u32)x - whole * (u32)by};
  }
  u64 whole = x / by;
  return Split{whole, x - whole * by};
}

// The run of unit i, and the unit's index in it.
DEVICE Split run_of(const Place& place, u64 i) {
  if (place.runs == 1) return Split{0, i};
  if (place.magic == 0 || (i >> 31) != 0) return split(i, place.units);
  // T. Granlund and P. Montgomery, "Division by invariant integers using multiplication", 1994.
  u32 whole = (__umulhi((u32)i, place.magic) + (u32)i) >> place.shift;
  return Split{whole, (u32)i - whole * (u32)place.units};
}

// The global index of a run's first element.
DEVICE u64 start_of(const Place& place, u64 run) {
  u64 at = place.first;
#pragma unroll 1
  for (u32 d = place.dims; d > 1; d--) {
    Split s = split(run, place.len[d - 1]);
    at += s.rest * place.stride[d - 1];
    run = s.whole;
  }
  return place.dims > 0 ? at + run * place.stride[0] : at;
}

// The global index of element i of a place.
DEVICE u64 index_of(const Place& place, u64 i) {
  if (place.runs == 1) return place.first + i;
  Split s = split(i, place.run);
  return start_of(place, s.whole) + s.rest;
}

// Calls `take` with the global and local index of each element of a place: for kernels with 1 element per thread.
template <class Take>
DEVICE void each_element(const Place& place, Take take) {
  u64 len = place.runs * place.units;
  for (u64 i = thread_index(); i < len; i += threads_len()) {
    Split s = run_of(place, i);
    take(start_of(place, s.whole) + s.rest, place.offset + i);
  }
}

// Elements of one block: the local ones from `at` on are the block's elements skip..skip + len; len may be 0.
struct Group {
  u64 block;
  u64 at;
  u32 skip;
  u32 len;

  // True if element i of the block is one of them.
  DEVICE bool has(int i) const { return (u32)i - skip < len; }
};

template <int PER>
DEVICE Group group_of(const Place& place, u64 i) {
  Split s = run_of(place, i);
  u64 start = start_of(place, s.whole);
  if (place.whole) {
    u64 left = place.run - s.rest * PER;
    return Group{start / PER + s.rest, place.offset + i * PER, 0, left < PER ? (u32)left : (u32)PER};
  }
  u64 end = start + place.run, block = start / PER + s.rest, low = block * PER, high = low + PER;
  u64 from = low > start ? low : start, to = high < end ? high : end;
  from = from < end ? from : end;
  return Group{block, place.offset + s.whole * place.run + (from - start), (u32)(from - low),
               to > from ? (u32)(to - from) : 0};
}

// ---- groups in memory ----------------------------------------------------------------------------------------------

template <class T, int LEN>
struct alignas(sizeof(T) * LEN < 16 ? sizeof(T) * LEN : 16) Pack {
  T of[LEN];
};
template <class T, int LEN>
DEVICE bool is_packed(const T* at) {
  return (u64)at % alignof(Pack<T, LEN>) == 0;
}

// Loads the group's elements at their words' positions, and `rest` at the other positions. `packed`: all whole groups
// are vectors.
template <int PER, class T>
DEVICE void load_group(const T* from, bool packed, Group group, T rest, T (&out)[PER]) {
  if (packed && group.len == PER) {
    Pack<T, PER> pack = *(const Pack<T, PER>*)(from + group.at);
    UNROLL
    for (int i = 0; i < PER; i++) out[i] = pack.of[i];
    return;
  }
  UNROLL
  for (int i = 0; i < PER; i++) out[i] = group.has(i) ? from[group.at + (u32)i - group.skip] : rest;
}

// Stores a warp's groups, which are consecutive, through `stage`, so that its vectors are vectors of the tensor.
template <int PER, class T>
DEVICE void store_staged(T* to, T* stage, Group group, const T (&values)[PER]) {
  const u32 LEN = sizeof(T) < 16 ? 16 / sizeof(T) : 1;
  u32 lane = threadIdx.x % 32;
  u64 first = __shfl_sync(0xffffffffu, group.at, 0), end = __shfl_sync(0xffffffffu, group.at + group.len, 31);
  u32 skip = (u32)((u64)(to + first) / sizeof(T)) % LEN, stop = skip + (u32)(end - first);
  UNROLL
  for (int i = 0; i < PER; i++) {
    if (group.has(i)) stage[skip + (u32)(group.at - first) + (u32)i - group.skip] = values[i];
  }
  __syncwarp();
  T* base = to + first - skip;
  for (u32 at = lane * LEN; at < stop; at += 32 * LEN) {
    if (at >= skip && at + LEN <= stop) {
      *(Pack<T, LEN>*)(base + at) = *(const Pack<T, LEN>*)(stage + at);
    } else {
      for (u32 k = at < skip ? skip : at; k < at + LEN && k < stop; k++) base[k] = stage[k];
    }
  }
  __syncwarp();
}

// True if all whole groups of a place are vectors of a tensor.
template <int PER, class T>
DEVICE bool is_packed(const T* at, const Place& place) {
  return place.whole && is_packed<T, PER>(at + place.offset);
}

// Writes the elements whose blocks are whole, in one run or in runs of one dim, and returns the number of groups.
template <int PER, class T, class Make>
DEVICE u64 fill_packed(T* out, const Place& place, Make make) {
  u64 len = place.runs == 1 ? place.run / PER : place.runs * place.units;
  bool one = place.runs == 1, few = place.magic != 0 && (len >> 31) == 0;
  if (!is_packed<PER>(out, place) || !(one || (place.dims == 1 && few))) return 0;
  u64 block = place.first / PER, skip = place.stride[0] / PER - place.units;
  u32 magic = place.magic, shift = place.shift;
  out += place.offset;
#pragma unroll 1
  for (u64 i = thread_index(); i < len; i += threads_len()) {
    u64 skipped = one ? 0 : ((__umulhi((u32)i, magic) + (u32)i) >> shift) * skip;
    T values[PER];
    make(Group{block + i + skipped, place.offset + i * PER, 0, PER}, values);
    Pack<T, PER> pack;
    UNROLL
    for (int k = 0; k < PER; k++) pack.of[k] = values[k];
    *(Pack<T, PER>*)(out + i * PER) = pack;
  }
  return len;
}

// Writes all elements of a place. `make` returns those of a group at their words' positions, and may leave the others
// unset.
template <int PER, class T, class Make>
DEVICE void fill_groups(T* out, const Place& place, Make make) {
  SHARED alignas(16) T stages[8][(32 * PER * sizeof(T) + 16) / sizeof(T)];
  u64 len = place.runs * place.units, end = place.offset + place.runs * place.run;
  u64 done = fill_packed<PER>(out, place, make);
  u32 lane = threadIdx.x % 32;
#pragma unroll 1
  for (u64 first = done + thread_index() - lane; first < len; first += threads_len()) {
    // The lanes beyond the last unit have an empty group at the end.
    Group group{0, end, 0, 0};
    T values[PER] = {};
    if (first + lane < len) group = group_of<PER>(place, first + lane);
    if (group.len > 0) make(group, values);
    store_staged<PER>(out, stages[threadIdx.x / 32], group, values);
  }
}

// As above, for numbers that are rounded to T.
template <int PER, class T, class Make>
DEVICE void fill_rounded(T* out, const Place& place, Make make) {
  fill_groups<PER>(out, place, [&](Group group, T(&values)[PER]) {
    Wide<T> wide[PER];
    make(group, wide);
    UNROLL
    for (int i = 0; i < PER; i++) values[i] = narrow<T>(wide[i]);
  });
}
