// A launch: every block, in the launch's order, each with shared memory full of poison.
#pragma once

#include "block.hpp"

#if defined(__linux__)
struct iso_shim_segment {
  unsigned type, flags;
  __UINT64_TYPE__ offset, address, physical, file_bytes, memory_bytes, align;
};
struct iso_shim_object {
  __UINTPTR_TYPE__ address;
  const char* name;
  const iso_shim_segment* segments;
  unsigned short segments_len;
  unsigned long long adds, subs;
  __SIZE_TYPE__ module;
  void* thread_local_memory;
};
extern "C" int dl_iterate_phdr(int (*)(iso_shim_object*, __SIZE_TYPE__, void*), void*);
#endif

namespace iso_shim {

// Static shared memory: all thread-local memory of this program on the calling OS thread.
struct Shared {
  unsigned char* at;
  word bytes;
};

static thread_local volatile unsigned char marker;

#if defined(__linux__) && __SIZEOF_POINTER__ == 8
static int find_shared(iso_shim_object* object, __SIZE_TYPE__, void* found) {
  bool ours = false;
  word bytes = 0;
  for (unsigned i = 0; i < object->segments_len; ++i) {
    const iso_shim_segment& s = object->segments[i];
    uptr start = object->address + s.address;
    if (s.type == 1 && (uptr)&find_shared - start < s.memory_bytes) ours = true;
    if (s.type == 7) bytes = s.memory_bytes;
  }
  if (ours) *(Shared*)found = Shared{(unsigned char*)object->thread_local_memory, bytes};
  return ours;
}
static Shared shared_memory() {
  // The marker's distance from the start, and the size, equal on all OS threads; 0 if not known yet.
  static word distance, size;
  marker = POISON;
  unsigned char* at = (unsigned char*)&marker;
  word bytes = __atomic_load_n(&size, __ATOMIC_ACQUIRE);
  if (!bytes) {
    Shared found{at, 1};
    dl_iterate_phdr(find_shared, &found);
    __atomic_store_n(&distance, (word)(at - found.at), __ATOMIC_RELAXED);
    __atomic_store_n(&size, bytes = found.bytes, __ATOMIC_RELEASE);
  }
  return Shared{at - __atomic_load_n(&distance, __ATOMIC_RELAXED), bytes};
}
#else
static Shared shared_memory() { return Shared{(unsigned char*)&marker, 1}; }
#endif

// Narrows `all` to the bytes that differ from poison. A program holds the shared memory of all its entries, and one
// entry uses little of it.
static Shared touched(Shared all) {
  while (all.bytes && all.at[all.bytes - 1] == POISON) --all.bytes;
  while (all.bytes && *all.at == POISON) ++all.at, --all.bytes;
  return all;
}

static bool alike(const Block& b, unsigned i, unsigned j) {
  if (b.state[i] != b.state[j]) return false;
  if (b.state[i] == ENDED) return true;
  const Fiber &f = *b.fibers[i], &g = *b.fibers[j];
  return f.kind == g.kind && f.mask == g.mask && same_place(f.place, g.place);
}

// No thread can run and not all have ended: reports where each waits.
static void explain(Block& b) {
  Text text = failure(b) << "threads wait for each other for ever: ";
  unsigned runs = 0;
  for (unsigned i = 0, end; i < b.n; i = end) {
    for (end = i + 1; end < b.n && alike(b, i, end);) ++end;
    if (++runs > 8) {
      text << "; ...";
      break;
    }
    text << (runs > 1 ? "; " : "") << (end - i > 1 ? "threads " : "thread ") << i;
    if (end - i > 1) text << " to " << (end - 1);
    if (b.state[i] == ENDED) {
      text << " ended";
      continue;
    }
    const Fiber& f = *b.fibers[i];
    text << " at " << KIND_NAMES[f.kind] << " (" << f.place << ")";
    if (b.state[i] == IN_WARP) (text << " of mask ").hex(f.mask);
  }
}

static void begin(Block& b, word number) {
  const Dim& g = b.grid;
  b.index = Dim{(unsigned)(number % g.x), (unsigned)(number / g.x % g.y), (unsigned)(number / g.x / g.y)};
  b.begun = b.ended = b.waiting = b.ready_len = 0;
  b.random = b.launch->seed ^ number * 0xd1342543de82ef95;
  b.depth_first = b.launch->order != SHUFFLED || random_below(b, 2);
  __builtin_memset(b.state, FRESH, b.n);
  __builtin_memset(b.in_warp, 0, sizeof b.in_warp);
  if (b.launch->order == SHUFFLED) draw_order(b);
}

static word common_divisor(word a, word b) { return b ? common_divisor(b, a % b) : a; }

// Returns true if nothing was written behind the dynamic shared memory; `far` checks the whole guard.
static bool guard_is_whole(Block& b, bool far) {
  const unsigned char* guard = b.launch->dynamic + b.launch->shared_bytes;
  unsigned char changed = 0;
  for (unsigned k = 0; k < (far ? GUARD_BYTES : NEAR_BYTES); ++k) changed |= guard[k] ^ GUARD;
  if (!changed) return true;
  while (*guard == GUARD) ++guard;
  failure(b) << "something is written " << (word)(guard - b.launch->dynamic - b.launch->shared_bytes)
             << " bytes behind the launch's " << b.launch->shared_bytes << " bytes of dynamic shared memory";
  return false;
}

// Runs a launch. Returns true if it succeeded; else the launch's error has a description.
static bool run(const Entry& entry, Launch& launch) {
  Block b;
  b.launch = &launch;
  b.entry = &entry;
  b.threads = launch.threads;
  b.grid = launch.blocks;
  b.n = launch.threads.x * launch.threads.y * launch.threads.z;
  b.failed = false;
  b.free = nullptr;
  b.stacks_len = 0;
  b.random = launch.seed;
  __builtin_memset(b.fibers, 0, sizeof b.fibers);
  for (unsigned i = 1; i <= SPARE_STACKS; ++i) fiber_at((uptr)launch.stacks - i * STACK_BYTES)->block = &b;
  word blocks = (word)launch.blocks.x * launch.blocks.y * launch.blocks.z;
  word step = launch.order == SHUFFLED ? 1 + random_below(b, (unsigned)blocks) : 1;
  while (common_divisor(step, blocks) != 1) ++step;
  word shift = launch.order == SHUFFLED ? random_below(b, (unsigned)blocks) : 0;
  Shared all = shared_memory(), poisoned = all;
  __builtin_memset(launch.dynamic + launch.shared_bytes, GUARD, GUARD_BYTES);
  for (word i = 0; i < blocks; ++i) {
    word number = launch.order == DESCENDING ? blocks - 1 - i : (i * step + shift) % blocks;
    begin(b, number);
    __builtin_memset(poisoned.at, POISON, poisoned.bytes);
    if (launch.shared_bytes) __builtin_memset(launch.dynamic, POISON, launch.shared_bytes);
    go(b, pick(b), b.host);
    if (b.failed) return false;
    if (b.ended < b.n) return explain(b), false;
    if (!guard_is_whole(b, i + 1 == blocks)) return false;
    if (i == 0) poisoned = touched(all);
  }
  return true;
}

}  // namespace iso_shim

