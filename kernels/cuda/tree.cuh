// The summation tree (kernels/src/sums/tree.rs) on a device.
//
// Halving `[a, b)` at `a + ceil((b - a) / 2)` `depth` times gives 2^depth nodes whose lengths differ by at most one:
// node k is one longer than the shortest if k with its bits reversed is below the remainder. So each node's range is
// computed directly, and the nodes above the leaves form a perfect binary tree. With the smallest depth whose leaves
// have at most 32 elements, a leaf of the definition that ends one level earlier is the sum of its two halves: the
// same value.
//
// A warp takes eight leaves at a time. Lane i holds element i of each leaf in one of eight registers, so that loads
// are coalesced wherever leaves begin. Lanes exchange halves of their registers while they join (4 + 2 + 1 shuffles),
// join twice more, and join the eight leaves' sums three times: 12 shuffles for 256 elements. Several warps form a
// team, which joins its warps' nodes in shared memory. In sums over columns, a thread has a column and keeps its tree
// in a few registers.
//
// If all leaves of a row have the same length, a multiple of a pack's, and rows begin at 16 bytes, a warp loads its
// eight leaves by packs instead (LDG.128). A lane then has neighbours, which it joins by itself: 5 or 6 shuffles for 256
// elements (8 in f64). The host chooses among the entries.
#pragma once
#include "num.cuh"
#include "packs.cuh"

#define LANES 32u
#define ALL_LANES 0xffffffffu

// Marks loops whose unrolled code would be too long.
#ifdef ISO_SHIM
#define ROLLED
#else
#define ROLLED _Pragma("unroll 1")
#endif

// ---- Folds: the join of two values, the identity, the final conversion, and whether any order of joins gives the same
// value. -----------------------------------------------------------------------------------------------------------

struct Sum {
  static constexpr bool ANY_ORDER = false;
  template <class A>
  static DEVICE A pad() {
    return Num<A>::sum_pad();
  }
  template <class A>
  static DEVICE A join(A a, A b) {
    return add_(a, b);
  }
  template <class A>
  static DEVICE A finish(A a) {
    return a;
  }
};

// A NaN becomes the NaN that any join returns, even if nothing was joined.
struct Max {
  static constexpr bool ANY_ORDER = true;
  template <class A>
  static DEVICE A pad() {
    return Num<A>::lowest();
  }
  template <class A>
  static DEVICE A join(A a, A b) {
    return max_(a, b);
  }
  template <class A>
  static DEVICE A finish(A a) {
    return max_(a, pad<A>());
  }
};

struct Min {
  static constexpr bool ANY_ORDER = true;
  template <class A>
  static DEVICE A pad() {
    return Num<A>::highest();
  }
  template <class A>
  static DEVICE A join(A a, A b) {
    return min_(a, b);
  }
  template <class A>
  static DEVICE A finish(A a) {
    return min_(a, pad<A>());
  }
};

// The largest value except NaNs, which are padding here: used for shifts that cancel.
struct Largest {
  template <class A>
  static DEVICE A pad() {
    return Num<A>::lowest();
  }
  template <class A>
  static DEVICE A join(A a, A b) {
    return b > a ? b : a;
  }
};

// ---- Nodes. ----------------------------------------------------------------------------------------------------------

struct Node {
  u32 start, len;
};

// Node k of the 2^depth nodes into which 0..len is halved.
DEVICE Node node_of(u32 len, u32 depth, u32 k) {
  u32 start = 0;
  ROLLED for (u32 bit = depth; bit-- > 0;) {
    u32 left = left_of(len);
    bool right = k >> bit & 1;
    start += right ? left : 0;
    len = right ? len - left : left;
  }
  return Node{start, len};
}

// The nodes below a node, in order.
struct Walk {
  u32 at, len, share, rest, depth;
  DEVICE Walk(Node node, u32 depth)
      : at(node.start), len(0), share(node.len >> depth), rest(node.len & ((1u << depth) - 1)), depth(depth) {}
  // Node k, after nodes 0 to k - 1.
  DEVICE Node next(u32 k) {
    at += len;
    u32 reversed = depth == 0 ? 0 : __brev(k) >> (32 - depth);
    len = share + (reversed < rest ? 1 : 0);
    return Node{at, len};
  }
};

