// Fibers: one stack per CUDA thread, and the switch between them.
//
// Stacks are slots of one size, aligned to it, so code on a stack finds its fiber's record from the address of its
// frame. The record is at the high end, where the stack begins, at a different distance in each slot: otherwise the
// most used bytes would share a few sets of every cache. The caller of a launch owns the slots.
#pragma once

namespace iso_shim {

typedef __UINTPTR_TYPE__ uptr;
typedef __UINT64_TYPE__ word;
typedef unsigned int lane_mask;

constexpr uptr STACK_BYTES = 65536;
// Slots below the first one in use, for stack overflows.
constexpr unsigned SPARE_STACKS = 4;
constexpr unsigned CANARY_LEN = 8;
constexpr uptr STAGGER_LEN = 64, STAGGER_BYTES = 320;
constexpr word CANARY = 0x5ca1ab1edeadbea7;

struct Dim {
  unsigned x, y, z;
};

enum Kind : unsigned {
  SYNC_THREADS,
  SYNC_THREADS_COUNT,
  SYNC_THREADS_AND,
  SYNC_THREADS_OR,
  SYNC_WARP,
  SHFL,
  SHFL_UP,
  SHFL_DOWN,
  SHFL_XOR,
  BALLOT,
  ANY,
  ALL,
  KINDS,
};

constexpr const char* KIND_NAMES[KINDS] = {
    "__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or", "__syncwarp",      "__shfl_sync",
    "__shfl_up_sync", "__shfl_down_sync",   "__shfl_xor_sync",   "__ballot_sync",    "__any_sync",      "__all_sync",
};

// A line of a kernel.
struct Place {
  const char* file;
  unsigned line;
};

struct Block;

// The saved stack pointer of a stack that does not run.
struct Context {
  void* at;
#if !defined(__x86_64__) && !defined(__aarch64__)
  ucontext_t saved;
#endif
};

// A CUDA thread that has begun and not ended, or a stack for one.
struct Fiber {
  Block* block;
  Dim thread;
  unsigned linear;
  Context context;
  Fiber* next_free;
  // The barrier at which the thread waits, its argument, and its result.
  Kind kind;
  Place place;
  lane_mask mask;
  unsigned source;
  word value, result;
};

constexpr uptr RECORD_BYTES = (sizeof(Fiber) + 63) / 64 * 64;

// The record in the slot that contains an address.
static inline __attribute__((always_inline)) Fiber* fiber_at(uptr address) {
  uptr end = (address | (STACK_BYTES - 1)) + 1, stagger = address / STACK_BYTES % STAGGER_LEN * STAGGER_BYTES;
  return (Fiber*)(end - stagger - RECORD_BYTES);
}

// The fiber whose stack this code runs on.
static inline __attribute__((always_inline)) Fiber* here() { return fiber_at((uptr)__builtin_frame_address(0)); }

// The canary at the stack's end: a stack overflow overwrites it.
static inline word* canary_of(Fiber* fiber) { return (word*)((uptr)fiber & ~(STACK_BYTES - 1)); }

#if defined(__x86_64__)
extern "C" __attribute__((visibility("hidden"))) void iso_shim_switch(void** from, void* to);
asm(R"(
.pushsection .text
.p2align 4
.type iso_shim_switch, @function
iso_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size iso_shim_switch, .-iso_shim_switch
.popsection
)");
static void switch_to(Context& from, Context& to) { iso_shim_switch(&from.at, to.at); }
static void prepare(Fiber* fiber, void (*run)()) {
  word* top = (word*)((uptr)fiber & ~(uptr)15) - 16;
  for (int i = 0; i < 16; ++i) top[i] = 0;
  top[6] = (word)run;
  fiber->context.at = top;
}
#elif defined(__aarch64__)
extern "C" __attribute__((visibility("hidden"))) void iso_shim_switch(void** from, void* to);
asm(R"(
.pushsection .text
.p2align 4
.type iso_shim_switch, %function
iso_shim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size iso_shim_switch, .-iso_shim_switch
.popsection
)");
static void switch_to(Context& from, Context& to) { iso_shim_switch(&from.at, to.at); }
static void prepare(Fiber* fiber, void (*run)()) {
  word* top = (word*)((uptr)fiber & ~(uptr)15) - 32;
  for (int i = 0; i < 32; ++i) top[i] = 0;
  top[11] = (word)run;
  fiber->context.at = top;
}
#else
static void switch_to(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }
static void prepare(Fiber* fiber, void (*run)()) {
  getcontext(&fiber->context.saved);
  char* low = (char*)canary_of(fiber);
  fiber->context.saved.uc_stack.ss_sp = low;
  fiber->context.saved.uc_stack.ss_size = (__SIZE_TYPE__)((char*)fiber - low);
  fiber->context.saved.uc_link = nullptr;
  makecontext(&fiber->context.saved, run, 0);
}
#endif

}  // namespace iso_shim
