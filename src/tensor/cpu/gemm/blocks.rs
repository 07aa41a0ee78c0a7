//! The loops around the tiles: over blocks of rows, blocks of the contraction, and panels of columns.
//!
//! Rows are read in place with any strides, since a tile broadcasts their elements one by one. The columns of a tile
//! must be contiguous along a row: a panel of columns that is not is packed once for all rows, and so is any panel if
//! there are many rows. A contraction longer than a block is computed block by block; the finished blocks of all rows
//! and columns are kept on a stack, and joined in the order of the tree.

use super::super::real::{Real, Widen};
use super::super::simd::Isa;
use super::contraction::{Contraction, ContractionBlock};
use super::epilogue::{DirectStore, Epilogue, MAX_TILE_LEN};
use super::matrix::MatRef;
use super::pack::{RowPanels, native, pack_cols, pack_rows, packed_rows_len};
use super::scratch::with_scratch;
use super::tile::{Tile, TileKernels, Tiled};

/// The bytes of a contraction block of one row. A panel of rows of this length fits the second-level cache.
pub(super) const BLOCK_BYTES: usize = 4096;
/// The number of rows that are computed together if widened rows or finished blocks need a buffer.
const BLOCK_ROWS: usize = 768;
/// With fewer rows than this, contiguous columns are read in place: packing would cost more than it saves.
const MIN_ROWS_TO_PACK: usize = 320;

/// The operands of a product, and the tree of its sums.
pub(super) struct GemmOperands<'a, E> {
    pub(super) a: MatRef<'a, E>,
    pub(super) b: MatRef<'a, E>,
    /// The tree over the contraction, in blocks of [`block_len`].
    pub(super) tree: &'a Contraction,
}

/// Returns the largest number of indices in a contraction block.
pub(super) fn block_len<T>() -> usize {
    BLOCK_BYTES / size_of::<T>()
}

/// Computes the product and passes every element to `epilogue`.
///
/// # Safety
/// The result of `epilogue` has the product's shape, and no other code reads or writes it.
pub(super) unsafe fn run<E: Widen<Wide = T>, T: Real + Tiled>(
    operands: &GemmOperands<'_, E>,
    epilogue: &dyn Epilogue<T>,
) {
    let (m, k) = operands.a.shape();
    let n = operands.b.shape().1;
    assert_eq!(operands.b.shape().0, k, "inner extents");
    let kernels = T::kernels(Isa::current());
    let panel_rows = kernels.tiles.len();
    let vectors = n.div_ceil(kernels.lanes);
    let tree = operands.tree;
    let longest = tree.blocks.iter().map(|b| b.len).max().unwrap_or(0);
    let in_parts = tree.blocks.len() > 1;
    let block_rows =
        if !E::NATIVE || in_parts { BLOCK_ROWS.next_multiple_of(panel_rows) } else { usize::MAX };
    let block_rows = block_rows.min(m);
    let width = kernels.tiles[0].len().max(kernels.wide_row.0.div_ceil(panel_rows)) * kernels.lanes;
    let sizes = [
        if !E::NATIVE { packed_rows_len(block_rows, longest, panel_rows) } else { 0 },
        longest * kernels.tiles[0].len() * kernels.lanes,
        panel_rows * width,
        tree.depth * panel_rows * width,
        if in_parts { tree.levels * block_rows * vectors * kernels.lanes } else { 0 },
    ];
    with_scratch::<T, _>(sizes, |[rows, cols, tile, stack, parts]| {
        let mut w = BlockedProduct {
            operands,
            kernels,
            epilogue,
            cols,
            tile,
            stack,
            parts,
            row: 0,
            rows: 0,
            vectors,
        };
        for row in (0..m).step_by(block_rows) {
            (w.row, w.rows) = (row, block_rows.min(m - row));
            let mut level = 0;
            for block in &tree.blocks {
                // SAFETY: the caller's promise.
                unsafe { w.block(block, level, rows) };
                level = w.join_parts(block, level);
            }
            if in_parts {
                // SAFETY: the caller's promise.
                unsafe { w.store_parts() };
            }
        }
    });
}

