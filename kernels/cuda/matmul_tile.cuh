// Tiles of a product: the summation tree is folded inside the tile loop.
//
// An element is the sum over a tree of leaves of at most 32 indices. A leaf is one ascending chain of fused
// multiply-adds that starts with a product; a node is its left half plus its right half. The accumulators of a leaf
// stay in registers. A finished left half waits in the slot of its depth in the tree, and each depth has at most one.
// The deepest slots, which are used most often, are in shared memory, the others in global memory. The host passes
// the tree as a list of leaves.
#pragma once
#include "matmul_panel.cuh"

// The arguments of a launch.
struct GemmJob {
  PanelOperand left, right;
  // The result's strides in elements: of rows, columns, products and parts.
  i64 c_row, c_col, c_batch, c_part;
  // The numbers of tiles down and across, of products, of parts of the contraction, and the product of these.
  u32 rows_tiles, cols_tiles, batch, parts, items;
  // The depth of the parts' nodes in the tree, and of the deepest leaf.
  u32 part_depth, deepest;
  // The slots in shared memory, and those in global memory, which follow.
  u32 shared_slots, global_slots;
  // 1 if the columns of a row are contiguous and aligned for whole vectors.
  u32 whole_vectors;
};

// A leaf of the tree, from its lowest byte: its number of indices, the joins that follow it, and its depth.
struct Leaf {
  u32 word;
  DEVICE u32 len() const { return word & 0xff; }
  DEVICE u32 merges() const { return word >> 8 & 0xff; }
  DEVICE u32 depth() const { return word >> 16; }
};

// A part of the contraction: its leaves and its first index.
struct Part {
  u32 first, end;
  i64 start;
};

// Stores a whole vector at once. A plain store of a vector becomes stores of its elements, which the compiler shares
// with the path for results that are not contiguous.
template <class E, u32 N>
DEVICE void store_whole(E* to, const Vec<E, N>& v) {
#ifndef ISO_SHIM
  const u32* x = (const u32*)&v;
  if constexpr (sizeof(v) == 16) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};"
                 :
                 : "l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
    return;
  } else if constexpr (sizeof(v) == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1,%2};" : : "l"(to), "r"(x[0]), "r"(x[1]) : "memory");
    return;
  }
#endif
  *(Vec<E, N>*)to = v;
}

// ROWS x COLS elements per block, TM x TN per thread. A warp is LM threads down and 32 / LM across; WM warps are
// below one another.
template <class T, u32 ROWS, u32 COLS, u32 DEPTH, u32 TM, u32 TN, u32 LM, u32 WM>
struct Tile {
  typedef Wide<T> W;
  typedef Panel<T, ROWS, DEPTH> Left;
  typedef Panel<T, COLS, DEPTH> Right;
  static constexpr u32 LN = 32 / LM, FULL = 16 / sizeof(W);
  // The elements of a vector, down, across and in slots; and the distance between two vectors of a thread, down and
  // across.
  static constexpr u32 VM = TM < FULL ? TM : FULL, VN = TN < FULL ? TN : FULL, VS = TM * TN < FULL ? 1 : FULL;
  static constexpr u32 NEXT_M = LM * VM, NEXT_N = LN * VN;
  // The elements of both panels.
  static constexpr u32 STAGE = DEPTH * (Left::PITCH + Right::PITCH);
  static constexpr u32 SLOT = TM * TN * THREADS;
  static_assert(WM * LM * TM == ROWS && THREADS / 32 / WM * LN * TN == COLS, "the threads cover the tile");

  W acc[TM][TN];
  u32 row, col;  // this thread's first element in the tile

  // Neighbouring lanes are arranged in a zigzag, so that half a warp reads at most 128 different bytes of either
  // panel.
  DEVICE void place() {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 slow = lane % 2 + lane / 16 * 2, quick = lane / 2 % 8;
    u32 down = LM == 1 ? 0 : LM == 8 ? quick : slow, across = LM == 1 ? lane : LM == 8 ? slow : quick;
    row = warp % WM * (LM * TM) + down * VM;
    col = warp / WM * (LN * TN) + across * VN;
  }

