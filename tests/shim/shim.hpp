// CUDA for the CPU: the names that a kernel source uses, implemented on fibers. For tests only; not a backend.
//
// This header is included before a program, which is compiled with -DISO_SHIM. It includes no system header (unless
// there is no hand-written switch of stacks), so that names are as free as on a device.
#pragma once

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif
#include "grid.hpp"

typedef __SIZE_TYPE__ size_t;

// ---- Entries. --------------------------------------------------------------------------------------------------------

namespace iso_shim {

template <__SIZE_TYPE__... I>
struct Numbers {};
template <__SIZE_TYPE__ N, __SIZE_TYPE__... I>
struct NumbersBelow : NumbersBelow<N - 1, N - 1, I...> {};
template <__SIZE_TYPE__... I>
struct NumbersBelow<0, I...> {
  typedef Numbers<I...> type;
};

// A kernel's parameters: their number and sizes, and a call that reads them as a launch does.
template <auto BODY>
struct EntryOf;
template <class... P, void (*BODY)(P...)>
struct EntryOf<BODY> {
  static constexpr unsigned LEN = sizeof...(P);
  static constexpr unsigned BYTES[LEN + 1] = {(unsigned)sizeof(P)..., 0};
  template <class I>
  struct Caller;
  template <__SIZE_TYPE__... I>
  struct Caller<Numbers<I...>> {
    static void call([[maybe_unused]] void** arguments) { BODY(*(P*)arguments[I]...); }
  };
  static constexpr void (*call)(void**) = Caller<typename NumbersBelow<LEN>::type>::call;
};

}  // namespace iso_shim

#define KERNEL(name, threads, parameters) ISO_SHIM_KERNEL(name, threads, parameters)
// The body has a name of its own, because a device function may have the entry's.
#define ISO_SHIM_KERNEL(name, threads, parameters)                                                                  \
  static void iso_shim_body_##name parameters;                                                                      \
  extern "C" __attribute__((visibility("default"))) const iso_shim::Entry iso_shim_entry_##name = {                 \
      #name, iso_shim::EntryOf<iso_shim_body_##name>::call, iso_shim::EntryOf<iso_shim_body_##name>::LEN,           \
      iso_shim::EntryOf<iso_shim_body_##name>::BYTES, threads};                                                     \
  static void iso_shim_body_##name parameters

#define DEVICE inline __attribute__((always_inline))
#define CONSTANT static const
#define SHARED static thread_local
#define DYNAMIC_SHARED(name) unsigned char* const name = iso_shim::here()->block->launch->dynamic
#define UNROLL
#define __device__
#define __host__
#define __global__
#define __constant__
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define alignas(bytes) __attribute__((aligned(bytes)))

// ---- Places. ---------------------------------------------------------------------------------------------------------

#define threadIdx (iso_shim::here()->thread)
#define blockIdx (iso_shim::here()->block->index)
#define blockDim (iso_shim::here()->block->threads)
#define gridDim (iso_shim::here()->block->grid)
#define warpSize 32

// ---- Barriers and warp functions. ------------------------------------------------------------------------------------

namespace iso_shim {

template <class T>
struct Same {
  typedef T type;
};

template <class T>
word bits_of_lane(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "warps exchange values of 4 and of 8 bytes");
  word bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T shuffle_lanes(Place place, Kind kind, lane_mask mask, T value, int by, int width = 32) {
  int lane = (int)(here()->linear % WARP), first = lane & ~(width - 1), source = lane;
  if (kind == SHFL) source = first + (by & (width - 1));
  if (kind == SHFL_UP && lane - by >= first) source = lane - by;
  if (kind == SHFL_DOWN && lane + by < first + width) source = lane + by;
  if (kind == SHFL_XOR && (lane ^ by) < first + width) source = lane ^ by;
  word bits = warp_function(kind, mask, bits_of_lane(value), (unsigned)source, place);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

static inline unsigned vote(Place place, Kind kind, lane_mask mask, int predicate) {
  return (unsigned)warp_function(kind, mask, predicate != 0, 0, place);
}

static inline void sync_warp(Place place, lane_mask mask = ~0u) { warp_function(SYNC_WARP, mask, 0, 0, place); }

static inline lane_mask active_mask() {
  Block& b = *here()->block;
  unsigned warp = here()->linear / WARP;
  lane_mask active = 0;
  for (unsigned l = 0; l < lanes_of(b, warp); ++l) active |= (lane_mask)(b.state[warp * WARP + l] != ENDED) << l;
  return active;
}

}  // namespace iso_shim

#define ISO_SHIM_HERE (iso_shim::Place{__FILE__, __LINE__})
#define __syncthreads() ((void)iso_shim::barrier(iso_shim::SYNC_THREADS, 0, ISO_SHIM_HERE))
#define __syncthreads_count(p) ((int)iso_shim::barrier(iso_shim::SYNC_THREADS_COUNT, (p), ISO_SHIM_HERE))
#define __syncthreads_and(p) \
  ((int)(iso_shim::barrier(iso_shim::SYNC_THREADS_AND, (p), ISO_SHIM_HERE) == iso_shim::here()->block->n))
#define __syncthreads_or(p) ((int)(iso_shim::barrier(iso_shim::SYNC_THREADS_OR, (p), ISO_SHIM_HERE) != 0))
#define __syncwarp(...) iso_shim::sync_warp(ISO_SHIM_HERE __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...) iso_shim::shuffle_lanes(ISO_SHIM_HERE, iso_shim::SHFL, __VA_ARGS__)
#define __shfl_up_sync(...) iso_shim::shuffle_lanes(ISO_SHIM_HERE, iso_shim::SHFL_UP, __VA_ARGS__)
#define __shfl_down_sync(...) iso_shim::shuffle_lanes(ISO_SHIM_HERE, iso_shim::SHFL_DOWN, __VA_ARGS__)
#define __shfl_xor_sync(...) iso_shim::shuffle_lanes(ISO_SHIM_HERE, iso_shim::SHFL_XOR, __VA_ARGS__)
#define __ballot_sync(mask, p) iso_shim::vote(ISO_SHIM_HERE, iso_shim::BALLOT, (mask), (p))
#define __any_sync(mask, p) ((int)iso_shim::vote(ISO_SHIM_HERE, iso_shim::ANY, (mask), (p)))
#define __all_sync(mask, p) ((int)iso_shim::vote(ISO_SHIM_HERE, iso_shim::ALL, (mask), (p)))
#define __activemask() iso_shim::active_mask()

DEVICE void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
DEVICE void __threadfence_block() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

#include "device.hpp"
