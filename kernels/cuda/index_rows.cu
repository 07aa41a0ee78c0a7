// Rows by index, 16 bytes per thread if rows are aligned to that: reads them (`embedding`, `unpermute_tokens`) or writes
// them (`permute_tokens`). Entry i of the index belongs to batch entry i / each. A row that another rank stores, and one
// whose entry is -1 if entries may be (`dropped`), is the identity of the sum, -0 or 0.
#include "num.cuh"

template <class T, u32 N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

// The row of an entry among those that the rank stores, or `held` if it stores none.
DEVICE u64 place_of(i64 entry, u64 held, u64 n, u64 start, u32 dropped, bool first, u32 code, Fault* faults) {
  if (entry == -1 && dropped) return held;
  if ((u64)entry >= n) {
    if (first) report(faults, code, entry);
    return held;
  }
  u64 place = (u64)entry - start;
  return place < held ? place : held;
}

// x / by, in 32 bits if they fit.
DEVICE u64 quotient(u64 x, u64 by) { return ((x | by) >> 32) == 0 ? (u32)x / (u32)by : x / by; }

// `width` and the strides count packs.
template <class T, u32 N>
DEVICE void read_rows(const T* table, const i64* index, T* out, u64 all, u64 width, u64 each, u64 by_batch, u64 by_row, u64 held,
                      u64 n, u64 start, u32 dropped, u32 code, Fault* faults) {
  typedef Pack<T, N> P;
  for (u64 e = thread_index(); e < all; e += threads_len()) {
    u64 i = quotient(e, width), column = e - i * width;
    u64 place = place_of(index[i], held, n, start, dropped, column == 0, code, faults);
    P pack;
    if (place < held) {
      pack = ((const P*)table)[quotient(i, each) * by_batch + place * by_row + column];
    } else {
      UNROLL for (u32 k = 0; k < N; ++k) pack.v[k] = sum_identity<T>();
    }
    ((P*)out)[e] = pack;
  }
}

// Entry i is choice i % choices of token i / choices % .. of its batch entry.
template <class T, u32 N>
DEVICE void write_rows(const T* x, const i64* index, T* out, u64 all, u64 width, u64 each, u64 choices, u64 by_batch, u64 by_token,
                       u64 by_choice, u64 held, u64 n, u64 start, u32 dropped, u32 code, Fault* faults) {
  typedef Pack<T, N> P;
  for (u64 e = thread_index(); e < all; e += threads_len()) {
    u64 i = quotient(e, width), column = e - i * width;
    u64 place = place_of(index[i], held, n, start, dropped, column == 0, code, faults);
    if (place == held) continue;
    u64 entry = quotient(i, each), in_entry = i - entry * each;
    u64 token = quotient(in_entry, choices), choice = in_entry - token * choices;
    const P* from = (const P*)x + entry * by_batch + token * by_token + choice * by_choice;
    ((P*)out)[(entry * held + place) * width + column] = from[column];
  }
}

#define PARAMETERS(T)                                                                                                     \
  (const T* rows, const i64* index, T* out, u64 all, u64 width, u64 each, u64 choices, u64 by_batch, u64 by_row,          \
   u64 by_choice, u64 held, u64 n, u64 start, u32 dropped, u32 code, Fault* faults)
#define ENTRIES(T, N, read_name, write_name)                                                                              \
  KERNEL(read_name, 256, PARAMETERS(T)) {                                                                                 \
    read_rows<T, N>(rows, index, out, all, width, each, by_batch, by_row, held, n, start, dropped, code, faults);         \
  }                                                                                                                       \
  KERNEL(write_name, 256, PARAMETERS(T)) {                                                                                \
    write_rows<T, N>(rows, index, out, all, width, each, choices, by_batch, by_row, by_choice, held, n, start, dropped,   \
                     code, faults);                                                                                       \
  }
#define ENTRY(T)                      \
  ENTRIES(T, 1, read_##T, write_##T) \
  ENTRIES(T, 16 / sizeof(T), packed_read_##T, packed_write_##T)
ALL_TYPES(ENTRY)

// Reports slots that are out of range, and equal ones of a batch entry. `taken` has a zero per batch entry and slot.
KERNEL(distinct_i64, 256, (const i64* slot, u32* taken, u64 all, u64 each, u64 n, u32 code, u32 equal, Fault* faults)) {
  for (u64 i = thread_index(); i < all; i += threads_len()) {
    u64 place = place_of(slot[i], n, n, 0, 1, true, code, faults);
    if (place < n && atomicCAS(&taken[quotient(i, each) * n + place], 0u, 1u) != 0u) report(faults, equal, slot[i]);
  }
}
