//! The loops around the tiles: over blocks of columns, of rows and of the contraction, and over panels of columns.
//!
//! [`Blocking`] chooses the blocks' sizes. Rows may be read in place with any strides, since a tile broadcasts their
//! elements one by one; if many columns use them, a block of them is packed first. The columns of a tile must be
//! contiguous along a row: a panel of columns that is not is packed, and so is any panel that many rows use. If a tile can
//! read its columns in place, the first one packs them for the others.
//!
//! A contraction longer than a block is computed block by block. Each tile has a stack of its finished blocks in
//! memory, and joins them in the order of the tree while it has the newest one in registers.

use std::cell::Cell;
use std::ptr::null_mut;

use super::blocking::{Blocking, MIN_ROWS_TO_PACK, tile_rows};
use super::pack::{RowPanels, native, pack_cols, pack_rows, packed_rows_len};
use super::scratch::with_scratch;
use crate::gemm::contraction::{Contraction, ContractionBlock};
use crate::gemm::epilogue::{DirectStore, Epilogue};
use crate::gemm::matrix::MatRef;
use crate::gemm::tiles::prefetch::Ahead;
use crate::gemm::tiles::stored::Stored;
use crate::gemm::tiles::tile::{Tile, TileKernels, Tiled};
use crate::isa::simd::Isa;
use crate::num::real::Real;

/// A panel with fewer bytes is not prefetched.
const MIN_BYTES_AHEAD: usize = 8192;

/// The operands of a product, and the tree of its sums.
pub(in crate::gemm) struct GemmOperands<'a, E> {
    pub(in crate::gemm) a: MatRef<'a, E>,
    pub(in crate::gemm) b: MatRef<'a, E>,
    /// The tree over the contraction, in blocks of at most [`block_len`](super::blocking::block_len).
    pub(in crate::gemm) tree: &'a Contraction,
}

/// Computes the product and passes every element to `epilogue`.
///
/// # Safety
/// The result of `epilogue` has the product's shape, and no other code reads or writes it.
pub(in crate::gemm) unsafe fn run<E: Stored<Wide = T>, T: Real + Tiled>(
    operands: &GemmOperands<'_, E>,
    epilogue: &dyn Epilogue<T>,
) {
    let (m, k) = operands.a.shape();
    let n = operands.b.shape().1;
    assert_eq!(operands.b.shape().0, k, "inner extents");
    let kernels = T::kernels(Isa::current());
    let (panel_rows, most) = (kernels.tiles.len(), kernels.tiles[0].len());
    let tree = operands.tree;
    let blocking = Blocking::new(operands.a, operands.b, tree, kernels);
    let vectors = n.div_ceil(kernels.lanes);
    let levels = if tree.blocks.len() > 1 { tree.levels } else { 0 };
    let wide = kernels.wide_row.map_or(0, |(vectors, _)| vectors.div_ceil(panel_rows));
    let width = most.max(wide) * kernels.lanes;
    let block_width = blocking.vectors.min(vectors) * kernels.lanes;
    let sizes = [
        if blocking.packs_rows { packed_rows_len(blocking.rows, tree.longest, panel_rows) } else { 0 },
        if blocking.keeps_cols { k.saturating_mul(block_width) } else { tree.longest * most * kernels.lanes },
        panel_rows * width,
        tree.depth * panel_rows * width,
        levels.saturating_mul(blocking.rows).saturating_mul(block_width),
    ];
    with_scratch::<T, _>(sizes, |[packed_rows, cols, tile, stack, parts]| {
        let mut w = BlockedProduct {
            operands,
            kernels,
            epilogue,
            blocking,
            cols,
            tile,
            stack,
            parts,
            levels,
            rows: (0, 0),
            vectors: (0, 0),
        };
        for vector in (0..vectors).step_by(blocking.vectors) {
            w.vectors = (vector, blocking.vectors.min(vectors - vector));
            for row in (0..m).step_by(blocking.rows) {
                w.rows = (row, blocking.rows.min(m - row));
                let mut level = 0;
                for (i, block) in tree.blocks.iter().enumerate() {
                    let next = match tree.blocks.get(i + 1) {
                        Some(next) => Some((next, row)),
                        None if row + blocking.rows < m => Some((&tree.blocks[0], row + blocking.rows)),
                        None => None,
                    };
                    let at = BlockPlace { block, level, last: i + 1 == tree.blocks.len(), next };
                    // SAFETY: the caller's promise.
                    unsafe { w.block(&at, packed_rows) };
                    level = level + 1 - block.merges as usize;
                }
            }
        }
    });
}

