// Reductions of rows and columns along the summation tree, over any dims of any view: kernels, and the entries of a
// reduction for a type.
#pragma once
#include "tree.cuh"

// ---- The layouts of reduced rows and columns. ------------------------------------------------------------------------

// The dims that are not reduced, fastest first: extents, and strides in the operand and in the result. Their product
// is below 2^32. Filled by src/tensor/cuda/reduce.rs.
struct KeptDims {
  u64 in[6], out[6];
  u32 len[6];
  u32 rank, unused;

  DEVICE void offsets(u32 index, u64& from, u64& to) const {
    from = to = 0;
    UNROLL for (u32 d = 0; d < 6; ++d) {
      if (d >= rank) continue;
      u32 at = d + 1 < rank ? index % len[d] : index;
      index = d + 1 < rank ? index / len[d] : 0;
      from += at * in[d], to += at * out[d];
    }
  }
};

// ---- Reductions of contiguous rows. ----------------------------------------------------------------------------------

// The terms that are folded: each element in the type that the result is computed in. Another Term may compute them from
// elements and a value of their row or column, with(to), where `to` is the position of the result.
template <class A>
struct Elements {
  static constexpr bool WITH = false;
  DEVICE A with(u64) const { return A(); }
  template <class In>
  DEVICE A of(In x, A) const {
    return (A)widen(x);
  }
};

// Rows of up to 4 leaves, 8 >> depth of them per warp.
template <class F, class In, class Out, class Term>
DEVICE void reduce_short_rows(const In* x, Out* out, const KeptDims& nest, u64 rows, u32 n, u32 depth, bool halved,
                              const Term& term) {
  typedef Wide<Out> A;
  u32 lane = threadIdx.x % LANES, slot = slot_of(lane);
  u64 first = (thread_index() / LANES) << (3 - depth), from, to;
  u64 mine = first + (slot >> depth);
  nest.offsets((u32)(mine < rows ? mine : rows - 1), from, to);
  ShortLeaves leaves(n, depth);
  A v[8], with = term.with(to);
  UNROLL for (u32 j = 0; j < 8; ++j) {
    u64 base = __shfl_sync(ALL_LANES, from, slot_of(j));
    A of_row = with;
    if constexpr (Term::WITH) of_row = __shfl_sync(ALL_LANES, with, slot_of(j));
    Node leaf = leaves.at(j), e = element_of(halved, leaf.len, lane);
    if (n == 0) { v[j] = F::template pad<A>(); continue; }
    A one = term.of(x[base + leaf.start + (e.len ? e.start : 0)], of_row);
    v[j] = e.len ? one : F::template pad<A>();
  }
  A all = fold_slots<F>(v, lane, depth);
  if (lane < 8 && (slot & ((1u << depth) - 1)) == 0 && mine < rows) out[to] = narrow<Out>(F::finish(all));
}

// The same, by packs. Lane j has the offsets of leaf j's row, and lanes up to 8 store results.
template <class F, class In, class Out, class Term>
DEVICE void reduce_short_packed_rows(const In* x, Out* out, const KeptDims& nest, u64 rows, u32 n, u32 depth, const Term& term) {
  typedef Wide<Out> A;
  constexpr u32 V = PACK_LEN<In>;
  u32 lane = threadIdx.x % LANES, slot = lane % 8, leaf = n >> depth, start = start_of_pack<V>(lane);
  u64 mine = ((thread_index() / LANES) << (3 - depth)) + (slot >> depth), from, to;
  nest.offsets((u32)(mine < rows ? mine : rows - 1), from, to);
  A v[8], with = term.with(to);
  UNROLL for (u32 k = 0; k < 8 / V; ++k) {
    u32 j = slot_of_pack<V>(k, lane);
    u64 base = __shfl_sync(ALL_LANES, from, j);
    A of_row = with;
    if constexpr (Term::WITH) of_row = __shfl_sync(ALL_LANES, with, j);
    bool there = start < leaf;
    Pack<In, V> pack = load_pack<V>(x + base + (j & ((1u << depth) - 1)) * leaf + (there ? start : 0));
    UNROLL for (u32 e = 0; e < V; ++e) {
      A one = term.of(pack.at[e], of_row);
      v[k * V + e] = there ? one : F::template pad<A>();
    }
  }
  A all = shuffle(fold_packs<F, V>(v, lane, depth), lane_of_leaf<V>(slot));
  if (lane < 8 && (slot & ((1u << depth) - 1)) == 0 && mine < rows) out[to] = narrow<Out>(F::finish(all));
}

