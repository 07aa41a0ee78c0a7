// Rotary embedding, with the bits of src/ops/rotary/cpu.rs.
//
// A thread has one position and a few pairs of elements. It computes their sines and cosines once, in f64, and
// rotates these pairs in all heads and sequences of its share, so there is no table. The kernel is bound by memory if
// a share has about eight heads or more.
#include "math.cuh"

struct Rotation {
  // The logarithm of the base, and -1 to rotate backwards.
  f64 ln, sign;
  // The first position, and the numbers of positions and of pairs per vector.
  u64 start, time, pairs;
  // The strides of positions, in x and in the result.
  u64 time_steps[2];
  // The other dims, outermost first: extents, and strides in x and in the result.
  u64 len[3], steps[3], out_steps[3];
};

template <class T, int VEC>
struct alignas(VEC * sizeof(T)) Pack {
  T x[VEC];
};

template <class T, int VEC>
DEVICE void rotary(const Rotation& rotation, const T* x, T* out) {
  typedef Wide<T> A;
  typedef Pack<T, VEC> Few;
  u32 packs = (u32)rotation.pairs / VEC, index = (u32)thread_index();
  u32 row = index / packs, first = index % packs * VEC;
  if (row >= rotation.time) return;
  A cos[VEC], sin[VEC];
  f64 position = (f64)(rotation.start + row);
  UNROLL
  for (int i = 0; i < VEC; i++) {
    f64 turn = exp_f64(-((f64)(first + i) / (f64)rotation.pairs) * rotation.ln) * 0.318309886183790671537767526745 * 0.5;
    f64 high = position * turn, low = fma(position, turn, -high), s, c;
    // Adding and subtracting 1.5 * 2^52 rounds to the nearest integer.
    const f64 round = 6755399441055744.0;
    sin_cos_2pi_f64((high - ((high + round) - round)) + low, s, c);
    cos[i] = (A)c;
    sin[i] = (A)(rotation.sign * s);
  }
  x += row * rotation.time_steps[0] + first;
  out += row * rotation.time_steps[1] + first;
  u32 inner = (u32)rotation.len[2], middle = (u32)rotation.len[1], count = (u32)rotation.len[0] * middle * inner;
  for (u32 item = blockIdx.y; item < count; item += gridDim.y) {
    u64 k = item % inner, j = item / inner % middle, i = item / inner / middle;
    const T* from = x + i * rotation.steps[0] + j * rotation.steps[1] + k * rotation.steps[2];
    T* to = out + i * rotation.out_steps[0] + j * rotation.out_steps[1] + k * rotation.out_steps[2];
    Few left = *(const Few*)from, right = *(const Few*)(from + rotation.pairs), turned[2];
    UNROLL
    for (int e = 0; e < VEC; e++) {
      A a = widen(left.x[e]), b = widen(right.x[e]);
      turned[0].x[e] = narrow<T>(fma_(a, cos[e], -(b * sin[e])));
      turned[1].x[e] = narrow<T>(fma_(b, cos[e], a * sin[e]));
    }
    *(Few*)to = turned[0];
    *(Few*)(to + rotation.pairs) = turned[1];
  }
}

// Packs of 16 bytes if all rows allow it, else single elements.
#define ENTRIES(T)                                                                             \
  KERNEL(rotary_##T, 128, (Rotation rotation, const T* x, T* out)) { rotary<T, 1>(rotation, x, out); } \
  KERNEL(packs_##T, 128, (Rotation rotation, const T* x, T* out)) {                            \
    rotary<T, 16 / (int)sizeof(T)>(rotation, x, out);                                          \
  }
FLOATS(ENTRIES)
