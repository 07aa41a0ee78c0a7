// Pointwise kernels: element i of the result is a formula of element i of each operand.
//
// The table of src/ops/pointwise gives each formula as a struct and lists its dtypes: `EACH_FLOAT(ALIKE_1, exp)`. A
// formula receives its operands widened (type A), and the operator's attributes as f64. Each dtype has two entries:
// <name>_<dtype> for contiguous operands and results, and <name>_strided_<dtype> for any other strides.
//
// Both use packs of 16 bytes if layouts and addresses allow it, and load two packs per operand and thread before they
// compute: 64 KiB per multiprocessor at full occupancy, more than latency times bandwidth (about 25 KiB on an H100).
// Threads share nothing, so a result may overwrite a contiguous operand.
#pragma once
#include "short_functions.cuh"
#include "num.cuh"

constexpr u32 POINTWISE_THREADS = 256;
// The packs that a thread loads before it stores; src/tensor/cuda/map.rs has both numbers as well.
constexpr int PACKS = 2;

#ifdef ISO_SHIM
#define ROLLED
#else
#define ROLLED _Pragma("unroll 1")
#endif

// The operator's attributes.
struct Scalars {
  f64 s, t;
};

// Division of an index below 2^31 by a number that the host knows: q = (mulhi(i, magic) + i) >> shift.
struct Divisor {
  u32 n, magic, shift;
};
DEVICE u32 divide(u32 i, const Divisor& by) { return (__umulhi(i, by.magic) + i) >> by.shift; }

// The result (place 0) and up to three operands as strided layouts of one shape, innermost dim first. Along the
// innermost dim, indices count packs of `width` elements; a stride of 0 there repeats one element.
constexpr int WALK_DIMS = 6;
struct StridedWalk {
  u64 start[4];
  u64 stride[4][WALK_DIMS];
  Divisor by[WALK_DIMS];
  u32 dims, len, width, unused;
};

template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
  T at[V];
};

// Several packs, all loaded before any is used.
template <class T, int V, int U>
struct Packs {
  Pack<T, V> pack[U];
};

DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
template <class... More>
DEVICE constexpr int larger(int a, int b, More... more) {
  return larger(larger(a, b), more...);
}
// The elements of a pack: the number of elements of the widest type in 16 bytes.
template <class... T>
constexpr int PACK_LEN = 16 / larger(1, (int)sizeof(T)...);

template <int V, class T>
DEVICE bool is_aligned(const T* p) {
  return (u64)p % sizeof(Pack<T, V>) == 0;
}

// Rounds x to odd at 14 bits, so that rounding the result to f16 or bf16 equals rounding x once (kernels/src/element.rs).
DEVICE f32 odd_f32(f64 x) {
  constexpr u64 REST = (1ull << 39) - 1;
  u64 bits = bits_of(x), inexact = ((bits & REST) + REST) & (REST + 1);
  return (f32)f64_of((bits | inexact) & ~REST);
}

// A formula with this base is computed in f64 for every type, and its result is rounded once. If `SHORT` is true, its member
// `Short` is the formula for types narrower than f64.
struct ComputedInF64 {
  static constexpr bool SHORT = false;
};
template <bool IN_F64, class O>
struct Evaluate {
  template <class F, class... A>
  static DEVICE O at(Scalars k, A... x) {
    return narrow<O>(F::at(k.s, k.t, x...));
  }
};
template <class O>
struct Evaluate<true, O> {
  static DEVICE f64 ready(f64, f64 x) { return x; }
  static DEVICE f32 ready(f32, f64 x) { return sizeof(O) == 2 ? odd_f32(x) : (f32)x; }
  template <class F, class... A>
  static DEVICE O at(Scalars k, A... x) {
    if constexpr (F::SHORT && sizeof(O) < sizeof(f64)) {
      return narrow<O>(ready(Wide<O>(0), F::Short::at(k.s, k.t, (f64)x...)));
    } else {
      return narrow<O>(ready(Wide<O>(0), F::at(k.s, k.t, (f64)x...)));
    }
  }
};

