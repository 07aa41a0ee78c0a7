// Operators over contiguous rows that sum a row along its tree and then use its elements again: softmax, norms.
//
// Rows of up to 4096 elements are held in registers, eight leaves per warp: several short rows per warp, or a team of
// up to 16 warps per row. They are read once and written once. A longer row belongs to a block, which holds it in
// shared memory if there is room, and else reads it again from the second cache in every pass.
//
// If leaves have equal lengths that are multiples of a pack's, and all rows begin at 16 bytes, as those of most models
// do, lanes hold packs (tree.cuh) and load and store 16 bytes at a time. Else they hold single elements of leaves. A
// long row is copied to shared memory and stored by packs wherever it begins.
//
// A body is written once for all kinds of rows:
//   row.hold(x)                     the row's elements of x, to be asked for by slot and index: held.at(j, i)
//   row.pass(x)                     the same, for a body that uses each element once: a long row is left where it is
//   row.repeat(w)                   the same of a vector that all rows have in common, or null
//   row.fold<F>(all, term(j, i))    all[row.of(j)]: what the terms of slot j's row fold to
//   row.fold_elements<F>(all, held, term(j, x))    the same of terms of the held elements alone
//   row.store(y, f(j, i))           y = f, every element once
//   row.once(f(j, index))           once a row, with the row's index
#pragma once
#include "tree.cuh"

// Elements that are read from memory wherever they are asked for.
template <class T>
struct Unheld {
  const T* from;
  DEVICE Wide<T> at(u32, u32 i) const { return widen(from[i]); }
};

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
// Values that are computed again, because a thread has any number of them.
template <class A>
struct Forgotten {
  DEVICE A keep(u32, A x) { return x; }
  template <class Again>
  DEVICE A get(u32, Again again) const {
    return again();
  }
};

// Rows in registers. SHORT: several rows of up to 4 leaves (128 elements) per warp; else one row per team of warps.
template <bool SHORT>
struct HeldRows {
  static const u32 ALL = SHORT ? 8 : 1;
  static constexpr bool ONE_PER_BLOCK = false;
  template <class A>
  using Again = Kept<A>;
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
  // The rows of x, or one row that all rows have in common.
  template <class T>
  DEVICE Held<T> hold(const T* x, bool repeated = false) {
    Held<T> held;
    slots([&](u32 j, u32 i, bool there) { held.v[j] = there ? widen(x[(repeated ? 0 : base(j)) + i]) : Wide<T>(0); });
    return held;
  }
  template <class T>
  DEVICE Held<T> pass(const T* x) {
    return hold(x);
  }
  template <class T>
  DEVICE Unheld<T> repeat(const T* w) {
    return Unheld<T>{w};
  }

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

  template <class F, class A, class Elements, class Term>
  DEVICE void fold_elements(A (&all)[ALL], const Elements& held, Term term) {
    fold<F>(all, [&](u32 j, u32 i) { return term(j, held.at(j, i)); });
  }

