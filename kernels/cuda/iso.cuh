// Definitions that every kernel uses: fixed-width types, the storage types f16 and bf16, and the entry macro.
//
// Kernels include only headers of this crate, so NVRTC needs no include path. Arithmetic is IEEE: no contraction
// (fmaf and fma are written explicitly), no fast math, no atomics on floating-point numbers.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
typedef float f32;
typedef double f64;

// KERNEL(name, threads, (parameters)) { body }: an entry with at most `threads` threads per block. Parameters are
// pointers, scalars and plain structs of them.
#ifndef ISO_SHIM
#define KERNEL(name, threads, parameters) extern "C" __global__ void __launch_bounds__(threads) name parameters
#define DEVICE __device__ __forceinline__
#define CONSTANT __device__ const
#define SHARED __shared__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define UNROLL _Pragma("unroll")
#endif

// One entry per dtype: X(f32) X(f64) ...; the entry of f32 ends in _f32. Sources with much code are compiled for one dtype
// at a time: kernels/src/cuda/mod.rs defines these lists before them, and leaves most of them empty.
#ifndef FLOATS
#define FLOATS(X) X(f32) X(f64) X(f16) X(bf16)
#define UP_TO_F32(X) X(f32) X(f16) X(bf16)
#define HALVES(X) X(f16) X(bf16)
#define INTEGERS(X) X(i64) X(i32) X(u8)
#define SMALL_TYPES(X) X(i32) X(u8) X(bool)
#endif
#define NUMBERS(X) FLOATS(X) INTEGERS(X)
#define ALL_TYPES(X) NUMBERS(X) X(bool)

// The order of a sum, as in kernels/src/summation.rs: the largest leaf, and the number of `len` summed indices that go
// to the left part. Sums over keys split at powers of two instead, by leaf_of_keys in attention.cuh.
enum { LEAF = 32 };
DEVICE u32 left_of(u32 len) { return len - len / 2; }

DEVICE u32 bits_of(f32 x) { return __float_as_uint(x); }
DEVICE u64 bits_of(f64 x) { return (u64)__double_as_longlong(x); }
DEVICE f32 f32_of(u32 bits) { return __uint_as_float(bits); }
DEVICE f64 f64_of(u64 bits) { return __longlong_as_double((i64)bits); }

// f16 and bf16 are storage types: loops widen to f32, compute, and round once.
struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};

template <class T>
struct WideOf {
  typedef T type;
};
template <>
struct WideOf<f16> {
  typedef f32 type;
};
template <>
struct WideOf<bf16> {
  typedef f32 type;
};
// The type that a loop over T computes in.
template <class T>
using Wide = typename WideOf<T>::type;

template <class T>
DEVICE T widen(T x) {
  return x;
}
DEVICE f32 widen(bf16 x) { return f32_of((u32)x.bits << 16); }
DEVICE f32 widen(f16 x) {
  u32 sign = ((u32)x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  f32 finite = f32_of(magnitude << 13) * f32_of((127 + 112) << 23);
  u32 special = 0x7f800000 | (magnitude << 13) | (magnitude > 0x7c00 ? 0x00400000 : 0);
  return f32_of(sign | (magnitude >= 0x7c00 ? special : bits_of(finite)));
}

template <class T>
struct Narrow {
  static DEVICE T of(T x) { return x; }
};
// From Ampere on one instruction rounds, but forgets the sign and the payload of a NaN, which the CPU keeps.
#if !defined(ISO_SHIM) && __CUDA_ARCH__ >= 800
#define ROUNDS_IN_ONE 1
#else
#define ROUNDS_IN_ONE 0
#endif
template <>
struct Narrow<bf16> {
  static DEVICE bf16 of(f32 x) {
    u32 bits = bits_of(x), rounded;
#if ROUNDS_IN_ONE
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(rounded) : "f"(0.0f), "f"(x));
#else
    rounded = (bits + (0x7fff + ((bits >> 16) & 1))) >> 16;
#endif
    return bf16{(u16)(x == x ? rounded : (bits >> 16) | 0x40)};
  }
};
template <>
struct Narrow<f16> {
  static DEVICE f16 of(f32 x) {
    u32 bits = bits_of(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff, rounded;
#if ROUNDS_IN_ONE
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(rounded) : "f"(0.0f), "f"(x));
#else
    u32 normal = (magnitude - (112u << 23) + (0xfff + ((magnitude >> 13) & 1))) >> 13;
    u32 subnormal = bits_of(f32_of(magnitude) + 0.5f) - bits_of(0.5f);
    u32 finite = magnitude < (113u << 23) ? subnormal : normal;
    rounded = sign | (magnitude >= (143u << 23) ? 0x7c00 : finite);
#endif
    return f16{(u16)(x == x ? rounded : sign | 0x7e00 | ((magnitude >> 13) & 0x3ff))};
  }
};
// Rounds to the nearest T, ties to even.
template <class T>
DEVICE T narrow(Wide<T> x) {
  return Narrow<T>::of(x);
}

// This thread's index in a one-dimensional grid, and the grid's size.
DEVICE u64 thread_index() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE u64 threads_len() { return (u64)gridDim.x * blockDim.x; }

// The fault that a kernel reports, as it cannot return an error: the first one stays until the host reads it. `code`
// is a row of the table in src/tensor/cuda_device/fault.rs; `value` is the value that was found, or the position of `found`.
struct Fault {
  u32 code;
  f32 found;
  i64 value;
};
DEVICE void report(Fault* fault, u32 code, i64 value) {
  if (atomicCAS(&fault->code, 0u, code) == 0u) {
    fault->value = value;
  }
}