// Applies the formula to the elements of one pack.
template <class F, class O, int V, class... In>
DEVICE Pack<O, V> apply(Scalars k, const Pack<In, V>&... in) {
  Pack<O, V> out;
  UNROLL for (int v = 0; v < V; v++) out.at[v] = Evaluate<__is_base_of(ComputedInF64, F), O>::template at<F>(k, widen(in.at[v])...);
  return out;
}

// ---- contiguous ----------------------------------------------------------------------------------------------------

template <int V, int U, class T>
DEVICE Packs<T, V, U> load_flat(const T* p, u64 first, u64 len) {
  Packs<T, V, U> x;
  UNROLL for (int u = 0; u < U; u++) {
    u64 i = first + u * POINTWISE_THREADS;
    x.pack[u] = ((const Pack<T, V>*)p)[i < len ? i : len - 1];
  }
  return x;
}

template <class F, class O, int V, int U, class... In>
DEVICE void store_flat(Scalars k, O* out, u64 first, u64 len, const Packs<In, V, U>&... in) {
  UNROLL for (int u = 0; u < U; u++) {
    u64 i = first + u * POINTWISE_THREADS;
    if (i < len) ((Pack<O, V>*)out)[i] = apply<F, O, V, In...>(k, in.pack[u]...);
  }
}

// Block `block` of `blocks` computes PACKS packs per thread, or the same elements one by one if an address is not
// aligned to a pack.
template <class F, class O, class... In>
DEVICE void flat_block(u32 block, u32 blocks, Scalars k, O* out, u64 n, const In*... in) {
  constexpr int V = PACK_LEN<O, In...>, U = PACKS;
  if ((is_aligned<V>(out) & ... & is_aligned<V>(in))) {
    u64 len = n / V, first = (u64)block * (POINTWISE_THREADS * U) + threadIdx.x;
    if (len > 0) store_flat<F, O, V, U, In...>(k, out, first, len, load_flat<V, U>(in, first, len)...);
    u64 rest = len * V + threadIdx.x;
    if (block == blocks - 1 && rest < n)
      store_flat<F, O, 1, 1, In...>(k, out, rest, n, load_flat<1, 1>(in, rest, n)...);
    return;
  }
  u64 start = (u64)block * (POINTWISE_THREADS * U * V) + threadIdx.x;
  ROLLED for (u32 r = 0; r < V; r++) {
    u64 first = start + r * (POINTWISE_THREADS * U);
    store_flat<F, O, 1, U, In...>(k, out, first, n, load_flat<1, U>(in, first, n)...);
  }
}

template <class F, class O, class... In>
DEVICE void flat(Scalars k, O* out, u64 n, const In*... in) {
  flat_block<F>(blockIdx.x, gridDim.x, k, out, n, in...);
}

// ---- lists of tensors ----------------------------------------------------------------------------------------------

// The calls of one launch; src/tensor/cuda/map_list.rs has the number as well.
constexpr u32 LIST_CALLS = 48;
// One address per call.
template <class T>
struct ListOf {
  u64 at[LIST_CALLS];
};
// Call k has `len[k]` elements and the blocks from `block[k]` on, up to the next call's.
struct ListCalls {
  u64 len[LIST_CALLS];
  u32 block[LIST_CALLS];
  u32 calls, blocks;
};

// Computes this block's part of its call.
template <class F, class O, class... In>
DEVICE void listed(Scalars k, const ListCalls& all, const ListOf<O>& out, const ListOf<In>&... in) {
  u32 low = 0, high = all.calls;
  while (high - low > 1) {
    u32 middle = (low + high) / 2;
    if (all.block[middle] <= blockIdx.x) low = middle;
    else high = middle;
  }
  u32 first = all.block[low], end = low + 1 < all.calls ? all.block[low + 1] : all.blocks;
  flat_block<F>(blockIdx.x - first, end - first, k, (O*)out.at[low], all.len[low],
                (const In*)in.at[low]...);
}

