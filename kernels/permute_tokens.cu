// Rows of tokens to slots and back, 16 bytes per thread if rows are aligned to that. A slot of -1 is a dropped
// assignment. A row that is dropped, or that another rank stores, is the identity of the sum, -0 or 0.
#include "num.cuh"

template <class T, u32 N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

template <class T>
DEVICE T nothing() {
  return narrow<T>(Num<Wide<T>>::sum_pad());
}
template <>
DEVICE bool nothing<bool>() {
  return false;
}

// Assignment i is choice i % choices of token i / choices % .. of batch entry i / each. `width` and the strides count
// packs.
struct Place {
  u64 entry, row;
  bool held;
};
DEVICE Place place_of(u64 i, i64 slot, u64 each, u64 held, u64 slots, u64 start, bool first, u32 code, Fault* faults) {
  u64 at = (u64)slot - start;
  bool legal = slot == -1 || (u64)slot < slots;
  if (!legal && first) report(faults, code, slot);
  return Place{i / each, at, legal && slot != -1 && at < held};
}

template <class T, u32 N>
DEVICE void permute(const T* x, const i64* slot, T* out, u64 all, u64 width, u64 each, u64 choices, u64 by_batch, u64 by_token,
                    u64 by_choice, u64 held, u64 slots, u64 start, u32 code, Fault* faults) {
  typedef Pack<T, N> P;
  for (u64 e = thread_index(); e < all; e += threads_len()) {
    u64 i = e / width, column = e - i * width;
    Place place = place_of(i, slot[i], each, held, slots, start, column == 0, code, faults);
    if (!place.held) continue;
    u64 in_entry = i - place.entry * each, token = in_entry / choices, choice = in_entry - token * choices;
    const P* from = (const P*)x + place.entry * by_batch + token * by_token + choice * by_choice;
    ((P*)out)[(place.entry * held + place.row) * width + column] = from[column];
  }
}

template <class T, u32 N>
DEVICE void unpermute(const T* y, const i64* slot, T* out, u64 all, u64 width, u64 each, u64 by_batch, u64 by_slot, u64 held,
                      u64 slots, u64 start, u32 code, Fault* faults) {
  typedef Pack<T, N> P;
  for (u64 e = thread_index(); e < all; e += threads_len()) {
    u64 i = e / width, column = e - i * width;
    Place place = place_of(i, slot[i], each, held, slots, start, column == 0, code, faults);
    P pack;
    if (place.held) {
      pack = ((const P*)y)[place.entry * by_batch + place.row * by_slot + column];
    } else {
      UNROLL for (u32 k = 0; k < N; ++k) pack.v[k] = nothing<T>();
    }
    ((P*)out)[e] = pack;
  }
}

#define PARAMETERS(T)                                                                                                    \
  (const T* rows, const i64* slot, T* out, u64 all, u64 width, u64 each, u64 choices, u64 by_batch, u64 by_row,          \
   u64 by_choice, u64 held, u64 slots, u64 start, u32 code, Fault* faults)
#define ENTRIES(T, N, permute_name, unpermute_name)                                                                      \
  KERNEL(permute_name, 256, PARAMETERS(T)) {                                                                             \
    permute<T, N>(rows, slot, out, all, width, each, choices, by_batch, by_row, by_choice, held, slots, start, code,     \
                  faults);                                                                                               \
  }                                                                                                                      \
  KERNEL(unpermute_name, 256, PARAMETERS(T)) {                                                                           \
    unpermute<T, N>(rows, slot, out, all, width, each, by_batch, by_row, held, slots, start, code, faults);              \
  }
#define ENTRY(T)                                  \
  ENTRIES(T, 1, permute_##T, unpermute_##T)       \
  ENTRIES(T, 16 / sizeof(T), packed_permute_##T, packed_unpermute_##T)
ALL_TYPES(ENTRY)
