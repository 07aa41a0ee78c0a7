//! Products in bands: groups of rows that are wanted in some columns, and whose sums leave out the ends of the contraction.
//!
//! Attention has such products, because windows decide which pairs of queries and keys count. Bands are planned once for many operands
//! of the same shapes, so that small products cost little more than their tiles. Operands are read in place: they are small, or lie
//! next to each other.

use std::ops::Range;
use std::ptr::null_mut;

use super::super::real::Real;
use super::super::simd::Isa;
use super::blocking::{MIN_ROWS_TO_PACK_WIDE, long_block_len};
use super::contraction::{Contraction, ContractionLeaf, LeafRuns, clipped, max_stack_len};
use super::matrix::{MatMut, MatRef};
use super::scratch::with_scratch;
use super::tile::{Added, Tile, TileKernels, Tiled};

/// The columns in which rows of a banded product are wanted, and the indices of the contraction that their sums have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Band {
    /// Other columns of these rows are not written, except those that share a vector with these.
    pub(crate) cols: Range<usize>,
    /// Never empty. The others are left out of the tree of sums: a node with one part that is present is that part.
    pub(crate) indices: Range<usize>,
}

/// The plan of a product in bands.
pub(crate) struct BandedProduct<T: 'static> {
    /// The numbers of rows, indices of the contraction, and columns.
    shape: [usize; 3],
    kernels: &'static TileKernels<T>,
    bands: Vec<PlannedBand>,
    /// The leaves of all bands.
    leaves: Vec<ContractionLeaf>,
    /// The largest number of nodes on the stack.
    depth: usize,
}

/// Neighbouring rows of the same columns and indices.
#[derive(Debug)]
struct PlannedBand {
    rows: Range<usize>,
    band: Band,
    /// Its leaves in [`BandedProduct::leaves`].
    leaves: Range<usize>,
}

impl<T: Real + Tiled> BandedProduct<T> {
    /// Plans a product of `rows` rows, `len` indices and `cols` columns, whose sums follow the tree of one dim. `band` says what is
    /// wanted of the rows of a tile. Returns `None` if the columns are not whole vectors.
    ///
    /// # Panics
    /// Panics if a band is outside the product, or has no indices.
    pub(crate) fn new(
        [rows, len, cols]: [usize; 3],
        band: impl Fn(Range<usize>) -> Band,
    ) -> Option<BandedProduct<T>> {
        Self::planned(&Contraction::new(&[len], usize::MAX), [rows, len, cols], band)
    }

    /// Plans a product whose sums have some leaves of a longer range, which are neighbours. Indices count from the first of them.
    /// Returns `None` also for sums that other products compute in several blocks.
    ///
    /// # Panics
    /// As [`BandedProduct::new`].
    pub(crate) fn over_leaves(
        of: LeafRuns<'_>,
        [rows, cols]: [usize; 2],
        band: impl Fn(Range<usize>) -> Band,
    ) -> Option<BandedProduct<T>> {
        of.expect_leaves_of_the_sum();
        assert!(of.runs.len() <= 1, "neighbouring leaves");
        let (tree, len) = (Contraction::over_runs(of, usize::MAX), of.indices().len());
        if len <= long_block_len::<T>() { Self::planned(&tree, [rows, len, cols], band) } else { None }
    }

    fn planned(
        tree: &Contraction,
        shape: [usize; 3],
        band: impl Fn(Range<usize>) -> Band,
    ) -> Option<BandedProduct<T>> {
        let kernels = T::kernels(Isa::current());
        let ([rows, len, cols], lanes) = (shape, kernels.lanes);
        if !cols.is_multiple_of(lanes) {
            return None;
        }
        let mut plan = BandedProduct { shape, kernels, bands: Vec::new(), leaves: Vec::new(), depth: 0 };
        for row in (0..rows).step_by(kernels.tiles.len()) {
            let rows = row..rows.min(row + kernels.tiles.len());
            let mut band = band(rows.clone());
            assert!(band.cols.end <= cols && band.indices.end <= len, "{band:?} of {shape:?}");
            assert!(!band.indices.is_empty(), "a band has indices");
            if band.cols.is_empty() {
                continue;
            }
            band.cols = band.cols.start / lanes * lanes..band.cols.end.next_multiple_of(lanes);
            match plan.bands.last_mut() {
                Some(last) if last.rows.end == rows.start && last.band == band => last.rows.end = rows.end,
                last => {
                    let leaves = match last {
                        Some(last) if last.band.indices == band.indices => last.leaves.clone(),
                        _ => plan.add_leaves(tree, &band.indices),
                    };
                    plan.bands.push(PlannedBand { rows, band, leaves });
                }
            }
        }
        Some(plan)
    }