/// A block of the contraction, and its place on the tiles' stacks of finished blocks.
struct BlockPlace<'a> {
    block: &'a ContractionBlock,
    /// The number of finished blocks before it that are not joined yet.
    level: usize,
    /// True for the last block, whose joins give the whole sum.
    last: bool,
    /// The block that is computed next with the same columns, and its first row.
    next: Option<(&'a ContractionBlock, usize)>,
}

/// A product in progress, with its buffers.
struct BlockedProduct<'a, E, T: 'static> {
    operands: &'a GemmOperands<'a, E>,
    kernels: &'static TileKernels<T>,
    epilogue: &'a dyn Epilogue<T>,
    blocking: Blocking,
    /// The buffer for a panel of columns, or for all current columns if they are kept.
    cols: &'a mut [T],
    /// The buffer for a tile.
    tile: &'a mut [T],
    /// The buffer for a tile's finished nodes.
    stack: &'a mut [T],
    /// The finished blocks of the current rows and columns, which are not joined yet: a stack per tile.
    parts: &'a mut [T],
    /// The room of such a stack, in blocks.
    levels: usize,
    /// The first of the current rows, and their number.
    rows: (usize, usize),
    /// The first of the current vectors of columns, and their number.
    vectors: (usize, usize),
}

/// A panel of columns in the form that tiles read.
struct ColumnPanel<T> {
    col: usize,
    vectors: usize,
    data: *const T,
    step: usize,
    /// The place to which the first tile packs the panel, and where the others read it; or null.
    packed: *mut T,
}