// The eight nodes three levels below a node: calls f(slot, start, length) for each; the compiler knows the slot.
template <class Each>
DEVICE void each_slot(Node node, Each f) {
  u32 share = node.len / 8, rest = node.len % 8, at = node.start;
  UNROLL for (u32 j = 0; j < 8; ++j) {
    u32 reversed = (j & 1) << 2 | (j & 2) | j >> 2;
    u32 len = share + (reversed < rest ? 1 : 0);
    f(j, at, len);
    at += len;
  }
}

// The leaves of rows with at most 4 leaves: slot j of eight is leaf j % 2^depth of row j >> depth.
struct ShortLeaves {
  u32 n, half, depth;
  DEVICE ShortLeaves(u32 n, u32 depth) : n(n), half(left_of(n)), depth(depth) {}
  DEVICE Node at(u32 slot) const {
    if (depth == 0) return Node{0, n};
    Node side = slot >> (depth - 1) & 1 ? Node{half, n - half} : Node{0, half};
    if (depth == 1) return side;
    u32 left = left_of(side.len);
    return slot & 1 ? Node{side.start + left, side.len - left} : Node{side.start, left};
  }
};

static_assert(LEAF == 32, "a warp holds a leaf");

// The element of a leaf of this length that a lane holds; none if the length is 0. Leaves of outer dims are halved
// down to single elements, which are in the lanes of a perfect tree.
DEVICE Node element_of(bool halved, u32 len, u32 lane) {
  if (halved) return node_of(len, 5, lane);
  return Node{lane, lane < len ? 1u : 0u};
}

// ---- A warp's joins. -------------------------------------------------------------------------------------------------

template <class A>
DEVICE A shuffle_xor(A x, u32 lanes) {
  return __shfl_xor_sync(ALL_LANES, x, lanes);
}
DEVICE u8 shuffle_xor(u8 x, u32 lanes) { return (u8)__shfl_xor_sync(ALL_LANES, (u32)x, lanes); }
template <class A>
DEVICE A shuffle(A x, u32 lane) {
  return __shfl_sync(ALL_LANES, x, lane);
}
DEVICE u8 shuffle(u8 x, u32 lane) { return (u8)__shfl_sync(ALL_LANES, (u32)x, lane); }

// Lanes that differ in BIT join; each keeps half of its R values.
template <class F, u32 R, u32 BIT, class A, u32 N>
DEVICE void exchange(A (&v)[N], u32 lane) {
  if constexpr (R > 1) {
    bool upper = lane & BIT;
    UNROLL for (u32 k = 0; k < R / 2; ++k) {
      A keep = upper ? v[k + R / 2] : v[k], give = upper ? v[k] : v[k + R / 2];
      v[k] = F::join(keep, shuffle_xor(give, BIT));
    }
    exchange<F, R / 2, BIT * 2>(v, lane);
  }
}

// Joins eight leaves, with elements in lanes and leaves in registers: afterwards a lane has the joint value of the
// 2^levels neighbours that contain leaf slot_of(lane); levels is at most 3. All lanes call this.
template <class F, class A>
DEVICE A fold_slots(A (&v)[8], u32 lane, u32 levels) {
  exchange<F, 8, 1>(v, lane);
  A x = v[0];
  x = F::join(x, shuffle_xor(x, 8));
  x = F::join(x, shuffle_xor(x, 16));
  if (levels > 0) x = F::join(x, shuffle_xor(x, 4));
  if (levels > 1) x = F::join(x, shuffle_xor(x, 2));
  if (levels > 2) x = F::join(x, shuffle_xor(x, 1));
  return x;
}
// Also the lane below 8 that a slot is in: its bits reversed.
DEVICE u32 slot_of(u32 lane) { return (lane & 1) << 2 | (lane & 2) | (lane & 4) >> 2; }

