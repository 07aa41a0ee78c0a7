// Adds up rows by destination (also for scatter_add). The sum of a destination follows the summation tree over
// positions, without the positions that do not hit it (src/ops/index/segments.rs).
//
// 1. `keys`: computes each hit's destination and its path in the tree, with one bit per level (left 0, right 1). Paths
//    are ordered like positions, and the highest bit in which two differ is the node that joins them.
// 2. `count`, `scan`, `place`: sort the hits by destination, stably, 8 bits per pass. Each block counts the digits of
//    its range; the offsets are ordered by digit, then block; each block places its range in order.
// 3. `add`: one thread per column of a destination walks over its hits. The deeper of two neighbouring nodes is joined
//    first, so at most one value per level waits: a bit set tells the levels, and shared memory holds the values.
#include "num.cuh"

#define LANES 32u
#define ALL_LANES 0xffffffffu

// The extents of positions, outermost first, and the tree's levels below each.
struct Extents {
  u32 len[8];
  u32 levels[8];
  u32 rank, unused;
};

// The path of index `i` of a dim: by halving, except within the leaves of the innermost dim (at most LEAF = 2^5),
// at which it is the index.
DEVICE u64 path_of(u32 len, u32 levels, bool innermost, u32 i) {
  u64 path = 0;
  u32 level = levels;
  while (level > 0 && !(innermost && level == 5)) {
    u32 left = left_of(len);
    bool right = i >= left;
    path = path << 1 | right;
    i -= right ? left : 0;
    len = right ? len - left : left;
    level -= 1;
  }
  return path << level | (level > 0 ? i : 0);
}

// Hit h belongs to row h / each, whose destinations begin at `held` times its number. An index that this rank does
// not store goes to `none`.
KERNEL(keys_i64, 256, (const i64* index, u32* keys, u64* paths, u64 hits, u64 each, Extents extents, u64 held, u64 n, u64 start,
                       u32 none, u32 code, Fault* faults)) {
  u64 h = thread_index();
  if (h >= hits) return;
  u64 chosen = (u64)index[h], place = chosen - start, row = h / each;
  if (chosen >= n) {
    report(faults, code, (i64)chosen);
    place = held;
  }
  keys[h] = place < held ? (u32)(row * held + place) : none;
  u64 path = 0, at = h - row * each, size = each;
  UNROLL for (u32 d = 0; d < 8; ++d) {
    if (d >= extents.rank) continue;
    size = size / extents.len[d];
    u64 i = at / size;
    at -= i * size;
    path = path << extents.levels[d] | path_of(extents.len[d], extents.levels[d], d + 1 == extents.rank, (u32)i);
  }
  paths[h] = path;
}

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

// Writes the destinations that have hits; `out` is zero before.
template <class T>
DEVICE void add(const u32* keys, const u32* positions, const u64* paths, const T* src, T* out, u64 hits, u32 width, u32 none,
                Wide<T>* waiting) {
  typedef Wide<T> A;
  u64 e = thread_index(), first = e / width;
  if (first >= hits) return;
  u32 column = (u32)(e - first * width), key = keys[first];
  if (key == none || (first > 0 && keys[first - 1] == key)) return;
  waiting += threadIdx.x;
  u32 position = positions[first];
  u64 path = paths[position], pending = 0;
  A sum = widen(src[(u64)position * width + column]);
  for (u64 h = first + 1; h < hits && keys[h] == key; h += 4) {
    const u32 AHEAD = 4;
    A x[AHEAD];
    u64 p[AHEAD];
    u32 some = 0;
    UNROLL for (u32 k = 0; k < AHEAD; ++k) {
      bool here = some == k && h + k < hits && keys[h + k] == key;
      if (!here) continue;
      position = positions[h + k];
      p[k] = paths[position];
      x[k] = widen(src[(u64)position * width + column]);
      some += 1;
    }
    UNROLL for (u32 k = 0; k < AHEAD; ++k) {
      if (k >= some) continue;
      u32 level = 63 - __clzll((i64)(path ^ p[k]));
      while (pending & ((1ull << level) - 1)) {
        u32 least = __ffsll((i64)pending) - 1;
        sum = add_(waiting[least * blockDim.x], sum);
        pending &= pending - 1;
      }
      waiting[level * blockDim.x] = sum;
      pending |= 1ull << level;
      sum = x[k];
      path = p[k];
    }
  }
  while (pending) {
    u32 least = __ffsll((i64)pending) - 1;
    sum = add_(waiting[least * blockDim.x], sum);
    pending &= pending - 1;
  }
  out[(u64)key * width + column] = narrow<T>(A(0) + sum);
}

// Used if each destination has at most one hit: hit h goes to row h of the destinations.
template <class T>
DEVICE void put(const i64* index, const T* src, T* out, u64 hits, u64 held, u64 n, u64 start, u32 code, Fault* faults) {
  u64 h = thread_index();
  if (h >= hits) return;
  u64 chosen = (u64)index[h], place = chosen - start;
  if (chosen >= n) return report(faults, code, (i64)chosen);
  if (place < held) out[h * held + place] = narrow<T>(Wide<T>(0) + widen(src[h]));
}

#define ENTRY(T)                                                                                                             \
  KERNEL(add_##T, 128, (const u32* keys, const u32* positions, const u64* paths, const T* src, T* out, u64 hits, u32 width,  \
                        u32 none)) {                                                                                         \
    DYNAMIC_SHARED(waiting);                                                                                                 \
    add(keys, positions, paths, src, out, hits, width, none, (Wide<T>*)waiting);                                             \
  }                                                                                                                          \
  KERNEL(put_##T, 256, (const i64* index, const T* src, T* out, u64 hits, u64 held, u64 n, u64 start, u32 code,              \
                        Fault* faults)) {                                                                                    \
    put(index, src, out, hits, held, n, start, code, faults);                                                                \
  }
FLOATS(ENTRY)
