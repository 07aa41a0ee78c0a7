// Cosines and sines of position times angle, with the bits of src/ops/rotary/table.rs. One thread per pair.
#include "math.cuh"

template <class A>
DEVICE void rotary_table(const i64* position, const f64* angle, A* cosines, A* sines, f64 scale, u64 count, u64 pairs) {
  u64 e = thread_index();
  if (e >= count) return;
  f64 at = (f64)position[e / pairs], turn = angle[e % pairs] * 0.318309886183790671537767526745 * 0.5;
  f64 high = at * turn, low = fma(at, turn, -high), s, c;
  // Adding and subtracting 1.5 * 2^52 rounds to the nearest integer.
  const f64 round = 6755399441055744.0;
  sin_cos_2pi_f64((high - ((high + round) - round)) + low, s, c);
  cosines[e] = (A)(c * scale);
  sines[e] = (A)(s * scale);
}

KERNEL(rotary_table_f32, 256,
       (const i64* position, const f64* angle, f32* cosines, f32* sines, f64 scale, u64 count, u64 pairs)) {
  rotary_table<f32>(position, angle, cosines, sines, scale, count, pairs);
}
KERNEL(rotary_table_f64, 256,
       (const i64* position, const f64* angle, f64* cosines, f64* sines, f64 scale, u64 count, u64 pairs)) {
  rotary_table<f64>(position, angle, cosines, sines, scale, count, pairs);
}