// ---- Leaves by packs. ------------------------------------------------------------------------------------------------
//
// Eight leaves of equal length are 8 / V packs of V elements in every lane: pack k of lane l is in leaf
// k V + l / (32 / V), where it begins with element V (l % (32 / V)).

template <u32 V>
DEVICE u32 slot_of_pack(u32 k, u32 lane) {
  return k * V + lane / (LANES / V);
}
template <u32 V>
DEVICE u32 start_of_pack(u32 lane) {
  return lane % (LANES / V) * V;
}

template <class F, u32 N, class A>
DEVICE A fold_registers(const A* v) {
  if constexpr (N == 1) return v[0];
  else return F::join(fold_registers<F, N / 2>(v), fold_registers<F, N / 2>(v + N / 2));
}

// Joins eight leaves, whose packs are in v: afterwards a lane has the joint value of the 2^levels neighbours that contain
// a leaf; lane_of_leaf(j) contains leaf j. levels is at most 3. All lanes call this.
template <class F, u32 V, class A>
DEVICE A fold_packs(const A (&v)[8], u32 lane, u32 levels) {
  constexpr u32 PACKS = 8 / V, SIDE = LANES / V;
  A pack[PACKS];
  UNROLL for (u32 k = 0; k < PACKS; ++k) pack[k] = fold_registers<F, V>(v + k * V);
  exchange<F, PACKS, 1>(pack, lane);
  A x = pack[0];
  UNROLL for (u32 bit = PACKS; bit < SIDE; bit *= 2) x = F::join(x, shuffle_xor(x, bit));
  // Neighbouring leaves are in neighbouring groups of lanes, then in packs that were exchanged.
  UNROLL for (u32 level = 0; level < 3; ++level) {
    u32 bit = SIDE << level < LANES ? SIDE << level : (SIDE << level) / LANES;
    if (SIDE << level >= LANES) bit = PACKS / 2 / bit;
    if (level < levels) x = F::join(x, shuffle_xor(x, bit));
  }
  return x;
}
template <u32 V>
DEVICE u32 lane_of_leaf(u32 j) {
  u32 pack = j / V;
  return j % V * (LANES / V) | (V == 2 ? (pack & 1) << 1 | pack >> 1 : pack);
}

// Unfinished nodes of 1, 2, 4, ... leaves in registers: a binary counter.
template <class F, class A, u32 MOST>
struct Pending {
  A node[MOST];
  // Joins leaf g, after leaves 0 to g - 1, with all nodes that it completes. After leaf 2^k - 1, returns the value of
  // the whole.
  DEVICE A push(u32 g, A x) {
    bool open = true;
    UNROLL for (u32 k = 0; k < MOST; ++k) {
      if (!open) continue;
      if (g >> k & 1) {
        x = F::join(node[k], x);
      } else {
        node[k] = x;
        open = false;
      }
    }
    return x;
  }
};

// Folds `term(i)` over a node of 2^(levels + 3) leaves, with levels at most 8; every lane of the warp gets the result.
// Lanes without an element compute the term of another one, so that no load waits behind a branch.
template <class F, class A, class Term>
DEVICE A fold_node(Node node, u32 levels, u32 lane, bool halved, Term term) {
  Pending<F, A, 9> pending;
  A x = F::template pad<A>();
  if (node.len == 0) return x;
  Walk walk(node, levels);
  ROLLED for (u32 g = 0; g < 1u << levels; ++g) {
    A v[8];
    each_slot(walk.next(g), [&](u32 j, u32 at, u32 len) {
      Node e = element_of(halved, len, lane);
      A one = term(at + (e.len ? e.start : 0));
      v[j] = e.len ? one : F::template pad<A>();
    });
    x = pending.push(g, fold_slots<F>(v, lane, 3));
  }
  return x;
}