// ---- strided -------------------------------------------------------------------------------------------------------

// An operand, and its position among the layouts.
template <int WHO, class T>
struct At {
  const T* p;
};
// The offsets of index i in the first N layouts.
template <int N>
struct Places {
  u64 at[N];
};
template <int N>
DEVICE Places<N> places(const StridedWalk& walk, u32 i) {
  Places<N> places;
  UNROLL for (int k = 0; k < N; k++) places.at[k] = walk.start[k];
  u32 last = walk.dims - 1;
  ROLLED for (u32 d = 0; d < last; d++) {
    u32 q = divide(i, walk.by[d]), r = i - q * walk.by[d].n;
    UNROLL for (int k = 0; k < N; k++) places.at[k] += r * walk.stride[k][d];
    i = q;
  }
  UNROLL for (int k = 0; k < N; k++) places.at[k] += i * walk.stride[k][last];
  return places;
}

template <int N, int U>
struct Spots {
  Places<N> of[U];
};

template <int V, int WHO, class T, int N, int U>
DEVICE Packs<T, V, U> load_strided(const StridedWalk& walk, At<WHO, T> x, const Spots<N, U>& spots) {
  Packs<T, V, U> out;
  bool repeated = V > 1 && walk.stride[WHO][0] == 0;
  UNROLL for (int u = 0; u < U; u++) {
    const T* from = x.p + spots.of[u].at[WHO];
    if (repeated) {
      T one = *from;
      UNROLL for (int v = 0; v < V; v++) out.pack[u].at[v] = one;
    } else {
      out.pack[u] = *(const Pack<T, V>*)from;
    }
  }
  return out;
}

template <class F, class O, int V, int N, int U, class... In>
DEVICE void store_strided(Scalars k, u32 len, O* out, u32 first, const Spots<N, U>& spots,
                          const Packs<In, V, U>&... in) {
  UNROLL for (int u = 0; u < U; u++) {
    if (first + u * POINTWISE_THREADS < len)
      *(Pack<O, V>*)(out + spots.of[u].at[0]) = apply<F, O, V, In...>(k, in.pack[u]...);
  }
}

template <class F, int V, class O, int... WHO, class... In>
DEVICE void strided_by(Scalars k, const StridedWalk& walk, O* out, At<WHO, In>... in) {
  constexpr int U = PACKS, N = 1 + sizeof...(In);
  u32 first = blockIdx.x * (POINTWISE_THREADS * U) + threadIdx.x;
  Spots<N, U> spots;
  UNROLL for (int u = 0; u < U; u++) {
    u32 i = first + u * POINTWISE_THREADS;
    spots.of[u] = places<N>(walk, i < walk.len ? i : walk.len - 1);
  }
  store_strided<F, O, V, N, U, In...>(k, walk.len, out, first, spots, load_strided<V>(walk, in, spots)...);
}

template <class F, class O, int... WHO, class... In>
DEVICE void strided(Scalars k, const StridedWalk& walk, O* out, At<WHO, In>... in) {
  constexpr int V = PACK_LEN<O, In...>;
  if (V > 1 && walk.width == V) return strided_by<F, V>(k, walk, out, in...);
  strided_by<F, 1>(k, walk, out, in...);
}

// ---- entries -------------------------------------------------------------------------------------------------------