  // Adds N indices of the contraction, which are the first ones of a leaf.
  template <u32 N, bool FIRST>
  DEVICE void steps(const W* left, const W* right) {
    UNROLL
    for (u32 k = 0; k < N; ++k) {
      W x[TM], y[TN];
      UNROLL
      for (u32 i = 0; i < TM; i += VM) {
        Vec<W, VM> v = *(const Vec<W, VM>*)(left + k * Left::PITCH + i / VM * NEXT_M);
        UNROLL
        for (u32 e = 0; e < VM; ++e) x[i + e] = v.x[e];
      }
      UNROLL
      for (u32 j = 0; j < TN; j += VN) {
        Vec<W, VN> v = *(const Vec<W, VN>*)(right + k * Right::PITCH + j / VN * NEXT_N);
        UNROLL
        for (u32 e = 0; e < VN; ++e) y[j + e] = v.x[e];
      }
      UNROLL
      for (u32 i = 0; i < TM; ++i) {
        UNROLL
        for (u32 j = 0; j < TN; ++j) {
          acc[i][j] = FIRST && k == 0 ? x[i] * y[j] : multiply_add(x[i], y[j], acc[i][j]);
        }
      }
    }
  }

  static DEVICE f32 multiply_add(f32 x, f32 y, f32 z) { return fmaf(x, y, z); }
  static DEVICE f64 multiply_add(f64 x, f64 y, f64 z) { return fma(x, y, z); }

  // Adds `len` indices of the contraction; `fresh` at the beginning of a leaf.
  DEVICE void stage(const W* panels, u32 len, bool fresh) {
    const W* left = panels + row;
    const W* right = panels + DEPTH * Left::PITCH + col;
    u32 k = 0;
    if (fresh && len >= 4) {
      steps<4, true>(left, right);
      k = 4;
    } else if (fresh) {
      steps<1, true>(left, right);
      k = 1;
    }
    for (; k + 4 <= len; k += 4) steps<4, false>(left + k * Left::PITCH, right + k * Right::PITCH);
    for (; k < len; ++k) steps<1, false>(left + k * Left::PITCH, right + k * Right::PITCH);
  }

  DEVICE void push(W* slot) const {
    UNROLL
    for (u32 q = 0; q < TM * TN; q += VS) {
      Vec<W, VS> v;
      UNROLL
      for (u32 e = 0; e < VS; ++e) v.x[e] = acc[(q + e) / TN][(q + e) % TN];
      *(Vec<W, VS>*)(slot + (q / VS * THREADS + threadIdx.x) * VS) = v;
    }
  }

  DEVICE void join(const W* slot) {
    UNROLL
    for (u32 q = 0; q < TM * TN; q += VS) {
      Vec<W, VS> v = *(const Vec<W, VS>*)(slot + (q / VS * THREADS + threadIdx.x) * VS);
      UNROLL
      for (u32 e = 0; e < VS; ++e) {
        W& right = acc[(q + e) / TN][(q + e) % TN];
        right = v.x[e] + right;
      }
    }
  }

  // Ends a leaf: joins the completed nodes, and stores the sum in its slot unless it is the part's last.
  DEVICE void fold(Leaf leaf, bool last, const GemmJob& job, W* near, W* far) {
    u32 depth = leaf.depth(), top = last ? job.part_depth : depth - leaf.merges();
    for (; depth > top; --depth) {
      u32 slot = job.deepest - depth;
      if (slot < job.shared_slots) {
        join(near + slot * SLOT);
      } else {
        join(far + (slot - job.shared_slots) * SLOT);
      }
    }
    if (last) return;
    u32 slot = job.deepest - depth;
    if (slot < job.shared_slots) {
      push(near + slot * SLOT);
    } else {
      push(far + (slot - job.shared_slots) * SLOT);
    }
  }

