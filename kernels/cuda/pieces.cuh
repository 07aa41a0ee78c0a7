// Gradients of losses, element by element, with a few numbers per row.
//
// Long rows are divided into pieces of 2048 elements, one per block of 256 threads, which loads and stores packs wherever
// the row begins. Of shorter rows, a thread has a pack, or an element if rows do not consist of packs.
#pragma once
#include "packs.cuh"

const u32 PIECE = 2048;

// `loss.at(x, i)` is element i of the row.
template <class T, class Loss>
DEVICE void gradient_of_pack(const Loss& loss, const T* x, T* out, u32 i) {
  constexpr u32 V = PACK_LEN<T>;
  Pack<T, V> pack = load_pack<V>(x);
  loss.each(pack, i);
  store_pack(out, pack);
}

// The `each` elements from index i on: a pack or one.
template <class T, class Loss>
DEVICE void gradient_of_few(const Loss& loss, const T* x, T* out, u32 i, u32 each) {
  if (each > 1) gradient_of_pack(loss, x, out, i);
  else *out = loss.at(*x, i);
}

template <class T, class Loss>
DEVICE void gradient_of_piece(const Loss& loss, const T* x, T* out, u32 piece, u32 held) {
  constexpr u32 V = PACK_LEN<T>;
  u32 first = piece * PIECE, len = first + PIECE < held ? PIECE : held - first;
  x += first, out += first;
  if (packs_meet<V>(x, (const T*)out)) {
    by_packs<V, 1>(
        x, len, threadIdx.x, 256, [&](u32 i) { gradient_of_pack(loss, x + i, out + i, first + i); },
        [&](u32 i) { out[i] = loss.at(x[i], first + i); });
  } else {
    for (u32 i = threadIdx.x; i < len; i += 256) out[i] = loss.at(x[i], first + i);
  }
}