impl<E: Stored<Wide = T>, T: Real + Tiled> BlockedProduct<'_, E, T> {
    /// Computes one block of the contraction. The buffer has room for packed rows, if they are packed.
    ///
    /// # Safety
    /// The conditions of [`run`] hold.
    unsafe fn block(&mut self, at: &BlockPlace<'_>, row_buffer: &mut [T]) {
        let block = at.block;
        let a = self.operands.a.rows(self.rows.0, self.rows.1).cols(block.start, block.len);
        let b = self.operands.b.rows(block.start, block.len);
        let panel_rows = self.kernels.tiles.len();
        let rows = match native(a) {
            Some(a) if !self.blocking.packs_rows => {
                let steps = a.strides();
                // The step of a single row can be any number.
                RowPanels { data: a.data().as_ptr(), panel_step: panel_rows.wrapping_mul(steps.0), steps }
            }
            _ => pack_rows(a, panel_rows, self.kernels.interleave, row_buffer),
        };
        let (mut vector, end) = (self.vectors.0, self.vectors.0 + self.vectors.1);
        while vector < end {
            let vectors = self.panel_vectors(b, vector, end);
            let panel = self.panel(block, b, vector * self.kernels.lanes, vectors);
            vector += vectors;
            let (following, first) =
                if vector < end { (Some((block, self.rows.0)), vector) } else { (at.next, self.vectors.0) };
            let ahead = following.map_or(Ahead::NOTHING, |(next, row)| {
                self.ahead(next, row, (first, end), block.leaves.len())
            });
            // SAFETY: the caller's promise.
            unsafe { self.tiles(at, &rows, &panel, ahead) };
        }
    }

    /// Returns the number of vectors in the panel that begins with `vector`, of those before `end`.
    fn panel_vectors(&self, b: MatRef<'_, E>, vector: usize, end: usize) -> usize {
        let left = end - vector;
        let in_place = self.operands.a.shape().0 == 1 && b.strides().1 == 1 && E::NATIVE;
        if let Some((wide, _)) = self.kernels.wide_row
            && in_place
            && left >= wide
            && (vector + wide) * self.kernels.lanes <= b.shape().1
        {
            return wide;
        }
        self.kernels.panel_vectors(left, false)
    }

    /// Returns `vectors` vectors of columns from `col` on: in place if tiles can read them, with room to pack them if it
    /// is worth it, else packed.
    fn panel(
        &mut self,
        block: &ContractionBlock,
        b: MatRef<'_, E>,
        col: usize,
        vectors: usize,
    ) -> ColumnPanel<T> {
        let width = vectors * self.kernels.lanes;
        let whole = col + width <= b.shape().1;
        let b = b.cols(col, width.min(b.shape().1 - col));
        let in_place = native(b).filter(|b| whole && b.strides().1 == 1);
        if let Some(b) = in_place
            && (!self.blocking.packs_cols || b.strides().0 == width)
        {
            return ColumnPanel {
                col,
                vectors,
                data: b.data().as_ptr(),
                step: b.strides().0,
                packed: null_mut(),
            };
        }
        let at = self.kept_at(block, col);
        let cols = &mut self.cols[at..][..block.len * width];
        if !self.blocking.keeps_cols || self.rows.0 == 0 {
            // The first of more than two tiles has all rows of a tile, as packing tiles have.
            if let Some(b) = in_place
                && self.kernels.packs
                && self.rows.1 > self.kernels.tiles.len() * 2
            {
                let (data, step) = (b.data().as_ptr(), b.strides().0);
                return ColumnPanel { col, vectors, data, step, packed: cols.as_mut_ptr() };
            }
            pack_cols(b, width, self.kernels.transpose, cols);
        }
        ColumnPanel { col, vectors, data: cols.as_ptr(), step: width, packed: null_mut() }
    }

    /// Returns the place of a panel in the buffer for columns.
    fn kept_at(&self, block: &ContractionBlock, col: usize) -> usize {
        if !self.blocking.keeps_cols {
            return 0;
        }
        let (first, count) = (self.vectors.0 * self.kernels.lanes, self.vectors.1 * self.kernels.lanes);
        block.start * count + block.len * (col - first)
    }

    /// Returns the memory that the panel of `block` from vector `first` on will be read from, for the rows from `row` on, if it is
    /// worth prefetching while tiles of so many leaves are computed.
    fn ahead(
        &self,
        block: &ContractionBlock,
        row: usize,
        (first, end): (usize, usize),
        leaves: usize,
    ) -> Ahead {
        let lanes = self.kernels.lanes;
        let most = block.len * self.kernels.tiles[0].len() * lanes * size_of::<T>();
        if !self.blocking.packs_cols || self.rows.1 < MIN_ROWS_TO_PACK || most < MIN_BYTES_AHEAD {
            return Ahead::NOTHING;
        }
        let b = self.operands.b.rows(block.start, block.len);
        let (col, width) = (first * lanes, self.panel_vectors(b, first, end) * lanes);
        let calls = self.rows.1.div_ceil(self.kernels.tiles.len()) * leaves;
        if self.blocking.keeps_cols && row > 0 {
            let packed = self.cols[self.kept_at(block, col)..].as_ptr();
            return Ahead::new(packed, 1, 0, block.len * width, calls);
        }
        let b = b.cols(col, width.min(b.shape().1 - col));
        let ((k, n), data) = (b.shape(), b.data().as_ptr());
        match b.strides() {
            (step, 1) => Ahead::new(data, k, step, n, calls),
            (1, step) => Ahead::new(data, n, step, k, calls),
            _ => Ahead::NOTHING,
        }
    }

    /// Computes all tiles of a panel.
    ///
    /// # Safety
    /// The conditions of [`run`] hold.
    unsafe fn tiles(
        &mut self,
        at: &BlockPlace<'_>,
        rows: &RowPanels<T>,
        panel: &ColumnPanel<T>,
        ahead: Ahead,
    ) {
        let panel_rows = self.kernels.tiles.len();
        let (width, n) = (panel.vectors * self.kernels.lanes, self.operands.b.shape().1);
        let (target, via_epilogue) = self.target(panel);
        let packed = self.blocking.packs_rows;
        let tiles = self.kernels.tiles;
        let before = (panel.col - self.vectors.0 * self.kernels.lanes) * self.blocking.rows;
        let mut parts = self.parts[self.levels * before..].as_mut_ptr();
        let mut tile = Tile {
            a: rows.data,
            a_steps: rows.steps,
            b: panel.data,
            b_step: panel.step,
            packed_b: panel.packed,
            leaves: &self.operands.tree.leaves[at.block.leaves.clone()],
            stack: self.stack.as_mut_ptr(),
            parts,
            ahead: Cell::new(ahead),
            // The first panel brings the rows to the second cache.
            next_rows_ahead: !packed
                && rows.steps.1 == 1
                && self.rows.1 > panel_rows
                && panel.col == self.vectors.0 * self.kernels.lanes,
            joins: at.block.merges,
            keep: !at.last,
            c: target.c,
            c_step: target.step,
            alpha: target.alpha,
            added: target.added,
        };
        let mut row = 0;
        while row < self.rows.1 {
            let left = self.rows.1 - row;
            // A tile of packed rows is inside a panel.
            let count = if packed && left >= panel_rows { panel_rows } else { tile_rows(left, tiles) };
            let kernel = match (tiles[count - 1].get(panel.vectors - 1), self.kernels.wide_row) {
                (Some(&kernel), _) | (None, Some((_, kernel))) => kernel,
                (None, None) => unreachable!("a panel has as many vectors as tiles or the wide row"),
            };
            tile.parts = parts.wrapping_add(at.level * count * width);
            if via_epilogue {
                // The epilogue has borrowed the buffer since the last tile.
                tile.c = self.tile.as_mut_ptr();
            }
            // SAFETY: the operands cover the tile and the block; the result is the epilogue's or the tile's buffer; the
            // stacks have room for the tree's depth and levels; this CPU has the kernel's instruction set.
            unsafe { kernel(&tile) };
            if !panel.packed.is_null() {
                (tile.b, tile.b_step, tile.packed_b) = (panel.packed, width, null_mut());
            }
            let first = row;
            row += count;
            tile.a = rows.row(row, panel_rows);
            parts = parts.wrapping_add(self.levels * count * width);
            if via_epilogue && at.last {
                let shape = (count, width.min(n - panel.col));
                // SAFETY: the tile is inside the result.
                unsafe { self.epilogue.put((self.rows.0 + first, panel.col), shape, self.tile, width) };
            } else if !via_epilogue {
                let next = target.at(row, 0);
                (tile.c, tile.added) = (next.c, next.added);
            }
        }
    }

    /// Returns the destination of a panel's first tile, and true if the epilogue stores the tile from there.
    fn target(&mut self, panel: &ColumnPanel<T>) -> (DirectStore<T>, bool) {
        let width = panel.vectors * self.kernels.lanes;
        match self.epilogue.direct() {
            Some(d) if panel.col + width <= self.operands.b.shape().1 => {
                (d.at(self.rows.0, panel.col), false)
            }
            _ => (DirectStore { c: self.tile.as_mut_ptr(), step: width, alpha: T::ONE, added: None }, true),
        }
    }
}
