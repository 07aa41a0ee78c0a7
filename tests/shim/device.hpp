// The device functions that need no other thread: atomics, bits, numbers, memory.
#pragma once

// ---- Atomics on integers: device memory is shared with other streams, hence with other OS threads. -------------------

#define ISO_SHIM_ATOMIC(name, builtin)                                   \
  template <class T>                                                     \
  DEVICE T name(T* at, typename iso_shim::Same<T>::type value) {         \
    static_assert((T)0.5 == 0, "atomics are for integers: sums of floating numbers have an order"); \
    return builtin(at, value, __ATOMIC_RELAXED);                         \
  }
ISO_SHIM_ATOMIC(atomicAdd, __atomic_fetch_add)
ISO_SHIM_ATOMIC(atomicSub, __atomic_fetch_sub)
ISO_SHIM_ATOMIC(atomicAnd, __atomic_fetch_and)
ISO_SHIM_ATOMIC(atomicOr, __atomic_fetch_or)
ISO_SHIM_ATOMIC(atomicXor, __atomic_fetch_xor)
ISO_SHIM_ATOMIC(atomicExch, __atomic_exchange_n)
#undef ISO_SHIM_ATOMIC

template <class T>
DEVICE T atomicCAS(T* at, typename iso_shim::Same<T>::type expected, typename iso_shim::Same<T>::type value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <class T>
DEVICE T atomicMax(T* at, typename iso_shim::Same<T>::type value) {
  T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
template <class T>
DEVICE T atomicMin(T* at, typename iso_shim::Same<T>::type value) {
  T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (value < old && !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

// ---- Bits. -----------------------------------------------------------------------------------------------------------

namespace iso_shim {
template <class To, class From>
DEVICE To cast_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}
}  // namespace iso_shim

DEVICE unsigned __float_as_uint(float x) { return iso_shim::cast_bits<unsigned>(x); }
DEVICE int __float_as_int(float x) { return iso_shim::cast_bits<int>(x); }
DEVICE float __uint_as_float(unsigned x) { return iso_shim::cast_bits<float>(x); }
DEVICE float __int_as_float(int x) { return iso_shim::cast_bits<float>(x); }
DEVICE long long __double_as_longlong(double x) { return iso_shim::cast_bits<long long>(x); }
DEVICE double __longlong_as_double(long long x) { return iso_shim::cast_bits<double>(x); }
DEVICE int __double2hiint(double x) { return (int)(__double_as_longlong(x) >> 32); }
DEVICE int __double2loint(double x) { return (int)__double_as_longlong(x); }
DEVICE double __hiloint2double(int hi, int lo) {
  return __longlong_as_double((long long)((unsigned long long)(unsigned)hi << 32 | (unsigned)lo));
}

DEVICE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
DEVICE int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
DEVICE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
DEVICE long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
DEVICE int __popc(unsigned x) { return __builtin_popcount(x); }
DEVICE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
DEVICE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
DEVICE int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
DEVICE int __ffs(int x) { return __builtin_ffs(x); }
DEVICE int __ffsll(long long x) { return __builtin_ffsll(x); }
DEVICE unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
  return y;
}
DEVICE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned s = selector >> (4 * i) & 15, byte = (unsigned)(bytes >> (8 * (s & 7))) & 255;
    out |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return out;
}
DEVICE unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned by) {
  return (unsigned)(((unsigned long long)hi << 32 | lo) << (by & 31) >> 32);
}
DEVICE unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned by) {
  return (unsigned)(((unsigned long long)hi << 32 | lo) >> (by & 31));
}

// ---- Numbers: only what is exact or correctly rounded. ---------------------------------------------------------------

extern "C" {
float fmaf(float, float, float);
double fma(double, double, double);
float sqrtf(float);
double sqrt(double);
float fabsf(float);
double fabs(double);
float floorf(float);
double floor(double);
float ceilf(float);
double ceil(double);
float truncf(float);
double trunc(double);
float rintf(float);
double rint(double);
float fmodf(float, float);
double fmod(double, double);
float fminf(float, float);
double fmin(double, double);
float fmaxf(float, float);
double fmax(double, double);
float copysignf(float, float);
double copysign(double, double);
int abs(int);
long long llabs(long long);
int printf(const char*, ...);
}