// Rows of `n` contiguous elements with 2^depth leaves each, cut into 2^split nodes that are stored separately,
// `apart` elements from one another. A team of 2^team of the block's 8 warps computes a node. Blocks are
// one-dimensional. If PACKED, leaves of rows are packs.
template <class F, bool PACKED, class In, class Out, class Term>
DEVICE void reduce_rows(const In* x, Out* out, const KeptDims& nest, u64 rows, u64 apart, u32 n, u32 depth, u32 split, u32 team,
                        bool halved, const Term& term) {
  typedef Wide<Out> A;
  if (depth < 3) {
    if constexpr (PACKED) reduce_short_packed_rows<F>(x, out, nest, rows, n, depth, term);
    else reduce_short_rows<F>(x, out, nest, rows, n, depth, halved, term);
    return;
  }
  u32 lane = threadIdx.x % LANES, member = threadIdx.x / LANES & ((1u << team) - 1);
  u64 unit = (thread_index() / LANES) >> team, row = unit >> split, from, to;
  bool live = row < rows;
  u32 part = (u32)unit & ((1u << split) - 1);
  nest.offsets((u32)(live ? row : rows - 1), from, to);
  const In* at = x + from;
  Node node = node_of(n, split + team, part << team | member);
  u32 levels = depth - split - team - 3;
  A with = term.with(to), all;
  if constexpr (PACKED) all = fold_packed_node<F, A>(at, node, levels, lane, [&](In e) { return term.of(e, with); });
  else if constexpr (F::ANY_ORDER) all = fold_run<F, A>(at + node.start, node.len, lane, [&](In e) { return term.of(e, with); });
  else all = fold_loaded_node<F, A>(node, levels, lane, halved, [&](u32 i) { return at[i]; }, [&](In e) { return term.of(e, with); });
  all = fold_team<F>(all, team);
  if (live && lane == 0 && member == 0) out[to + part * apart] = narrow<Out>(F::finish(all));
}

// ---- Reductions of columns. ------------------------------------------------------------------------------------------

// N neighbouring elements; only the first `len` exist, at least one. As in fold_node, no load is beside a branch.
template <class F, u32 N, class A, class Term>
DEVICE A fold_few(u32 at, u32 len, Term term) {
  if constexpr (N > 8) {
    if (len < N) {
      A x = fold_few<F, N / 2, A>(at, len < N / 2 ? len : N / 2, term);
      return len > N / 2 ? F::join(x, fold_few<F, N / 2, A>(at + N / 2, len - N / 2, term)) : x;
    }
  }
  A v[N];
  if (N > 8 || len >= N) {
    UNROLL for (u32 k = 0; k < N; ++k) v[k] = term(at + k);
  } else {
    UNROLL for (u32 k = 0; k < N; ++k) {
      A one = term(at + (k < len ? k : 0));
      v[k] = k < len ? one : F::template pad<A>();
    }
  }
  return fold_registers<F, N>(v);
}

// Folds `term(i)` over a node of 2^levels leaves, with levels at most 11, in one thread. Leaves of outer dims have at
// most 4 elements, for which joining neighbours and halving are the same.
template <class F, class A, class Term>
DEVICE A fold_column(Node node, u32 levels, bool halved, Term term) {
  Pending<F, A, 12> pending;
  A x = F::template pad<A>();
  if (node.len == 0) return x;
  Walk walk(node, levels);
  ROLLED for (u32 g = 0; g < 1u << levels; ++g) {
    Node leaf = walk.next(g);
    if (halved) {
      x = fold_few<F, 4, A>(leaf.start, leaf.len, term);
    } else {
      ROLLED for (u32 i = 0; i < leaf.len; i += 16) {
        A half = fold_few<F, 16, A>(leaf.start + i, leaf.len - i, term);
        x = i == 0 ? half : F::join(x, half);
      }
    }
    x = pending.push(g, x);
  }
  return x;
}