  template <class T, class Each>
  DEVICE void store(T* y, Each f) const {
    slots([&](u32 j, u32 i, bool there) {
      if (there && live(j)) y[base(j) + i] = narrow<T>(f(j, i));
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

// Rows in registers by packs of V elements, whose leaves are packs as well. Slot k V + e is element e of pack k.
template <u32 V, bool SHORT>
struct PackedRows {
  static const u32 PACKS = 8 / V, ALL = SHORT ? PACKS : 1;
  static constexpr bool ONE_PER_BLOCK = false;
  template <class A>
  using Again = Kept<A>;
  u64 rows, row;
  u32 n, depth, lane, team, leaf, start, unit;

  DEVICE PackedRows(u64 rows, u32 n, u32 depth)
      : rows(rows), n(n), depth(depth), lane(threadIdx.x % LANES), leaf(n >> depth), start(start_of_pack<V>(lane)) {
    u64 all = thread_index() / LANES;
    team = SHORT ? 0 : depth - 3;
    row = SHORT ? all << (3 - depth) : all >> team;
    unit = SHORT ? 0 : (threadIdx.x / LANES & ((1u << team) - 1)) * 8;
  }

  static DEVICE u32 of(u32 j) { return SHORT ? j / V : 0; }
  // The row and the leaf of pack k.
  DEVICE u64 row_of(u32 k) const { return SHORT ? row + (slot_of_pack<V>(k, lane) >> depth) : row; }
  DEVICE u32 leaf_of(u32 k) const { return slot_of_pack<V>(k, lane) & ((1u << (SHORT ? depth : 3)) - 1); }
  DEVICE u64 index(u32 k) const {
    u64 at = row_of(k);
    return at < rows ? at : rows - 1;
  }
  DEVICE bool live(u32 k) const { return row_of(k) < rows; }
  // The index in the row of the first element of pack k.
  DEVICE u32 first(u32 k) const { return (unit + leaf_of(k)) * leaf + start; }

  template <class T>
  struct Held {
    Pack<T, V> packs[PACKS];
    DEVICE Wide<T> at(u32 j, u32) const { return widen(packs[j / V].at[j % V]); }
  };
  template <class T>
  DEVICE Held<T> hold(const T* x, bool repeated = false) {
    Held<T> held = {};
    UNROLL for (u32 k = 0; k < PACKS; ++k) {
      if (x && start < leaf) held.packs[k] = load_pack<V>(x + (repeated ? 0 : index(k) * n) + first(k));
    }
    return held;
  }
  template <class T>
  DEVICE Held<T> pass(const T* x) {
    return hold(x);
  }
  template <class T>
  DEVICE Held<T> repeat(const T* w) {
    return hold(w, true);
  }

  template <class F, class A, class Term>
  DEVICE void fold(A (&all)[ALL], Term term) {
    A v[8];
    UNROLL for (u32 j = 0; j < 8; ++j) {
      A one = term(j, first(j / V) + j % V);  // of zeros, in lanes without elements
      v[j] = start < leaf ? one : F::template pad<A>();
    }
    if constexpr (SHORT) {
      A x = fold_packs<F, V>(v, lane, depth);
      UNROLL for (u32 k = 0; k < PACKS; ++k) all[k] = shuffle(x, lane_of_leaf<V>(slot_of_pack<V>(k, lane)));
    } else {
      all[0] = fold_team<F>(fold_packs<F, V>(v, lane, 3), team);
    }
  }

  template <class F, class A, class Elements, class Term>
  DEVICE void fold_elements(A (&all)[ALL], const Elements& held, Term term) {
    fold<F>(all, [&](u32 j, u32 i) { return term(j, held.at(j, i)); });
  }

  template <class T, class Each>
  DEVICE void store(T* y, Each f) const {
    UNROLL for (u32 k = 0; k < PACKS; ++k) {
      if (start >= leaf || !live(k)) continue;
      Pack<T, V> pack;
      UNROLL for (u32 e = 0; e < V; ++e) pack.at[e] = narrow<T>(f(k * V + e, first(k) + e));
      store_pack(y + row_of(k) * n + first(k), pack);
    }
  }

  template <class Each>
  DEVICE void once(Each f) const {
    if constexpr (SHORT) {
      UNROLL for (u32 k = 0; k < PACKS; ++k) {
        if (start == 0 && leaf_of(k) == 0 && live(k)) f(k * V, index(k));
      }
    } else {
      if (lane == 0 && unit == 0 && live(0)) f(0, index(0));
    }
  }
};

// One long row per block of 1024 threads; `room` in shared memory holds `held` rows of any of the operands.
struct LongRow {
  static const u32 ALL = 1;
  static constexpr bool ONE_PER_BLOCK = true;
  template <class A>
  using Again = Forgotten<A>;
  u64 row;
  u32 n, depth, lane, held;
  unsigned char* room;

  DEVICE LongRow(u32 n, u32 depth, u32 held, unsigned char* room)
      : row(blockIdx.x), n(n), depth(depth), lane(threadIdx.x % LANES), held(held), room(room) {}

  static DEVICE u32 of(u32) { return 0; }
  DEVICE u64 index(u32) const { return row; }

  // A row lies in shared memory as it does in global memory, modulo 16 bytes, so that packs are packs there.
  template <class T>
  DEVICE Unheld<T> hold(const T* x, bool repeated = false) {
    constexpr u32 V = PACK_LEN<T>;
    if (!repeated) x += row * n;
    if (held == 0) return Unheld<T>{x};
    T* to = (T*)(room + (u64)x % 16);
    held -= 1, room += ((u64)n * sizeof(T) + 31) / 16 * 16;
    by_packs<V, 4>(
        x, n, threadIdx.x, blockDim.x, [&](u32 i) { store_pack(to + i, load_pack<V>(x + i)); },
        [&](u32 i) { to[i] = x[i]; });
    __syncthreads();
    return Unheld<T>{to};
  }
  template <class T>
  DEVICE Unheld<T> pass(const T* x) {
    return Unheld<T>{x + row * n};
  }
  template <class T>
  DEVICE Unheld<T> repeat(const T* w) {
    return Unheld<T>{w};
  }

  template <class F, class A, class Term>
  DEVICE void fold(A (&all)[1], Term term) {
    const u32 TEAM = 5;
    Node node = node_of(n, TEAM, threadIdx.x / LANES);
    A x = fold_node<F, A>(node, depth - TEAM - 3, lane, false, [&](u32 i) { return term(0, i); });
    all[0] = fold_team<F>(x, TEAM);
  }
  template <class F, class A, class T, class Term>
  DEVICE void fold_elements(A (&all)[1], const Unheld<T>& held, Term term) {
    const u32 TEAM = 5;
    Node node = node_of(n, TEAM, threadIdx.x / LANES);
    A x = fold_loaded_node<F, A>(node, depth - TEAM - 3, lane, false, [&](u32 i) { return held.from[i]; },
                                 [&](T e) { return term(0, widen(e)); });
    all[0] = fold_team<F>(x, TEAM);
  }

  template <class T, class Each>
  DEVICE void store(T* y, Each f) const {
    store_by<PACK_LEN<T>>(y, f);
  }
  template <u32 V, class T, class Each>
  DEVICE void store_by(T* y, Each f) const {
    y += row * n;
    by_packs<V, 1>(
        y, n, threadIdx.x, blockDim.x,
        [&](u32 i) {
          Pack<T, V> pack;
          UNROLL for (u32 e = 0; e < V; ++e) pack.at[e] = narrow<T>(f(0, i + e));
          store_pack(y + i, pack);
        },
        [&](u32 i) { y[i] = narrow<T>(f(0, i)); });
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

// ROWS(softmax, T, (parameters), (arguments)): the entries softmax_T, softmax_packed_T and softmax_long_T, whose body is
// `softmax_rows<T>(row, arguments...)`. All take rows, n and the depth last, and the third also the number of held rows.
#define ROWS(name, T, parameters, ...)                                                              \
  ROWS_IN_REGISTERS(name##_##T, HeldRows<true>, HeldRows<false>, name##_rows<T>, WITH(parameters), __VA_ARGS__) \
  ROWS_IN_REGISTERS(name##_packed_##T, WITH(PackedRows<PACK_LEN<T>, true>), WITH(PackedRows<PACK_LEN<T>, false>),  \
                    name##_rows<T>, WITH(parameters), __VA_ARGS__)                                  \
  KERNEL(name##_long_##T, 1024, (parameters, u64 rows, u32 n, u32 depth, u32 held)) {               \
    DYNAMIC_SHARED(room);                                                                           \
    LongRow row(n, depth, held, room);                                                              \
    name##_rows<T>(row, __VA_ARGS__);                                                               \
  }
#define ROWS_IN_REGISTERS(entry, SHORT, TEAM, body, parameters, ...)                                \
  KERNEL(entry, 512, (parameters, u64 rows, u32 n, u32 depth)) {                                    \
    if (depth < 3) {                                                                                \
      SHORT row(rows, n, depth);                                                                    \
      body(row, __VA_ARGS__);                                                                       \
    } else {                                                                                        \
      TEAM row(rows, n, depth);                                                                     \
      body(row, __VA_ARGS__);                                                                       \
    }                                                                                               \
  }
// Groups parameters in a macro's argument.
#define WITH(...) __VA_ARGS__