// ---- What the compiler's checks call: accesses that a device faults on, and results that differ from device to device. --

struct iso_shim_site {
  const char* file;
  unsigned line, column;
};
struct iso_shim_access {
  iso_shim_site site;
  const void* type;
  unsigned char log_align, kind;
};

namespace iso_shim {
[[noreturn]] static void undefined(const iso_shim_site& site, const char* what, word number) {
  Block& b = *here()->block;
  failure(b) << "thread " << here()->linear << " (" << Place{site.file, site.line} << ") " << what << " " << number;
  abandon(b);
}
}  // namespace iso_shim

#define ISO_SHIM_CHECK(name, ...) \
  extern "C" __attribute__((visibility("hidden"), used)) void __ubsan_handle_##name(__VA_ARGS__)
ISO_SHIM_CHECK(type_mismatch_v1, const iso_shim_access* at, __UINTPTR_TYPE__) {
  iso_shim::undefined(at->site, "uses an address that is not a multiple of", 1ull << at->log_align);
}
ISO_SHIM_CHECK(out_of_bounds, const iso_shim_site* at, __UINTPTR_TYPE__ index) {
  iso_shim::undefined(*at, "leaves an array at index", index);
}
ISO_SHIM_CHECK(shift_out_of_bounds, const iso_shim_site* at, __UINTPTR_TYPE__, __UINTPTR_TYPE__ by) {
  iso_shim::undefined(*at, "shifts by", by);
}
ISO_SHIM_CHECK(divrem_overflow, const iso_shim_site* at, __UINTPTR_TYPE__, __UINTPTR_TYPE__ by) {
  iso_shim::undefined(*at, "divides an integer by", by);
}

extern "C" __attribute__((visibility("default"))) bool iso_shim_run(const iso_shim::Entry* entry,
                                                                    iso_shim::Launch* launch) {
  return iso_shim::run(*entry, *launch);
}
