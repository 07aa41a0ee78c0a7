//! The loops around the tiles: blocks of rows, blocks of the contraction, panels of columns.
//!
//! Rows are read in place, whatever their strides: a tile broadcasts their elements one by one. Columns have to lie
//! side by side; a panel of them is packed once for all rows where they do not, or where there are many rows.
//! A contraction longer than a block is evaluated block by block; the finished blocks of all rows and columns lie on
//! a stack of their own, and are joined as the tree says.

use super::super::real::{Real, Widen};
use super::super::simd::Isa;
use super::contraction::{Contraction, ContractionBlock};
use super::epilogue::{DirectStore, Epilogue, MAX_TILE_LEN};
use super::matrix::MatRef;
use super::pack::{RowPanels, native, pack_cols, pack_rows, packed_rows_len};
use super::scratch::with_scratch;
use super::tile::{Tile, TileKernels, Tiled};

/// Bytes along the contraction that are handled together: a panel of so many rows stays in the second cache.
pub(super) const BLOCK_BYTES: usize = 4096;
/// Rows that are handled together where widened rows or unfinished blocks take memory.
const BLOCK_ROWS: usize = 768;
/// Fewer rows than this read columns where they lie, if these lie side by side: packing would cost more than it saves.
const MIN_ROWS_TO_PACK: usize = 320;

/// A product to be computed.
pub(super) struct GemmOperands<'a, E> {
    pub(super) a: MatRef<'a, E>,
    pub(super) b: MatRef<'a, E>,
    /// The tree over the contraction, in blocks of [`block_len`].
    pub(super) tree: &'a Contraction,
}

/// The contraction's indices that are handled together.
pub(super) fn block_len<T>() -> usize {
    BLOCK_BYTES / size_of::<T>()
}

/// Computes the product and hands every element to `epilogue`.
///
/// # Safety
/// `epilogue`'s result has the product's shape, and nobody else reads or writes it.
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

struct BlockedProduct<'a, E, T: 'static> {
    operands: &'a GemmOperands<'a, E>,
    kernels: &'static TileKernels<T>,
    epilogue: &'a dyn Epilogue<T>,
    /// Room for a panel of columns.
    cols: &'a mut [T],
    /// Room for a tile.
    tile: &'a mut [T],
    stack: &'a mut [T],
    /// Blocks of rows of the result, unfinished, one after the other.
    parts: &'a mut [T],
    /// The rows at work.
    row: usize,
    rows: usize,
    /// Vectors in a row of the result.
    vectors: usize,
}

/// Some columns as tiles read them.
struct ColumnPanel<T> {
    col: usize,
    vectors: usize,
    data: *const T,
    step: usize,
}

impl<E: Widen<Wide = T>, T: Real + Tiled> BlockedProduct<'_, E, T> {
    /// One block of the contraction.
    ///
    /// # Safety
    /// As [`run`].
    unsafe fn block(&mut self, block: &ContractionBlock, level: usize, room: &mut [T]) {
        let a = self.operands.a.rows(self.row, self.rows).cols(block.start, block.len);
        let b = self.operands.b.rows(block.start, block.len);
        let panel_rows = self.kernels.tiles.len();
        let rows = match native(a) {
            Some(a) => {
                let steps = a.strides();
                // Of a single row the step may be anything.
                RowPanels { data: a.data().as_ptr(), panel_step: panel_rows.wrapping_mul(steps.0), steps }
            }
            None => pack_rows(a, panel_rows, room),
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
                // As even as can be.
                left.div_ceil(left.div_ceil(most))
            };
            let panel = self.panel(b, col, vectors);
            // SAFETY: the caller's promise.
            unsafe { self.tiles(block, level, &rows, &panel) };
            vector += vectors;
        }
    }

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

    /// All tiles of a panel.
    ///
    /// # Safety
    /// As [`run`].
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
            // SAFETY: the operands reach over the tile and the block; the result is the epilogue's, a part or the tile's
            // room; the stack has room for the tree's depth; the kernel is this CPU's.
            unsafe { kernel(&tile) };
            tile.a = tile.a.wrapping_add(rows.panel_step);
            if via_epilogue {
                let shape = (count, width.min(n - panel.col));
                // SAFETY: the tile lies inside the result.
                unsafe { self.epilogue.put((self.row + first, panel.col), shape, self.tile, width) };
            } else {
                tile.c = tile.c.wrapping_add(panel_rows.wrapping_mul(target.step));
            }
        }
    }

    /// Where a panel's first tile goes, and whether it goes from there to the epilogue.
    fn target(
        &mut self,
        block: &ContractionBlock,
        level: usize,
        panel: &ColumnPanel<T>,
    ) -> (DirectStore<T>, bool) {
        let width = panel.vectors * self.kernels.lanes;
        if self.operands.tree.blocks.len() > 1 {
            // A block that is joined at once with the one on its left is added to it.
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

    /// Hands the joined parts to the epilogue, in pieces as large as a tile.
    ///
    /// # Safety
    /// As [`run`].
    unsafe fn store_parts(&mut self) {
        let (n, step) = (self.operands.b.shape().1, self.vectors * self.kernels.lanes);
        for row in 0..self.rows {
            for col in (0..n).step_by(MAX_TILE_LEN) {
                let cols = MAX_TILE_LEN.min(n - col);
                let values = &mut self.parts[row * step + col..][..cols];
                // SAFETY: the piece lies inside the result.
                unsafe { self.epilogue.put((self.row + row, col), (1, cols), values, cols) };
            }
        }
    }

    /// The joins after a block, but for the first, which its tiles have done; the next free level.
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