  template <class E>
  DEVICE void write(E* c, const GemmJob& job, u32 rows, u32 cols) const {
    UNROLL
    for (u32 i = 0; i < TM; ++i) {
      u32 down = row + i / VM * NEXT_M + i % VM;
      if (down >= rows) continue;
      UNROLL
      for (u32 j = 0; j < TN; j += VN) {
        u32 across = col + j / VN * NEXT_N;
        E* to = c + down * job.c_row + across * job.c_col;
        if (job.whole_vectors && VN > 1) {
          Vec<E, VN> v;
          UNROLL
          for (u32 e = 0; e < VN; ++e) v.x[e] = narrow<E>(acc[i][j + e]);
          if (across < cols) store_whole(to, v);
          continue;
        }
        UNROLL
        for (u32 e = 0; e < VN; ++e) {
          if (across + e < cols) to[e * job.c_col] = narrow<E>(acc[i][j + e]);
        }
      }
    }
  }

  // Sums one part of the tree over one tile.
  DEVICE void sum(Left& left, Right& right, const Leaf* leaves, Part part, const GemmJob& job, W* shared, W* far) {
    W* near = shared + 2 * STAGE;
    u32 at = part.first, buffer = 0;
    Leaf leaf = leaves[at];
    u32 rest = leaf.len(), len = min(rest, DEPTH);
    bool fresh = true;
    fetch(left, right, len);
    for (;;) {
      W* panels = shared + buffer * STAGE;
      left.store(panels);
      right.store(panels + DEPTH * Left::PITCH);
      __syncthreads();
      // The next stage is being loaded while this one is computed.
      Leaf now = leaf;
      u32 now_len = len;
      bool ends = rest == len, last = ends && at + 1 == part.end;
      if (!last) {
        if (ends) leaf = leaves[++at];
        rest = ends ? leaf.len() : rest - len;
        len = min(rest, DEPTH);
        fetch(left, right, len);
      }
      stage(panels, now_len, fresh);
      fresh = ends;
      if (ends) fold(now, last, job, near, far);
      if (last) return;
      buffer ^= 1;
    }
  }

  static DEVICE void fetch(Left& left, Right& right, u32 len) {
    left.load(len);
    right.load(len);
  }
};

// The tile's rows and columns. Tiles are numbered in bands of a few rows, so that blocks that run at once share
// operands.
DEVICE void tile_at(const GemmJob& job, u32 tile, u32& row, u32& col) {
  constexpr u32 BAND = 8;
  u32 band = tile / (BAND * job.cols_tiles), first = band * BAND, height = min(BAND, job.rows_tiles - first);
  u32 inside = tile - first * job.cols_tiles;
  row = first + inside % height;
  col = inside / height;
}

// Loops over all tiles of all parts of all products. `c` takes the sums, or `parts` if the contraction has several
// parts.
template <class T, u32 ROWS, u32 COLS, u32 DEPTH, u32 TM, u32 TN, u32 LM, u32 WM>
DEVICE void multiply(const T* a, const T* b, T* c, Wide<T>* sums, Wide<T>* far, const Leaf* leaves, const Part* parts,
                     const GemmJob& job) {
  typedef Tile<T, ROWS, COLS, DEPTH, TM, TN, LM, WM> Mine;
  DYNAMIC_SHARED(shared);
  Mine tile;
  tile.place();
  far += (u64)blockIdx.x * job.global_slots * Mine::SLOT;
  for (u32 item = blockIdx.x; item < job.items; item += gridDim.x) {
    u32 tiles = job.rows_tiles * job.cols_tiles, product = item / tiles, row, col;
    tile_at(job, item % tiles, row, col);
    i64 batch = product % job.batch;
    u32 index = product / job.batch;
    Part part = parts[index];
    typename Mine::Left left;
    typename Mine::Right right;
    u32 rows = job.left.extent - row * ROWS, cols = job.right.extent - col * COLS;
    i64 to = batch * job.c_batch + index * job.c_part + (i64)row * ROWS * job.c_row + (i64)col * COLS * job.c_col;
    left.begin(a + batch * job.left.batch, job.left, row * ROWS, part.start);
    right.begin(b + batch * job.right.batch, job.right, col * COLS, part.start);
    __syncthreads();  // all threads are done with the tile before
    tile.sum(left, right, leaves, part, job, (Wide<T>*)shared, far);
    if (job.parts > 1) {
      tile.write(sums + to, job, rows, cols);
    } else {
      tile.write(c + to, job, rows, cols);
    }
  }
}