DEVICE float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
DEVICE float sqrt(float x) { return __builtin_sqrtf(x); }
DEVICE float fabs(float x) { return __builtin_fabsf(x); }
DEVICE float floor(float x) { return __builtin_floorf(x); }
DEVICE float ceil(float x) { return __builtin_ceilf(x); }
DEVICE float trunc(float x) { return __builtin_truncf(x); }
DEVICE float rint(float x) { return __builtin_rintf(x); }
DEVICE float copysign(float x, float y) { return __builtin_copysignf(x, y); }
DEVICE float abs(float x) { return __builtin_fabsf(x); }
DEVICE double abs(double x) { return __builtin_fabs(x); }
DEVICE long long abs(long long x) { return x < 0 ? -x : x; }
DEVICE bool isnan(float x) { return x != x; }
DEVICE bool isnan(double x) { return x != x; }
DEVICE bool isinf(float x) { return __builtin_isinf(x); }
DEVICE bool isinf(double x) { return __builtin_isinf(x); }
DEVICE bool isfinite(float x) { return __builtin_isfinite(x); }
DEVICE bool isfinite(double x) { return __builtin_isfinite(x); }
DEVICE bool signbit(float x) { return __builtin_signbitf(x); }
DEVICE bool signbit(double x) { return __builtin_signbit(x); }

DEVICE float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
DEVICE double __fma_rn(double x, double y, double z) { return __builtin_fma(x, y, z); }
DEVICE float __fadd_rn(float x, float y) { return x + y; }
DEVICE float __fsub_rn(float x, float y) { return x - y; }
DEVICE float __fmul_rn(float x, float y) { return x * y; }
DEVICE float __fdiv_rn(float x, float y) { return x / y; }
DEVICE float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
DEVICE double __dadd_rn(double x, double y) { return x + y; }
DEVICE double __dsub_rn(double x, double y) { return x - y; }
DEVICE double __dmul_rn(double x, double y) { return x * y; }
DEVICE double __ddiv_rn(double x, double y) { return x / y; }
DEVICE double __dsqrt_rn(double x) { return __builtin_sqrt(x); }

#define ISO_SHIM_BOUNDS(T)                              \
  DEVICE T min(T a, T b) { return b < a ? b : a; }      \
  DEVICE T max(T a, T b) { return a < b ? b : a; }
ISO_SHIM_BOUNDS(int)
ISO_SHIM_BOUNDS(unsigned)
ISO_SHIM_BOUNDS(long)
ISO_SHIM_BOUNDS(unsigned long)
ISO_SHIM_BOUNDS(long long)
ISO_SHIM_BOUNDS(unsigned long long)
#undef ISO_SHIM_BOUNDS
DEVICE float min(float a, float b) { return __builtin_fminf(a, b); }
DEVICE float max(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE double min(double a, double b) { return __builtin_fmin(a, b); }
DEVICE double max(double a, double b) { return __builtin_fmax(a, b); }

// ---- Memory. ---------------------------------------------------------------------------------------------------------

#define ISO_SHIM_LOAD(name)        \
  template <class T>               \
  DEVICE T name(const T* at) {     \
    return *at;                    \
  }
ISO_SHIM_LOAD(__ldg)
ISO_SHIM_LOAD(__ldcg)
ISO_SHIM_LOAD(__ldca)
ISO_SHIM_LOAD(__ldcs)
ISO_SHIM_LOAD(__ldlu)
#undef ISO_SHIM_LOAD
#define ISO_SHIM_STORE(name)                                             \
  template <class T>                                                     \
  DEVICE void name(T* at, typename iso_shim::Same<T>::type value) {      \
    *at = value;                                                         \
  }
ISO_SHIM_STORE(__stwb)
ISO_SHIM_STORE(__stcg)
ISO_SHIM_STORE(__stcs)
#undef ISO_SHIM_STORE
DEVICE void __trap() { __builtin_trap(); }
