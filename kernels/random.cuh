// Which elements a rank holds, and how threads share them: what a place's numbers cost, those of the whole cost.
#pragma once
#include "philox.cuh"

// A box of global indices in contiguous local storage (rng::cuda::Place): `runs` runs of `run` elements, each contiguous
// in the whole too.
struct Place {
  // The global index of the first element, and where it lies in local storage.
  u64 first;
  u64 offset;
  u64 run;
  u64 runs;
  // What divides `first` and, where there are several runs, `run` and every stride: 4, 2 or 1.
  u32 group;
  // The dims whose indices name a run, outermost first: their extents, and how far each moves the global index.
  u32 dims;
  u64 len[7];
  u64 stride[7];
};

struct Split {
  u64 whole;
  u64 rest;
};

// x / by and x % by, in 32 bits where they fit.
DEVICE Split split(u64 x, u64 by) {
  if (((x | by) >> 32) == 0) {
    u32 whole = (u32)x / (u32)by;
    return Split{whole, (u32)x - whole * (u32)by};
  }
  u64 whole = x / by;
  return Split{whole, x - whole * by};
}

// The global index of a run's first element.
DEVICE u64 start_of(const Place& place, u64 run) {
  u64 at = place.first;
  for (u32 d = place.dims; d > 1; d--) {
    Split s = split(run, place.len[d - 1]);
    at += s.rest * place.stride[d - 1];
    run = s.whole;
  }
  return place.dims > 0 ? at + run * place.stride[0] : at;
}

// Elements of one Philox block: local ones from `at` on, which are the block's elements skip..skip + len. Few enough to
// be held in registers; len may be 0.
struct Group {
  u64 block;
  u64 at;
  u32 skip;
  u32 len;
};

// How many groups of PER elements a place has at most.
template <int PER>
DEVICE u64 groups_len(const Place& place) {
  u64 spare = place.group % PER == 0 ? PER - 1 : 2 * PER - 2;
  return place.runs * ((place.run + spare) / PER);
}

template <int PER>
DEVICE Group group_of(const Place& place, u64 i) {
  u64 run = place.run;
  if (place.runs == 1 && place.group % PER == 0) {
    u64 at = i * PER, left = run - at;
    return Group{place.first / PER + i, place.offset + at, 0, left < PER ? (u32)left : (u32)PER};
  }
  u64 spare = place.group % PER == 0 ? PER - 1 : 2 * PER - 2;
  Split s = split(i, (run + spare) / PER);
  u64 start = start_of(place, s.whole), end = start + run;
  u64 block = start / PER + s.rest, low = block * PER, high = low + PER;
  u64 from = low > start ? low : start, to = high < end ? high : end;
  u32 len = from < to ? (u32)(to - from) : 0;
  return Group{block, place.offset + s.whole * run + (from - start), (u32)(from - low), len};
}

// Has `take` do all groups of a place, shared by the threads of the grid: neighbours take neighbours.
template <int PER, class Take>
DEVICE void each_group(const Place& place, Take take) {
  u64 len = groups_len<PER>(place);
  for (u64 i = thread_index(); i < len; i += threads_len()) {
    Group group = group_of<PER>(place, i);
    if (group.len > 0) take(group);
  }
}

// The global index of a place's element.
DEVICE u64 index_of(const Place& place, u64 i) {
  Split s = split(i, place.run);
  return start_of(place, s.whole) + s.rest;
}

// Has `take` do all elements of a place, given their global and their local indices.
template <class Take>
DEVICE void each_element(const Place& place, Take take) {
  u64 len = place.runs * place.run;
  for (u64 i = thread_index(); i < len; i += threads_len()) {
    take(place.runs == 1 ? place.first + i : index_of(place, i), place.offset + i);
  }
}

// ---- groups in memory: one access where they are whole and aligned -------------------------------------------------

template <class T, int PER>
struct alignas(sizeof(T) * PER < 16 ? sizeof(T) * PER : 16) Pack {
  T of[PER];
};

template <int PER, class T>
DEVICE bool is_packed(const T* at, Group group) {
  return group.len == PER && (u64)(at + group.at) % alignof(Pack<T, PER>) == 0;
}

// The group's elements at their words' places; `rest` at the places of others.
template <int PER, class T>
DEVICE void load_group(const T* from, Group group, T rest, T (&out)[PER]) {
  if (is_packed<PER>(from, group)) {
    Pack<T, PER> pack = *(const Pack<T, PER>*)(from + group.at);
    UNROLL
    for (int i = 0; i < PER; i++) out[i] = pack.of[i];
    return;
  }
  UNROLL
  for (int i = 0; i < PER; i++) {
    u32 k = (u32)i - group.skip;
    out[i] = k < group.len ? from[group.at + k] : rest;
  }
}

template <int PER, class T>
DEVICE void store_group(T* to, Group group, const T (&values)[PER]) {
  if (is_packed<PER>(to, group)) {
    Pack<T, PER> pack;
    UNROLL
    for (int i = 0; i < PER; i++) pack.of[i] = values[i];
    *(Pack<T, PER>*)(to + group.at) = pack;
    return;
  }
  UNROLL
  for (int i = 0; i < PER; i++) {
    u32 k = (u32)i - group.skip;
    if (k < group.len) to[group.at + k] = values[i];
  }
}

// The same of numbers that are rounded to T.
template <class T, int PER>
DEVICE void store_rounded(T* to, Group group, const Wide<T> (&values)[PER]) {
  T rounded[PER];
  UNROLL
  for (int i = 0; i < PER; i++) rounded[i] = narrow<T>(values[i]);
  store_group<PER>(to, group, rounded);
}
