// Operators over contiguous rows that sum a row along its tree and then use its elements again: softmax, norms.
//
// Rows of up to 4096 elements are held in registers, eight leaves per warp: several short rows per warp, or a team of
// up to 16 warps per row. They are read once and written once. A longer row belongs to a block, which holds it in
// shared memory if there is room, and else reads it again from the second cache in every pass.
//
// A body is written once for both kinds of rows:
//   row.hold(x)                     the row's elements of x, to be asked for by slot and index: held.at(j, i)
//   row.fold<F>(all, term(j, i))    all[row.of(j)]: what the terms of slot j's row fold to
//   row.each(f(j, i))               every element once; row.base(j) + i is its place in the tensor
//   row.once(f(j, index))           once a row, with the row's index
#pragma once
#include "reduce.cuh"

// Rows in registers. SHORT: several rows of up to 4 leaves (128 elements) per warp; else one row per team of warps.
template <bool SHORT>
struct HeldRows {
  static const u32 ALL = SHORT ? 8 : 1;
  u64 rows, row;
  u32 n, depth, lane, team;
  Node node;

  DEVICE HeldRows(u64 rows, u32 n, u32 depth) : rows(rows), n(n), depth(depth), lane(threadIdx.x % LANES) {
    u32 warp = threadIdx.x / LANES;
    u64 all = thread_index() / LANES;
    team = SHORT ? 0 : depth - 3;
    row = SHORT ? all << (3 - depth) : all >> team;
    if (!SHORT) node = node_of(n, team, warp & ((1u << team) - 1));
  }

  static DEVICE u32 of(u32 j) { return SHORT ? j : 0; }
  DEVICE u64 index(u32 j) const {
    u64 at = SHORT ? row + (j >> depth) : row;
    return at < rows ? at : rows - 1;
  }
  DEVICE bool live(u32 j) const { return (SHORT ? row + (j >> depth) : row) < rows; }
  DEVICE u64 base(u32 j) const { return index(j) * n; }

  // Calls f(slot, index in the row, true if the element exists) for this lane's elements.
  template <class Each>
  DEVICE void slots(Each f) const {
    if constexpr (SHORT) {
      ShortLeaves leaves(n, depth);
      UNROLL for (u32 j = 0; j < 8; ++j) {
        Node leaf = leaves.at(j);
        f(j, leaf.start + lane, lane < leaf.len);
      }
    } else {
      each_slot(node, [&](u32 j, u32 at, u32 len) { f(j, at + lane, lane < len); });
    }
  }

  template <class T>
  struct Held {
    Wide<T> v[8];
    DEVICE Wide<T> at(u32 j, u32) const { return v[j]; }
  };
  template <class T>
  DEVICE Held<T> hold(const T* x) {
    Held<T> held;
    slots([&](u32 j, u32 i, bool there) { held.v[j] = there ? widen(x[base(j) + i]) : Wide<T>(0); });
    return held;
  }

  // Values that are computed once and used again.
  template <class A>
  struct Kept {
    A v[8];
    DEVICE A keep(u32 j, A x) { return v[j] = x; }
    template <class Again>
    DEVICE A get(u32 j, Again) const {
      return v[j];
    }
  };

  template <class F, class A, class Term>
  DEVICE void fold(A (&all)[ALL], Term term) {
    A v[8];
    slots([&](u32 j, u32 i, bool there) { v[j] = there ? term(j, i) : F::template pad<A>(); });
    if constexpr (SHORT) {
      A x = fold_slots<F>(v, lane, depth);
      UNROLL for (u32 j = 0; j < 8; ++j) all[j] = __shfl_sync(ALL_LANES, x, slot_of(j >> depth << depth));
    } else {
      all[0] = fold_team<F>(fold_slots<F>(v, lane, 3), team);
    }
  }

  template <class Each>
  DEVICE void each(Each f) const {
    slots([&](u32 j, u32 i, bool there) {
      if (there && live(j)) f(j, i);
    });
  }

