// Keys for sorting, and the elements that a sort of positions puts first (src/ops/order).
#include "num.cuh"

// An unsigned integer that is smaller for a smaller element: kernels/src/order/key.rs. Zeros of both signs are equal, and
// NaN has the largest.
DEVICE u32 order_key(u8 x) { return x; }
DEVICE u32 order_key(bool x) { return x; }
DEVICE u32 order_key(i32 x) { return (u32)x ^ 0x80000000u; }
DEVICE u64 order_key(i64 x) { return (u64)x ^ 0x8000000000000000ull; }
template <class B>
DEVICE B float_key(B bits, B sign, B infinity) {
  if (bits == sign) bits = 0;
  if ((bits & (B)~sign) > infinity) return (B)~(B)0;
  return bits & sign ? (B)~bits : (B)(bits | sign);
}
DEVICE u32 order_key(f32 x) { return float_key<u32>(bits_of(x), 0x80000000u, 0x7f800000u); }
DEVICE u64 order_key(f64 x) { return float_key<u64>(bits_of(x), 0x8000000000000000ull, 0x7ff0000000000000ull); }
DEVICE u32 order_key(f16 x) { return float_key<u16>(x.bits, 0x8000, 0x7c00); }
DEVICE u32 order_key(bf16 x) { return float_key<u16>(x.bits, 0x8000, 0x7f80); }

// The bits of the keys from bit `shift` on. A null `from` means that the positions are 0, 1, 2 and so on.
template <class T>
DEVICE void keys(const T* x, const u32* from, u32* out, u64 hits, u32 descending, u32 shift) {
  u64 h = thread_index();
  if (h >= hits) return;
  u64 key = (u64)order_key(x[from ? from[h] : h]);
  out[h] = (u32)((descending ? ~key : key) >> shift);
}

KERNEL(rows_i64, 256, (const u32* from, u32* out, u64 hits, u32 n)) {
  u64 h = thread_index();
  if (h < hits) out[h] = from[h] / n;
}

// Copies the first k elements of each row of n, and their indices plus `base`, to columns `at..at + k` of rows of
// `width`.
template <class T>
DEVICE void take(const T* x, const u32* from, T* values, i64* indices, u64 all, u32 n, u32 k, u32 width, u32 at, u64 base) {
  u64 e = thread_index();
  if (e >= all) return;
  u64 row = e / k, column = e - row * k;
  u32 position = from[row * n + column];
  u64 to = row * width + at + column;
  values[to] = x[position];
  indices[to] = (i64)(base + (position - row * n));
}

#define ENTRY(T)                                                                                                      \
  KERNEL(keys_##T, 256, (const T* x, const u32* from, u32* out, u64 hits, u32 descending, u32 shift)) {               \
    keys(x, from, out, hits, descending, shift);                                                                      \
  }                                                                                                                   \
  KERNEL(take_##T, 256, (const T* x, const u32* from, T* values, i64* indices, u64 all, u32 n, u32 k, u32 width,      \
                         u32 at, u64 base)) {                                                                         \
    take(x, from, values, indices, all, n, k, width, at, base);                                                       \
  }
ALL_TYPES(ENTRY)