// The two entries of formula F: the name ends in T, the operands have types X, Y, Z and the result type O.
#define POINTWISE_1(name, F, T, O, X)                                                                                 \
  KERNEL(name##_##T, POINTWISE_THREADS, (const X* x, O* out, u64 n, Scalars k)) { flat<F>(k, out, n, x); }            \
  KERNEL(name##_strided_##T, POINTWISE_THREADS, (const X* x, O* out, StridedWalk walk, Scalars k)) {                         \
    strided<F>(k, walk, out, At<1, X>{x});                                                                            \
  }
#define POINTWISE_2(name, F, T, O, X, Y)                                                                              \
  KERNEL(name##_##T, POINTWISE_THREADS, (const X* x, const Y* y, O* out, u64 n, Scalars k)) {                         \
    flat<F>(k, out, n, x, y);                                                                                         \
  }                                                                                                                   \
  KERNEL(name##_strided_##T, POINTWISE_THREADS, (const X* x, const Y* y, O* out, StridedWalk walk, Scalars k)) {             \
    strided<F>(k, walk, out, At<1, X>{x}, At<2, Y>{y});                                                               \
  }
#define POINTWISE_3(name, F, T, O, X, Y, Z)                                                                           \
  KERNEL(name##_##T, POINTWISE_THREADS, (const X* x, const Y* y, const Z* z, O* out, u64 n, Scalars k)) {             \
    flat<F>(k, out, n, x, y, z);                                                                                      \
  }                                                                                                                   \
  KERNEL(name##_strided_##T, POINTWISE_THREADS,                                                                       \
         (const X* x, const Y* y, const Z* z, O* out, StridedWalk walk, Scalars k)) {                                        \
    strided<F>(k, walk, out, At<1, X>{x}, At<2, Y>{y}, At<3, Z>{z});                                                  \
  }

// The entry of formula F for a list of calls.
#define LIST_1(name, T)                                                                                               \
  KERNEL(name##_list_##T, POINTWISE_THREADS, (ListOf<T> x, ListOf<T> out, ListCalls all, Scalars k)) {                \
    listed<name##_formula>(k, all, out, x);                                                                           \
  }
#define LIST_2(name, T)                                                                                               \
  KERNEL(name##_list_##T, POINTWISE_THREADS, (ListOf<T> x, ListOf<T> y, ListOf<T> out, ListCalls all, Scalars k)) {   \
    listed<name##_formula>(k, all, out, x, y);                                                                        \
  }
#define LIST_3(name, T)                                                                                               \
  KERNEL(name##_list_##T, POINTWISE_THREADS,                                                                          \
         (ListOf<T> x, ListOf<T> y, ListOf<T> z, ListOf<T> out, ListCalls all, Scalars k)) {                          \
    listed<name##_formula>(k, all, out, x, y, z);                                                                     \
  }

// The words that formulas are written in, as in src/ops/pointwise/words.rs. A formula is a struct with a function
// `at` of the operator's attributes and operands.
struct Words {
#define WORD_1(name, word) \
  template <class A>       \
  static DEVICE A name(A x) { return word(x); }
#define WORD_2(name, word) \
  template <class A>       \
  static DEVICE A name(A x, A y) { return word(x, y); }
  WORD_1(exp, exp_)
  WORD_1(ln, ln_)
  WORD_1(tanh, tanh_)
  WORD_1(erf, erf_)
  WORD_1(bell, bell_)
  WORD_1(mills, mills_)
  WORD_1(sigmoid, sigmoid_)
  WORD_1(sqrt, sqrt_)
  WORD_1(abs, abs_)
  WORD_1(recip, recip_)
  WORD_1(floor, floor_)
  WORD_1(ceil, ceil_)
  WORD_1(trunc, trunc_)
  WORD_1(round, round_)
  WORD_2(copysign, copysign_)
  WORD_2(add, add_)
  WORD_2(sub, sub_)
  WORD_2(mul, mul_)
  WORD_2(max, max_)
  WORD_2(min, min_)
#define FLOAT_WORD(name, function)                                \
  static DEVICE f32 name(f32 x) { return function##_f32(x); } \
  static DEVICE f64 name(f64 x) { return function##_f64(x); }
  FLOAT_WORD(sin, sin)
  FLOAT_WORD(cos, cos)
  FLOAT_WORD(tan, tan)
  FLOAT_WORD(exp2, exp2)
  FLOAT_WORD(expm1, expm1)
  FLOAT_WORD(log1p, ln_1p)
  FLOAT_WORD(log2, log2)
  FLOAT_WORD(log10, log10)
  FLOAT_WORD(atanh, atanh)
#define WIDE_WORD(name) \
  static DEVICE f64 name(f64 x) { return name##_f64(x); }
  WIDE_WORD(asin)
  WIDE_WORD(acos)
  WIDE_WORD(atan)
  WIDE_WORD(sinh)
  WIDE_WORD(cosh)
  WIDE_WORD(asinh)
  WIDE_WORD(acosh)
  WIDE_WORD(erfc)
  WIDE_WORD(erfinv)
  WIDE_WORD(lgamma)
  WIDE_WORD(digamma)
  WIDE_WORD(trigamma)
  WIDE_WORD(cbrt)
  static DEVICE f64 log1p_unit(f64 x) { return ln_1p_f64(x); }
  static DEVICE f64 atan2(f64 y, f64 x) { return atan2_f64(y, x); }
  static DEVICE f64 pow_abs(f64 a, f64 y) { return pow_abs_f64(a, y); }
  WORD_2(fmod, fmod_)
  WORD_2(remainder, remainder_)
  WORD_2(floor_div, floor_div_)
  WORD_2(shift_left, shift_left_)
  WORD_2(shift_right, shift_right_)
  template <class A>
  static DEVICE A bit_and(A x, A y) { return (A)(x & y); }
  template <class A>
  static DEVICE A bit_or(A x, A y) { return (A)(x | y); }
  template <class A>
  static DEVICE A bit_xor(A x, A y) { return (A)(x ^ y); }
  template <class A>
  static DEVICE A bit_not(A x) { return (A)~x; }
  static DEVICE bool bit_not(bool x) { return !x; }
  template <class A>
  static DEVICE A fma(A a, A b, A c) { return fma_(a, b, c); }
  template <class A>
  static DEVICE A select(bool condition, A yes, A no) { return condition ? yes : no; }
  template <class A>
  static DEVICE f64 wide(A x) { return (f64)x; }
  static DEVICE f64 inf() { return inf_f64(); }
  static DEVICE f64 nan() { return nan_f64(); }
  static DEVICE f32 negative(f32 x) { return -x; }
  static DEVICE f64 negative(f64 x) { return -x; }
  template <class A>
  static DEVICE A negative(A x) { return sub_(A(0), x); }
};

// The words for formulas whose operands and results are narrower than f64.
template <class Base>
struct ShortWords : Base {
#define SHORT_WORD(name) \
  static DEVICE f64 name(f64 x) { return name##_short(x); }
  SHORT_WORD(exp)
  SHORT_WORD(asin)
  SHORT_WORD(acos)
  SHORT_WORD(atan)
  SHORT_WORD(erfc)
  SHORT_WORD(erfinv)
  static DEVICE f64 atan2(f64 y, f64 x) { return atan2_short(y, x); }
  static DEVICE f64 pow_abs(f64 a, f64 y) { return pow_abs_short(a, y); }
  static DEVICE f64 log1p_unit(f64 x) { return ln_1p_unit_short(x); }
};

// One formula for several dtypes; operands and result have the same dtype.
#define ALIKE_1(name, T) POINTWISE_1(name, name##_formula, T, T, T)
#define ALIKE_2(name, T) POINTWISE_2(name, name##_formula, T, T, T, T)
#define ALIKE_3(name, T) POINTWISE_3(name, name##_formula, T, T, T, T, T)
#define EACH_FLOAT(X, name) X(name, f32) X(name, f64) X(name, f16) X(name, bf16)
#define EACH_INTEGER(X, name) X(name, i64) X(name, i32) X(name, u8)
#define EACH_BITS(X, name) EACH_INTEGER(X, name) X(name, bool)
#define EACH_NUMBER(X, name) EACH_FLOAT(X, name) EACH_INTEGER(X, name)
#define EACH_TYPE(X, name) EACH_NUMBER(X, name) X(name, bool)
