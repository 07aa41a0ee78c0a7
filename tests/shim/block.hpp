// A block of CUDA threads, run on one OS thread: its scheduler and its barriers.
//
// Each thread runs until it waits or ends. The launch's order decides which thread runs next, so a missing barrier
// shows as a result that depends on the order. A thread that ends without having waited leaves its stack to the next
// one, so a kernel without barriers is a loop.
#pragma once

#include "fiber.hpp"

namespace iso_shim {

constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned WARP = 32;
constexpr unsigned NONE = ~0u;
// The guard behind the dynamic shared memory; its near part is checked after every block.
constexpr unsigned GUARD_BYTES = 4096, NEAR_BYTES = 256;
constexpr unsigned char GUARD = 0xa5;
constexpr unsigned char POISON = 0xff;

// An entry of a program, as the host sees it.
struct Entry {
  const char* name;
  void (*call)(void** arguments);
  unsigned parameters_len;
  const unsigned* parameter_bytes;
  unsigned max_threads;
};

enum Order : unsigned { ASCENDING, DESCENDING, SHUFFLED };

// The host's arguments of one launch.
struct Launch {
  void** arguments;
  Dim blocks, threads;
  unsigned shared_bytes;
  Order order;
  word seed;
  // MAX_THREADS stacks, aligned to their size, with SPARE_STACKS below.
  unsigned char* stacks;
  // shared_bytes of memory, aligned to 16, and GUARD_BYTES behind it.
  unsigned char* dynamic;
  char* error;
  unsigned error_bytes;
};

// Texts for the host, truncated if there is no room.
struct Text {
  char *at, *end;
  Text& operator<<(const char* text) {
    while (*text && at + 1 < end) *at++ = *text++;
    *at = 0;
    return *this;
  }
  Text& operator<<(word number) {
    char digits[24], *first = digits + 23;
    *first = 0;
    do *--first = (char)('0' + number % 10);
    while (number /= 10);
    return *this << first;
  }
  Text& operator<<(unsigned number) { return *this << (word)number; }
  Text& operator<<(const Dim& d) { return *this << "(" << d.x << ", " << d.y << ", " << d.z << ")"; }
  Text& operator<<(const Place& p) { return *this << p.file << ":" << p.line; }
  Text& hex(unsigned number) {
    char digits[9];
    for (int i = 0; i < 8; ++i) digits[i] = "0123456789abcdef"[(number >> (28 - 4 * i)) & 15];
    digits[8] = 0;
    return *this << "0x" << digits;
  }
};

enum State : unsigned char { FRESH, READY, AT_BARRIER, IN_WARP, ENDED };

struct Block {
  Launch* launch;
  const Entry* entry;
  Dim index, threads, grid;
  unsigned n;
  Context host;
  bool failed;
  Fiber* running;
  // The numbers of threads that have begun, and ended.
  unsigned begun, ended;
  // If true, threads that were released last run first, so that one warp runs far ahead of the others.
  bool depth_first;
  word random;
  // The barrier at which threads wait.
  unsigned waiting;
  Kind kind;
  Place place;
  unsigned first, sum, result;
  Fiber* free;
  unsigned stacks_len;
  unsigned ready_len;
  unsigned ready[MAX_THREADS];
  unsigned order[MAX_THREADS];
  State state[MAX_THREADS];
  lane_mask in_warp[MAX_THREADS / WARP];
  Fiber* fibers[MAX_THREADS];
};

static inline unsigned random_below(Block& b, unsigned n) {
  word z = b.random += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return (unsigned)(((z ^ (z >> 31)) >> 32) * n >> 32);
}

static inline void shuffle(Block& b, unsigned* numbers, unsigned n) {
  for (unsigned i = n; i > 1; --i) {
    unsigned j = random_below(b, i), kept = numbers[i - 1];
    numbers[i - 1] = numbers[j];
    numbers[j] = kept;
  }
}

static inline unsigned lanes_of(const Block& b, unsigned warp) {
  unsigned left = b.n - warp * WARP;
  return left < WARP ? left : WARP;
}

// Draws an order of all threads: warps are shuffled, and the lanes of each.
static void draw_order(Block& b) {
  unsigned warps[MAX_THREADS / WARP], warps_len = (b.n + WARP - 1) / WARP, at = 0;
  for (unsigned w = 0; w < warps_len; ++w) warps[w] = w;
  shuffle(b, warps, warps_len);
  for (unsigned w = 0; w < warps_len; ++w) {
    unsigned lanes = lanes_of(b, warps[w]);
    for (unsigned l = 0; l < lanes; ++l) b.order[at + l] = warps[w] * WARP + l;
    shuffle(b, b.order + at, lanes);
    at += lanes;
  }
}

// The thread at position i of the launch's order.
static inline unsigned nth(const Block& b, unsigned i) {
  return b.launch->order == ASCENDING ? i : b.launch->order == DESCENDING ? b.n - 1 - i : b.order[i];
}

// The thread that runs next.
static inline unsigned pick(Block& b) {
  bool fresh = b.begun < b.n;
  if (b.ready_len && (!fresh || b.depth_first || random_below(b, 2))) {
    if (!b.depth_first) {
      unsigned j = random_below(b, b.ready_len), kept = b.ready[j];
      b.ready[j] = b.ready[b.ready_len - 1];
      b.ready[b.ready_len - 1] = kept;
    }
    return b.ready[--b.ready_len];
  }
  return fresh ? nth(b, b.begun++) : NONE;
}

static inline void release(Block& b, unsigned thread) {
  b.state[thread] = READY;
  b.ready[b.ready_len++] = thread;
}

// Aborts the launch: the text is written, and nothing of the block runs again.
[[noreturn]] static void abandon(Block& b) {
  b.failed = true;
  Context left;
  switch_to(left, b.host);
  __builtin_trap();
}

static Text failure(Block& b) {
  Text text{b.launch->error, b.launch->error + b.launch->error_bytes};
  return text << b.entry->name << ", block " << b.index << ": ";
}

[[noreturn]] static void too_deep(Block& b) {
  failure(b) << "a thread needs more stack than there is (" << (STACK_BYTES - STAGGER_LEN * STAGGER_BYTES) << " bytes)";
  abandon(b);
}

// Returns the calling thread, on its own stack: a frame beyond its end would find the slot below.
static inline Fiber* caller() {
  Fiber* me = here();
  if (me->block->running != me) too_deep(*me->block);
  return me;
}

// Assigns a thread to a fiber.
static inline void seat(Block& b, Fiber* fiber, unsigned thread) {
  const Dim& d = b.threads;
  fiber->block = &b;
  fiber->linear = thread;
  fiber->thread = d.y * d.z == 1 ? Dim{thread, 0, 0} : Dim{thread % d.x, thread / d.x % d.y, thread / d.x / d.y};
  b.state[thread] = READY;
}

static void run_threads();

// Runs a thread from the stack that `from` saves; NONE is the host.
static void go(Block& b, unsigned thread, Context& from) {
  if (thread == NONE) return switch_to(from, b.host);
  Fiber* fiber = b.fibers[thread];
  if (!fiber) {
    fiber = b.free;
    if (fiber) {
      b.free = fiber->next_free;
    } else {
      fiber = fiber_at((uptr)b.launch->stacks + STACK_BYTES * b.stacks_len++);
      for (unsigned i = 0; i < CANARY_LEN; ++i) canary_of(fiber)[i] = CANARY;
      prepare(fiber, run_threads);
    }
    seat(b, fiber, thread);
    b.fibers[thread] = fiber;
  }
  b.running = fiber;
  switch_to(from, fiber->context);
}

// A fiber's loop: it runs its thread, then fresh ones, and waits if there is none.
static void run_threads() {
  Fiber* me = here();
  for (;;) {
    Block& b = *me->block;
    b.entry->call(b.launch->arguments);
    for (unsigned i = 0; i < CANARY_LEN; ++i) {
      if (canary_of(me)[i] != CANARY) too_deep(b);
    }
    b.state[me->linear] = ENDED;
    b.fibers[me->linear] = nullptr;
    ++b.ended;
    unsigned next = pick(b);
    if (next != NONE && !b.fibers[next]) {
      seat(b, me, next);
      b.fibers[next] = me;
      continue;
    }
    me->next_free = b.free;
    b.free = me;
    go(b, next, me->context);
  }
}

// Makes the calling thread wait until it is released.
static inline void suspend(Fiber* me) {
  Block& b = *me->block;
  unsigned next = pick(b);
  if (next != me->linear) go(b, next, me->context);
}

static inline bool same_place(const Place& a, const Place& b) {
  if (a.line != b.line) return false;
  const char *p = a.file, *q = b.file;
  while (p != q && *p && *p == *q) ++p, ++q;
  return p == q || *p == *q;
}

// A barrier of the whole block. Returns the number of threads whose predicate holds.
static unsigned barrier(Kind kind, int predicate, Place place) {
  Fiber* me = caller();
  Block& b = *me->block;
  me->kind = kind;
  me->place = place;
  if (b.waiting == 0) {
    b.kind = kind;
    b.place = place;
    b.first = me->linear;
    b.sum = 0;
  } else if (b.kind != kind || !same_place(b.place, place)) {
    failure(b) << "thread " << me->linear << " comes to " << KIND_NAMES[kind] << " (" << place << ") while thread "
               << b.first << " waits at " << KIND_NAMES[b.kind] << " (" << b.place << ")";
    abandon(b);
  }
  b.state[me->linear] = AT_BARRIER;
  b.sum += predicate != 0;
  if (++b.waiting == b.n) {
    b.waiting = 0;
    b.result = b.sum;
    if (b.launch->order == SHUFFLED) draw_order(b);
    // Threads that are pushed last run first.
    for (unsigned i = b.n; i-- > 0;) release(b, nth(b, i));
  }
  suspend(me);
  return b.result;
}

// All lanes have arrived: each gets its result.
static void exchange(Block& b, unsigned base, lane_mask lanes, Kind kind) {
  bool shuffles = kind >= SHFL && kind <= SHFL_XOR;
  word ballot = 0;
  for (lane_mask left = shuffles ? 0 : lanes; left; left &= left - 1) {
    unsigned lane = (unsigned)__builtin_ctz(left);
    ballot |= (word)(b.fibers[base + lane]->value != 0) << lane;
  }
  for (lane_mask left = lanes; left; left &= left - 1) {
    unsigned lane = (unsigned)__builtin_ctz(left);
    Fiber* fiber = b.fibers[base + lane];
    if (shuffles) {
      unsigned source = fiber->source;
      if (!(lanes >> source & 1)) {
        failure(b) << "thread " << fiber->linear << " reads lane " << source << " by " << KIND_NAMES[kind] << " ("
                   << fiber->place << "), which does not take part";
        abandon(b);
      }
      fiber->result = b.fibers[base + source]->value;
    } else {
      fiber->result = kind == ANY ? ballot != 0 : kind == ALL ? ballot == lanes : ballot;
    }
  }
}

// Pushes lanes so that they run in the launch's order.
static void release_lanes(Block& b, unsigned base, lane_mask lanes) {
  unsigned numbers[WARP], len = 0;
  for (lane_mask left = lanes; left; left &= left - 1) numbers[len++] = base + (unsigned)__builtin_ctz(left);
  if (b.launch->order == SHUFFLED) shuffle(b, numbers, len);
  bool up = b.launch->order == DESCENDING;
  for (unsigned i = 0; i < len; ++i) release(b, numbers[up ? i : len - 1 - i]);
}

// A function of the lanes of a warp in `mask`. Returns the calling lane's result.
static word warp_function(Kind kind, lane_mask mask, word value, unsigned source, Place place) {
  Fiber* me = caller();
  Block& b = *me->block;
  unsigned lane = me->linear % WARP, warp = me->linear / WARP, base = warp * WARP;
  unsigned lanes_len = lanes_of(b, warp);
  // Lanes that the block does not have count as arrived; no lane may read from them.
  lane_mask lanes = mask & (lanes_len == WARP ? ~0u : (1u << lanes_len) - 1);
  me->kind = kind;
  me->place = place;
  me->mask = mask;
  me->value = value;
  me->source = source;
  if (!(mask >> lane & 1)) {
    (failure(b) << "thread " << me->linear << " calls " << KIND_NAMES[kind] << " (" << place << ") with a mask ").hex(mask)
        << " that leaves its lane out";
    abandon(b);
  }
  b.state[me->linear] = IN_WARP;
  lane_mask& waiting = b.in_warp[warp];
  waiting |= 1u << lane;
  bool all = (waiting & lanes) == lanes;
  for (lane_mask left = all ? lanes : 0; left; left &= left - 1) {
    Fiber* peer = b.fibers[base + (unsigned)__builtin_ctz(left)];
    all = all && peer->kind == kind && peer->mask == mask;
  }
  if (all) {
    exchange(b, base, lanes, kind);
    waiting &= ~lanes;
    release_lanes(b, base, lanes);
  }
  suspend(me);
  return me->result;
}

}  // namespace iso_shim
