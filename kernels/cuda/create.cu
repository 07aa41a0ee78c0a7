// Elements that are formulas of global indices: sequences, bands of diagonals, and one-hot rows.
#include "random.cuh"

// Element i is start + i * step below `turn`, and end - (last - i) * step from there on.
KERNEL(sequence_f64, 256, (f64 * out, Place place, f64 start, f64 step, f64 end, u64 last, u64 turn)) {
  each_element(place, [&](u64 i, u64 at) {
    out[at] = i < turn ? start + (f64)(i64)i * step : end - (f64)(i64)(last - i) * step;
  });
}
KERNEL(sequence_i64, 256, (i64 * out, Place place, f64 start, f64 step, f64, u64, u64)) {
  each_element(place, [&](u64 i, u64 at) { out[at] = (i64)((u64)(i64)start + i * (u64)(i64)step); });
}

// The diagonals low..=high of the last two dims (ops::create::DiagonalBand).
struct Diagonals {
  u64 rows, columns;
  i64 low, high;
  DEVICE bool has(u64 e) const {
    Split at = split(e, columns);
    i64 diagonal = (i64)at.rest - (i64)split(at.whole, rows).rest;
    return low <= diagonal && diagonal <= high;
  }
};

template <class T>
DEVICE void fill_band(T* out, const Place& place, const Diagonals& band, T inside, T outside) {
  fill_groups<4>(out, place, [&](Group group, T(&x)[4]) {
    UNROLL
    for (int i = 0; i < 4; i++) x[i] = band.has(group.block * 4 + i) ? inside : outside;
  });
}

template <class T>
DEVICE void keep_band(const T* x, T* out, const Place& place, const Diagonals& band) {
  bool packed = is_packed<4>(x, place);
  fill_groups<4>(out, place, [&](Group group, T(&y)[4]) {
    T from[4];
    load_group<4>(x, packed, group, T{}, from);
    UNROLL
    for (int i = 0; i < 4; i++) y[i] = band.has(group.block * 4 + i) ? from[i] : T{};
  });
}

// Rows of `held` classes from `start` on.
template <class T>
DEVICE void one_hot(const i64* index, T* out, u64 all, u64 start, u64 held, u64 classes, T one, T zero, u32 code,
                    Fault* faults) {
  for (u64 e = thread_index(); e < all; e += threads_len()) {
    Split at = split(e, held);
    u64 chosen = (u64)index[at.whole];
    if (chosen >= classes) report(faults, code, (i64)chosen);
    out[e] = chosen == start + at.rest ? one : zero;
  }
}

#define ENTRIES(T)                                                                                                  \
  KERNEL(band_##T, 256, (T * out, Place place, Diagonals band, T inside, T outside)) {                              \
    fill_band(out, place, band, inside, outside);                                                                   \
  }                                                                                                                 \
  KERNEL(keep_band_##T, 256, (const T* x, T* out, Place place, Diagonals band)) { keep_band(x, out, place, band); } \
  KERNEL(one_hot_##T, 256, (const i64* index, T* out, u64 all, u64 start, u64 held, u64 classes, T one, T zero,     \
                            u32 code, Fault* faults)) {                                                             \
    one_hot(index, out, all, start, held, classes, one, zero, code, faults);                                        \
  }
ALL_TYPES(ENTRIES)