// Blocks of 32 x 8 threads: x is a column, and 2^team of the eight share the rows of one column. blockIdx.y is one of
// the 2^split nodes that are stored separately. `of_column(column)` returns a column's terms by index, and write(column,
// part, value) is called once per column and part.
template <class F, class A, class Terms, class Write>
DEVICE void fold_columns(u64 columns, u32 n, u32 depth, u32 split, u32 team, bool halved, Terms of_column, Write write) {
  SHARED A room[8][32];
  u32 y = threadIdx.y, member = y & ((1u << team) - 1), part = blockIdx.y;
  u64 column = ((u64)blockIdx.x * (8 >> team) + (y >> team)) * 32 + threadIdx.x;
  bool live = column < columns;
  Node node = node_of(n, split + team, part << team | member);
  A x = F::template pad<A>();
  if (live) x = fold_column<F, A>(node, depth - split - team, halved, of_column(column));
  ROLLED for (u32 level = 0; level < team; ++level) {
    u32 step = 1u << level;
    room[y][threadIdx.x] = x;
    __syncthreads();
    if (member % (2 * step) == 0) x = F::join(x, room[y + step][threadIdx.x]);
    __syncthreads();
  }
  if (live && member == 0) write(column, part, x);
}

// Columns of `n` elements, `stride` apart; parts are `apart` elements apart in the result.
template <class F, class In, class Out, class Term>
DEVICE void reduce_columns(const In* x, Out* out, const KeptDims& nest, u64 columns, u64 stride, u64 apart, u32 n, u32 depth, u32 split,
                           u32 team, bool halved, const Term& term) {
  typedef Wide<Out> A;
  u64 column = ((u64)blockIdx.x * (8 >> team) + (threadIdx.y >> team)) * 32 + threadIdx.x, from, to;
  nest.offsets((u32)(column < columns ? column : 0), from, to);
  const In* at = x + from;
  A with = term.with(to);
  fold_columns<F, A>(
      columns, n, depth, split, team, halved,
      [&](u64) { return [&](u32 i) { return term.of(at[i * stride], with); }; },
      [&](u64, u32 part, A all) { out[to + part * apart] = narrow<Out>(F::finish(all)); });
}

// The entries of a reduction for a type: to the type itself, to the type that it computes in (wide_), and back from
// that (narrow_). Rows have an entry for leaves of packs, except folds in any order, which need none.
#define REDUCTION(F, T) REDUCTION_OF(F, rows_##T, packed_rows_##T, columns_##T, T, T)
#define WIDE_REDUCTION(F, T, A) REDUCTION_OF(F, wide_rows_##T, wide_packed_rows_##T, wide_columns_##T, T, A)
#define REDUCTION_OF_HALVES(F, T)                                                                \
  REDUCTION_OF(F, wide_rows_##T, wide_packed_rows_##T, wide_columns_##T, T, Wide<T>)             \
  REDUCTION_OF(F, narrow_rows_##T, narrow_packed_rows_##T, narrow_columns_##T, Wide<T>, T)
#define REDUCTION_OF(F, ROWS, PACKED_ROWS, COLUMNS, IN, OUT)                                                             \
  ROWS_OF(F, ROWS, false, IN, OUT)                                                                                       \
  ROWS_OF(F, PACKED_ROWS, true, IN, OUT)                                                                                 \
  COLUMNS_OF(F, COLUMNS, IN, OUT)
#define REDUCTION_IN_ANY_ORDER(F, T) ROWS_OF(F, rows_##T, false, T, T) COLUMNS_OF(F, columns_##T, T, T)
#define REDUCTION_OF_HALVES_IN_ANY_ORDER(F, T)                                                                           \
  ROWS_OF(F, wide_rows_##T, false, T, Wide<T>) COLUMNS_OF(F, wide_columns_##T, T, Wide<T>)                               \
  ROWS_OF(F, narrow_rows_##T, false, Wide<T>, T) COLUMNS_OF(F, narrow_columns_##T, Wide<T>, T)
#define ROWS_OF(F, NAME, PACKED, IN, OUT)                                                                                \
  KERNEL(NAME, 256,                                                                                                      \
         (const IN* x, OUT* out, KeptDims nest, u64 rows, u64 apart, u32 n, u32 depth, u32 split, u32 team, u32 halved)) {   \
    reduce_rows<F, PACKED>(x, out, nest, rows, apart, n, depth, split, team, halved, Elements<Wide<OUT>>());             \
  }
#define COLUMNS_OF(F, NAME, IN, OUT)                                                                                     \
  KERNEL(NAME, 256, (const IN* x, OUT* out, KeptDims nest, u64 columns, u64 stride, u64 apart, u32 n, u32 depth, u32 split, \
                     u32 team, u32 halved)) {                                                                            \
    reduce_columns<F>(x, out, nest, columns, stride, apart, n, depth, split, team, halved, Elements<Wide<OUT>>());       \
  }