// The same for terms of one element each, `term(load(i))`: the next eight loads are on their way while eight terms are
// computed. A compiler moves other loads to their uses, and the lane then waits for each.
template <class F, class A, class Load, class Term>
DEVICE A fold_loaded_node(Node node, u32 levels, u32 lane, bool halved, Load load, Term term) {
  Pending<F, A, 9> pending;
  A x = F::template pad<A>();
  if (node.len == 0) return x;
  Walk walk(node, levels);
  decltype(load(0)) next[8];
  u32 there;
  auto fetch = [&](u32 g) {
    there = 0;
    each_slot(walk.next(g), [&](u32 j, u32 at, u32 len) {
      Node e = element_of(halved, len, lane);
      there |= e.len << j;
      next[j] = load(at + (e.len ? e.start : 0));
    });
  };
  fetch(0);
  ROLLED for (u32 g = 0; g < 1u << levels; ++g) {
    decltype(load(0)) now[8];
    UNROLL for (u32 j = 0; j < 8; ++j) now[j] = next[j];
    u32 here = there;
    if (g + 1 < 1u << levels) fetch(g + 1);
    A v[8];
    UNROLL for (u32 j = 0; j < 8; ++j) {
      A one = term(now[j]);
      v[j] = here >> j & 1 ? one : F::template pad<A>();
    }
    x = pending.push(g, fold_slots<F>(v, lane, 3));
  }
  return x;
}

// Folds the terms of a node of 2^(levels + 3) leaves of equal length by packs, as fold_node does. `x` is the row.
template <class F, class A, class T, class Term>
DEVICE A fold_packed_node(const T* x, Node node, u32 levels, u32 lane, Term term) {
  // Units of eight leaves whose loads are on their way at once: 1 KiB per warp.
  constexpr u32 V = PACK_LEN<T>, PACKS = 8 / V, UNITS = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
  u32 leaf = node.len >> (levels + 3), units = 1u << levels, start = start_of_pack<V>(lane);
  bool there = start < leaf;
  x += node.start + slot_of_pack<V>(0, lane) * leaf + (there ? start : 0);
  Pending<F, A, 9> pending;
  A all = F::template pad<A>();
  ROLLED for (u32 g = 0; g < units; g += UNITS) {
    Pack<T, V> packs[UNITS][PACKS];
    UNROLL for (u32 u = 0; u < UNITS; ++u) {
      UNROLL for (u32 k = 0; k < PACKS; ++k) {
        if (g + u < units) packs[u][k] = load_pack<V>(x + ((g + u) * 8 + k * V) * leaf);
      }
    }
    UNROLL for (u32 u = 0; u < UNITS; ++u) {
      if (g + u >= units) continue;
      A v[8];
      UNROLL for (u32 j = 0; j < 8; ++j) {
        A one = term(packs[u][j / V].at[j % V]);
        v[j] = there ? one : F::template pad<A>();
      }
      all = pending.push(g + u, fold_packs<F, V>(v, lane, 3));
    }
  }
  return all;
}

// Folds a run of elements in any order, for folds that give the same value in every order.
template <class F, class A, class T, class Term>
DEVICE A fold_run(const T* x, u32 len, u32 lane, Term term) {
  constexpr u32 V = PACK_LEN<T>;
  A all = F::template pad<A>();
  by_packs<V, 4>(
      x, len, lane, LANES,
      [&](u32 i) {
        Pack<T, V> pack = load_pack<V>(x + i);
        UNROLL for (u32 e = 0; e < V; ++e) all = F::join(all, term(pack.at[e]));
      },
      [&](u32 i) { all = F::join(all, term(x[i])); });
  UNROLL for (u32 bit = 1; bit < LANES; bit *= 2) all = F::join(all, shuffle_xor(all, bit));
  return all;
}

// Joins the values of a team of 2^warps neighbouring warps, in order; every thread of the team gets the result. All
// threads of the block call this with equal `warps`.
template <class F, class A>
DEVICE A fold_team(A x, u32 warps) {
  if (warps == 0) return x;
  SHARED A room[32];
  u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, others = (1u << warps) - 1;
  if (lane == 0) room[warp] = x;
  __syncthreads();
  x = room[(warp & ~others) + (lane & others)];
  ROLLED for (u32 bit = 1; bit <= others; bit *= 2) x = F::join(x, shuffle_xor(x, bit));
  __syncthreads();
  return x;
}