/// A product in progress, with its buffers.
struct BlockedProduct<'a, E, T: 'static> {
    operands: &'a GemmOperands<'a, E>,
    kernels: &'static TileKernels<T>,
    epilogue: &'a dyn Epilogue<T>,
    /// The buffer for a panel of columns.
    cols: &'a mut [T],
    /// The buffer for a tile.
    tile: &'a mut [T],
    /// The buffer for a tile's finished nodes.
    stack: &'a mut [T],
    /// The stack of finished contraction blocks of the current rows, which are not joined yet.
    parts: &'a mut [T],
    /// The first of the current rows.
    row: usize,
    /// The number of current rows.
    rows: usize,
    /// The number of vectors in a row of the result.
    vectors: usize,
}

/// A panel of columns in the form that tiles read.
struct ColumnPanel<T> {
    col: usize,
    vectors: usize,
    data: *const T,
    step: usize,
}

impl<E: Widen<Wide = T>, T: Real + Tiled> BlockedProduct<'_, E, T> {
    /// Computes one block of the contraction.
    ///
    /// # Safety
    /// The conditions of [`run`] hold.
    unsafe fn block(&mut self, block: &ContractionBlock, level: usize, row_buffer: &mut [T]) {
        let a = self.operands.a.rows(self.row, self.rows).cols(block.start, block.len);
        let b = self.operands.b.rows(block.start, block.len);
        let panel_rows = self.kernels.tiles.len();
        let rows = match native(a) {
            Some(a) => {
                let steps = a.strides();
                // The step of a single row can be any number.
                RowPanels { data: a.data().as_ptr(), panel_step: panel_rows.wrapping_mul(steps.0), steps }
            }
            None => pack_rows(a, panel_rows, row_buffer),
        };
        let most = self.kernels.tiles[0].len();
        let wide = if self.operands.a.shape().0 == 1 && b.strides().1 == 1 && E::NATIVE {
            self.kernels.wide_row.0
        } else {
            0
        };
        let mut vector = 0;
        while vector < self.vectors {
            let left = self.vectors - vector;
            let col = vector * self.kernels.lanes;
            let vectors = if wide > 0 && col + wide * self.kernels.lanes <= b.shape().1 {
                wide
            } else {
                // Splits the remaining vectors as evenly as possible.
                left.div_ceil(left.div_ceil(most))
            };
            let panel = self.panel(b, col, vectors);
            // SAFETY: the caller's promise.
            unsafe { self.tiles(block, level, &rows, &panel) };
            vector += vectors;
        }
    }

    /// Returns `vectors` vectors of columns from `col` on: in place if tiles can read them and packing is not worth it,
    /// else packed.
    fn panel(&mut self, b: MatRef<'_, E>, col: usize, vectors: usize) -> ColumnPanel<T> {
        let width = vectors * self.kernels.lanes;
        let whole = col + width <= b.shape().1;
        let b = b.cols(col, width.min(b.shape().1 - col));
        if let Some(b) = native(b)
            && whole
            && b.strides().1 == 1
            && (self.rows < MIN_ROWS_TO_PACK || b.strides().0 == width)
        {
            return ColumnPanel { col, vectors, data: b.data().as_ptr(), step: b.strides().0 };
        }
        pack_cols(b, width, self.kernels.transpose, self.cols);
        ColumnPanel { col, vectors, data: self.cols.as_ptr(), step: width }
    }

    /// Computes all tiles of a panel.
    ///
    /// # Safety
    /// The conditions of [`run`] hold.
    unsafe fn tiles(
        &mut self,
        block: &ContractionBlock,
        level: usize,
        rows: &RowPanels<T>,
        panel: &ColumnPanel<T>,
    ) {
        let panel_rows = self.kernels.tiles.len();
        let (width, n) = (panel.vectors * self.kernels.lanes, self.operands.b.shape().1);
        let (target, via_epilogue) = self.target(block, level, panel);
        let mut tile = Tile {
            a: rows.data,
            a_steps: rows.steps,
            b: panel.data,
            b_step: panel.step,
            leaves: &self.operands.tree.leaves[block.leaves.clone()],
            stack: self.stack.as_mut_ptr(),
            c: target.c,
            c_step: target.step,
            alpha: target.alpha,
            beta: target.beta,
        };
        for first in (0..self.rows).step_by(panel_rows) {
            let count = panel_rows.min(self.rows - first);
            let kernel = match self.kernels.tiles[count - 1].get(panel.vectors - 1) {
                Some(&kernel) => kernel,
                None => self.kernels.wide_row.1,
            };
            // SAFETY: the operands cover the tile and the block; the result is the epilogue's, a finished block or the
            // tile's buffer; the stack has room for the tree's depth; this CPU has the kernel's instruction set.
            unsafe { kernel(&tile) };
            tile.a = tile.a.wrapping_add(rows.panel_step);
            if via_epilogue {
                let shape = (count, width.min(n - panel.col));
                // SAFETY: the tile is inside the result.
                unsafe { self.epilogue.put((self.row + first, panel.col), shape, self.tile, width) };
            } else {
                tile.c = tile.c.wrapping_add(panel_rows.wrapping_mul(target.step));
            }
        }
    }

    /// Returns the destination of a panel's first tile, and true if the epilogue stores the tile from there.
    fn target(
        &mut self,
        block: &ContractionBlock,
        level: usize,
        panel: &ColumnPanel<T>,
    ) -> (DirectStore<T>, bool) {
        let width = panel.vectors * self.kernels.lanes;
        if self.operands.tree.blocks.len() > 1 {
            // If the next step joins the block with the one on its left, it is added to that one directly.
            let step = self.vectors * self.kernels.lanes;
            let joins = block.merges > 0;
            let at = (level - usize::from(joins)) * self.rows * step + panel.col;
            let c = self.parts[at..].as_mut_ptr();
            return (DirectStore { c, step, alpha: T::ONE, beta: joins.then_some(T::ONE) }, false);
        }
        match self.epilogue.direct() {
            Some(d) if panel.col + width <= self.operands.b.shape().1 => {
                (DirectStore { c: d.c.wrapping_add(self.row * d.step + panel.col), ..d }, false)
            }
            _ => (DirectStore { c: self.tile.as_mut_ptr(), step: width, alpha: T::ONE, beta: None }, true),
        }
    }

    /// Passes the joined blocks to the epilogue, in pieces of at most a tile.
    ///
    /// # Safety
    /// The conditions of [`run`] hold.
    unsafe fn store_parts(&mut self) {
        let (n, step) = (self.operands.b.shape().1, self.vectors * self.kernels.lanes);
        for row in 0..self.rows {
            for col in (0..n).step_by(MAX_TILE_LEN) {
                let cols = MAX_TILE_LEN.min(n - col);
                let values = &mut self.parts[row * step + col..][..cols];
                // SAFETY: the piece is inside the result.
                unsafe { self.epilogue.put((self.row + row, col), (1, cols), values, cols) };
            }
        }
    }

    /// Does the joins after a block, except for the first one, which its tiles have done. Returns the next free level
    /// of the stack.
    fn join_parts(&mut self, block: &ContractionBlock, level: usize) -> usize {
        let part = self.rows * self.vectors * self.kernels.lanes;
        let mut top = level + 1 - usize::from(block.merges > 0);
        for _ in 1..block.merges {
            let (left, right) = self.parts[(top - 2) * part..top * part].split_at_mut(part);
            left.iter_mut().zip(right).for_each(|(l, r)| *l = *l + *r);
            top -= 1;
        }
        top
    }
}
