// Packs: neighbouring elements that a thread loads or stores at once, in 16 bytes (8 for types of one byte).
#pragma once
#include "iso.cuh"

// The elements of a pack of T.
template <class T>
constexpr u32 PACK_LEN = sizeof(T) == 1 ? 8 : 16 / sizeof(T);

template <class T, u32 V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
  T at[V];
};

// Loads V elements, from an address that is aligned to their bytes, or to 16.
template <u32 V, class T>
DEVICE Pack<T, V> load_pack(const T* from) {
  Pack<T, V> x;
  constexpr u32 EACH = V < PACK_LEN<T> ? V : PACK_LEN<T>;
  UNROLL for (u32 i = 0; i < V; i += EACH) {
    Pack<T, EACH> part = *(const Pack<T, EACH>*)(from + i);
    UNROLL for (u32 e = 0; e < EACH; ++e) x.at[i + e] = part.at[e];
  }
  return x;
}

// Loads V elements, from any address.
template <u32 V, class T>
DEVICE Pack<T, V> load_any(const T* from) {
  if ((u64)from % 16 == 0) return load_pack<V>(from);
  Pack<T, V> x;
  UNROLL for (u32 e = 0; e < V; ++e) x.at[e] = from[e];
  return x;
}

template <u32 V, class T>
DEVICE void store_pack(T* to, const Pack<T, V>& x) {
  *(Pack<T, V>*)to = x;
}

// The number of elements before the first pack of a run of `len` elements.
template <u32 V, class T>
DEVICE u32 before_packs(const T* run, u32 len) {
  u32 before = (V - (u32)((u64)run / sizeof(T)) % V) % V;
  return before < len ? before : len;
}

// Tells whether two runs have their packs at the same indices.
template <u32 V, class T>
DEVICE bool packs_meet(const T* x, const T* y) {
  return ((u64)x - (u64)y) % (V * sizeof(T)) == 0;
}

// Divides a run of `len` elements among `step` threads; this one is number `first`. Calls pack(i) for the first
// index of each pack, and one(i) for the elements before the first and after the last one. There are at least as many
// threads as elements in a pack. The loads of up to TIMES packs are on their way at once.
template <u32 V, int TIMES, class T, class OfPack, class OfOne>
DEVICE void by_packs(const T* run, u32 len, u32 first, u32 step, OfPack pack, OfOne one) {
  u32 before = before_packs<V>(run, len), end = before + (len - before) / V * V;
  _Pragma("unroll TIMES") for (u32 i = before + first * V; i < end; i += step * V) pack(i);
  if (first < before) one(first);
  if (end + first < len) one(end + first);
}