    /// Adds the leaves of a band with these indices, and returns their places.
    fn add_leaves(&mut self, tree: &Contraction, indices: &Range<usize>) -> Range<usize> {
        let (first, leaves) = (self.leaves.len(), clipped(&tree.leaves, indices));
        self.depth = self.depth.max(max_stack_len(&leaves));
        self.leaves.extend(leaves);
        first..self.leaves.len()
    }

    /// Sets `c = alpha * a @ b + beta * c` in the bands. If `beta` is 0, `c` is not read.
    ///
    /// # Panics
    /// Panics if the shapes are not the plan's, or the columns of `b` or `c` are not contiguous.
    pub(crate) fn run(&self, alpha: T, a: MatRef<'_, T>, b: MatRef<'_, T>, beta: T, mut c: MatMut<'_, T>) {
        let [m, k, n] = self.shape;
        let fit = a.shape() == (m, k) && b.shape() == (k, n) && c.shape() == (m, n);
        assert!(fit, "{:?} {:?} {:?}, planned as {:?}", a.shape(), b.shape(), c.shape(), self.shape);
        let (a_steps, b_step, c_step) = (a.strides(), b.strides().0, c.strides().0);
        assert!(b.strides().1 == 1 && c.strides().1 == 1, "contiguous columns");
        let (tiles, lanes) = (self.kernels.tiles, self.kernels.lanes);
        let (panel_rows, most) = (tiles.len(), tiles[0].len());
        let (a, b, c) = (a.data().as_ptr(), b.data().as_ptr(), c.as_mut_ptr());
        with_scratch::<T, _>(
            [self.depth * panel_rows * most * lanes, k * most * lanes],
            |[stack, packed]| {
                let stack = stack.as_mut_ptr();
                for PlannedBand { rows, band: Band { cols, indices }, leaves } in &self.bands {
                    let mut col = cols.start;
                    while col < cols.end {
                        let left = (cols.end - col) / lanes;
                        let vectors = left.div_ceil(left.div_ceil(most));
                        let mut panel =
                            (b.wrapping_add(indices.start.wrapping_mul(b_step).wrapping_add(col)), b_step);
                        let mut packed_b = if rows.len() >= MIN_ROWS_TO_PACK_WIDE {
                            packed.as_mut_ptr()
                        } else {
                            null_mut()
                        };
                        let mut row = rows.start;
                        while row < rows.end {
                            let count = tile_rows(rows.end - row, panel_rows);
                            let to = c.wrapping_add(row.wrapping_mul(c_step).wrapping_add(col));
                            let added = Added { factor: beta, x: to.cast_const(), strides: (c_step, 1) };
                            let first = row
                                .wrapping_mul(a_steps.0)
                                .wrapping_add(indices.start.wrapping_mul(a_steps.1));
                            let tile = Tile {
                                a: a.wrapping_add(first),
                                a_steps,
                                b: panel.0,
                                b_step: panel.1,
                                packed_b,
                                leaves: &self.leaves[leaves.clone()],
                                stack,
                                parts: null_mut(),
                                next_rows_ahead: a_steps.1 == 1
                                    && col == cols.start
                                    && rows.end - row > panel_rows,
                                joins: 0,
                                keep: false,
                                c: to,
                                c_step,
                                alpha,
                                added: (beta != T::ZERO).then_some(added),
                            };
                            // SAFETY: the tile is inside the product, whose elements are inside the operands and the result, which are
                            // borrowed; the stack has room for the leaves' nodes; this CPU has the plan's instruction set.
                            let kernel = match packed_b.is_null() {
                                true => tiles[count - 1][vectors - 1],
                                false => self.kernels.packing_tiles[vectors - 1],
                            };
                            unsafe { kernel(&tile) };
                            if !packed_b.is_null() {
                                panel = (packed_b.cast_const(), vectors * lanes);
                                packed_b = null_mut();
                            }
                            row += count;
                        }
                        col += vectors * lanes;
                    }
                }
            },
        );
    }
}

/// Returns the number of rows of the next tile of rows in place, if so many are left: a tile of one or two rows would wait for its own
/// sums, so the last two tiles share their rows.
pub(super) fn tile_rows(left: usize, most: usize) -> usize {
    if left <= most {
        left
    } else if left <= most + most / 2 {
        left.div_ceil(2)
    } else {
        most
    }
}