  template <class Each>
  DEVICE void once(Each f) const {
    if constexpr (SHORT) {
      UNROLL for (u32 j = 0; j < 8; ++j) {
        if (lane == 0 && (j & ((1u << depth) - 1)) == 0 && live(j)) f(j, index(j));
      }
    } else {
      if (lane == 0 && (threadIdx.x / LANES & ((1u << team) - 1)) == 0 && live(0)) f(0, index(0));
    }
  }
};

// One long row per block of 1024 threads; `room` in shared memory holds `held` rows of any of the operands.
struct LongRow {
  static const u32 ALL = 1;
  u64 row;
  u32 n, depth, lane, held;
  unsigned char* room;

  DEVICE LongRow(u32 n, u32 depth, u32 held, unsigned char* room)
      : row(blockIdx.x), n(n), depth(depth), lane(threadIdx.x % LANES), held(held), room(room) {}

  static DEVICE u32 of(u32) { return 0; }
  DEVICE u64 base(u32) const { return row * n; }
  DEVICE u64 index(u32) const { return row; }

  template <class T>
  struct Held {
    const T* from;
    DEVICE Wide<T> at(u32, u32 i) const { return widen(from[i]); }
  };
  template <class T>
  DEVICE Held<T> hold(const T* x) {
    x += base(0);
    if (held == 0) return Held<T>{x};
    T* to = (T*)room;
    held -= 1, room += ((u64)n * sizeof(T) + 15) / 16 * 16;
    _Pragma("unroll 8") for (u32 i = threadIdx.x; i < n; i += blockDim.x) to[i] = x[i];
    __syncthreads();
    return Held<T>{to};
  }

  template <class A>
  struct Kept {
    DEVICE A keep(u32, A x) { return x; }
    template <class Again>
    DEVICE A get(u32, Again again) const {
      return again();
    }
  };

  template <class F, class A, class Term>
  DEVICE void fold(A (&all)[1], Term term) {
    const u32 TEAM = 5;
    Node node = node_of(n, TEAM, threadIdx.x / LANES);
    A x = fold_node<F, A>(node, depth - TEAM - 3, lane, false, [&](u32 i) { return term(0, i); });
    all[0] = fold_team<F>(x, TEAM);
  }

  template <class Each>
  DEVICE void each(Each f) const {
    _Pragma("unroll 4") for (u32 i = threadIdx.x; i < n; i += blockDim.x) f(0, i);
  }

  template <class Each>
  DEVICE void once(Each f) const {
    if (threadIdx.x == 0) f(0, row);
  }
};

// The largest value of each row, except NaNs.
template <class Row, class A, class Held>
DEVICE void fold_largest(Row& row, A (&most)[Row::ALL], const Held& x) {
  row.template fold<Largest>(most, [&](u32 j, u32 i) {
    A value = x.at(j, i);
    return value > Num<A>::lowest() ? value : Num<A>::lowest();
  });
}

// ROWS(softmax, T, (parameters), (arguments)): the entries softmax_T and softmax_long_T, whose body is
// `softmax_rows<T>(row, arguments...)`. Both take rows, n and the depth last, and the second also the number of held
// rows.
#define ROWS(name, T, parameters, ...)                                                              \
  KERNEL(name##_##T, 512,  (parameters, u64 rows, u32 n, u32 depth)) {                              \
    if (depth < 3) {                                                                                \
      HeldRows<true> row(rows, n, depth);                                                           \
      name##_rows<T>(row, __VA_ARGS__);                                                             \
    } else {                                                                                        \
      HeldRows<false> row(rows, n, depth);                                                          \
      name##_rows<T>(row, __VA_ARGS__);                                                             \
    }                                                                                               \
  }                                                                                                 \
  KERNEL(name##_long_##T, 1024, (parameters, u64 rows, u32 n, u32 depth, u32 held)) {               \
    DYNAMIC_SHARED(room);                                                                           \
    LongRow row(n, depth, held, room);                                                              \
    name##_rows<T>(row, __VA_ARGS__);                                                               \
  }
// Groups parameters in a macro's argument.
#define WITH(...) __VA_ARGS__
