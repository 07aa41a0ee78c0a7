// Matrix units and their operands: products of 16x16 by 16x8, 8x8 matrices from shared memory, asynchronous copies.
// For fast kernels only.
//
// Lane l of a warp has g = l / 4 and t = l % 4. It has rows g and g + 8 and columns 2t and 2t + 1 of a product; the
// same rows and columns 2t, 2t + 1, 2t + 8, 2t + 9 of the left operand; and column g and these indices as rows of the
// right one.
//
// The shim has the same in C++. It adds a product's terms in ascending order; the order of matrix units is not known.
#pragma once
#include "iso.cuh"

#ifdef ISO_SHIM
// Exchanges between the lanes of a warp.
static thread_local u64 iso_mma_lanes[32][32][6];

DEVICE void mma_show(const u64* values, int count) {
  for (int i = 0; i < count; i++) iso_mma_lanes[threadIdx.x / 32][threadIdx.x % 32][i] = values[i];
  __syncwarp();
}
template <class T>
DEVICE f32 mma_half(u64 pair, int high) {
  return widen(T{(u16)(high ? pair >> 16 : pair)});
}
#endif

template <class T>
struct MatrixUnit;

#ifndef ISO_SHIM
#define ISO_MMA(T, name)                                                                                          \
  template <>                                                                                                     \
  struct MatrixUnit<T> {                                                                                          \
    static DEVICE void mma(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {                                      \
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                        \
                   ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                   \
                   : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                               \
    }                                                                                                             \
    /* Two numbers rounded, the first in the low half. */                                                         \
    static DEVICE u32 pack(f32 low, f32 high) {                                                                   \
      u32 pair;                                                                                                   \
      asm("cvt.rn." name "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));                                \
      return pair;                                                                                                \
    }                                                                                                             \
  };
ISO_MMA(f16, "f16")
ISO_MMA(bf16, "bf16")
#else
template <class T>
struct MatrixUnit {
  static DEVICE void mma(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u64 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    mma_show(mine, 6);
    auto& lanes = iso_mma_lanes[threadIdx.x / 32];
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
      for (int k = 0; k < 16; k++) {
        u64 x = lanes[4 * g + k % 8 / 2][i / 2 + k / 8 * 2], y = lanes[4 * (2 * t + i % 2) + k % 8 / 2][4 + k / 8];
        c[i] += mma_half<T>(x, k % 2) * mma_half<T>(y, k % 2);
      }
    }
    __syncwarp();
  }
  static DEVICE u32 pack(f32 low, f32 high) { return narrow<T>(low).bits | (u32)narrow<T>(high).bits << 16; }
};
#endif

// Loads four 8x8 matrices; lanes 0 to 7, 8 to 15, ... point at their rows of 16 bytes.
DEVICE void load_matrices(u32 (&x)[4], const void* row) {
#ifndef ISO_SHIM
  u32 at = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
#else
  u64 mine = (u64)row;
  mma_show(&mine, 1);
  auto& lanes = iso_mma_lanes[threadIdx.x / 32];
  u32 lane = threadIdx.x % 32;
  for (u32 i = 0; i < 4; i++) x[i] = ((const u32*)lanes[8 * i + lane / 4][0])[lane % 4];
  __syncwarp();
#endif
}

// As above, each matrix transposed.
DEVICE void load_transposed(u32 (&x)[4], const void* row) {
#ifndef ISO_SHIM
  u32 at = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
#else
  u64 mine = (u64)row;
  mma_show(&mine, 1);
  auto& lanes = iso_mma_lanes[threadIdx.x / 32];
  u32 lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
  for (u32 i = 0; i < 4; i++) {
    u32 low = ((const u16*)lanes[8 * i + 2 * t][0])[g], high = ((const u16*)lanes[8 * i + 2 * t + 1][0])[g];
    x[i] = low | high << 16;
  }
  __syncwarp();
#endif
}

struct alignas(16) Bytes16 {
  u32 x[4];
};

// Copies 16 bytes to shared memory, or zeros if they are not `there`, asynchronously.
DEVICE void copy_async(void* to, const void* from, bool there) {
#ifndef ISO_SHIM
  u32 at = (u32)__cvta_generic_to_shared(to), bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(at), "l"(from), "r"(bytes) : "memory");
#else
  *(Bytes16*)to = there ? *(const Bytes16*)from : Bytes16{};
#endif
}
// Ends a group of copies.
DEVICE void copies_end() {
#ifndef ISO_SHIM
  asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}
// Waits for all groups of this thread except the last LEFT.
template <int LEFT>
DEVICE void copies_wait() {
#ifndef ISO_SHIM
  asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory");
#endif
}

// 2^x, to about 22 bits.
DEVICE f32 exp2_fast(f32 x) {
#ifndef ISO_SHIM
  f32 y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return __builtin_exp2f(x);
#endif
}
