// Adds up rows by destination (also for scatter_add). The sum of a destination follows the summation tree over
// positions, without the positions that do not hit it (src/ops/index/segments.rs).
//
// 1. `keys`: computes each hit's destination and its path in the tree, with one bit per level (left 0, right 1). Paths
//    are ordered like positions, and the highest bit in which two differ is the node that joins them.
// 2. `count`, `scan`, `place` of radix.cu sort the hits by destination.
// 3. `add`: one thread per column of a destination walks over its hits. The deeper of two neighbouring nodes is joined
//    first, so at most one value per level waits: a bit set tells the levels, and shared memory holds the values.
#include "num.cuh"

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
