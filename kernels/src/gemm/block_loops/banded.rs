//! Products in bands: groups of rows that are wanted in some columns, and whose sums leave out the ends of the contraction.
//!
//! Attention has such products, because windows decide which pairs of queries and keys count. Bands are planned once for many operands
//! of the same shapes, so that small products cost little more than their tiles. Operands are read in place, except columns that many rows
//! read.

use std::cell::Cell;
use std::ops::Range;
use std::ptr::null_mut;

use super::blocking::{least_rows_to_pack, long_block_len, tile_rows};
use super::scratch::with_scratch;
use crate::gemm::contraction::{Contraction, ContractionLeaf, LeafRuns, clipped, max_stack_len};
use crate::gemm::matrix::{MatMut, MatRef};
use crate::gemm::tiles::prefetch::Ahead;
use crate::gemm::tiles::tile::{Added, Tile, TileFn, TileKernels, Tiled};
use crate::isa::simd::Isa;
use crate::num::real::Real;

/// Bands with fewer rows than this have tiles of two vectors of columns instead of four: few rows in tiles of four by four
/// would read columns from the second cache twice as often.
const MIN_ROWS_OF_FOUR: usize = 24;

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
    /// The most indices of a band whose columns are packed.
    packed: usize,
    /// The fewest rows of a band whose tiles have four vectors of columns.
    min_rows_of_four: usize,
}

/// Neighbouring rows of the same columns and indices.
#[derive(Debug)]
struct PlannedBand {
    rows: Range<usize>,
    band: Band,
    /// Its leaves in [`BandedProduct::leaves`].
    leaves: Range<usize>,
    /// True if columns are packed, since many rows read them.
    packs: bool,
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
        let most = T::kernels(Isa::current()).tiles.len();
        Self::planned(
            &Contraction::new(&[len], usize::MAX),
            [rows, len, cols],
            (most, MIN_ROWS_OF_FOUR),
            band,
        )
    }

    /// Plans a product whose sums have some leaves of a longer range, which are neighbours. Indices count from the first of them.
    /// `indices` says which ones the sums of a tile's rows have; all columns are wanted. Returns `None` also for sums that other products
    /// compute in several blocks, or for which they pack columns once for all rows: bands would read them again and again in place (with
    /// AVX2 0.93 forward with 1,024 keys; with AVX-512 and 4,096 keys 0.9, also block by block with columns in the first cache).
    ///
    /// # Panics
    /// As [`BandedProduct::new`].
    pub(crate) fn over_leaves(
        of: LeafRuns<'_>,
        [rows, cols]: [usize; 2],
        indices: impl Fn(Range<usize>) -> Range<usize>,
    ) -> Option<BandedProduct<T>> {
        of.expect_leaves_of_the_sum();
        assert!(of.runs.len() <= 1, "neighbouring leaves");
        let (kernels, len) = (T::kernels(Isa::current()), of.indices().len());
        let packs = rows >= least_rows_to_pack(kernels, len, false);
        if packs || len > long_block_len::<T>() || cols < kernels.lanes {
            return None;
        }
        // The sums of few rows differ in their indices: bands are as high as a tile.
        let of_four = kernels.panel_vectors(cols / kernels.lanes, true) > kernels.tiles[0].len();
        let most = if of_four { kernels.four_vectors.len() } else { kernels.tiles.len() };
        let band = |rows| Band { cols: 0..cols, indices: indices(rows) };
        Self::planned(&Contraction::over_runs(of, usize::MAX), [rows, len, cols], (most, 1), band)
    }

    fn planned(
        tree: &Contraction,
        shape: [usize; 3],
        (tile, min_rows_of_four): (usize, usize),
        band: impl Fn(Range<usize>) -> Band,
    ) -> Option<BandedProduct<T>> {
        let kernels = T::kernels(Isa::current());
        let ([rows, len, cols], lanes) = (shape, kernels.lanes);
        if !cols.is_multiple_of(lanes) {
            return None;
        }
        let (bands, leaves) = (Vec::new(), Vec::new());
        let mut plan = BandedProduct { shape, kernels, bands, leaves, depth: 0, packed: 0, min_rows_of_four };
        for row in (0..rows).step_by(tile) {
            let rows = row..rows.min(row + tile);
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
                    plan.bands.push(PlannedBand { rows, band, leaves, packs: false });
                }
            }
        }
        for planned in &mut plan.bands {
            let len = planned.band.indices.len();
            planned.packs = kernels.packs && planned.rows.len() >= least_rows_to_pack(kernels, len, false);
            plan.packed = plan.packed.max(if planned.packs { len } else { 0 });
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
        let (a, b, c) = (a.data().as_ptr(), b.data().as_ptr(), c.as_mut_ptr());
        let (lanes, panel_rows) = (self.kernels.lanes, self.kernels.tiles.len());
        let panel_len = self.kernels.most_vectors() * lanes;
        with_scratch::<T, _>(
            [self.depth * panel_rows * panel_len, self.packed.saturating_mul(panel_len)],
            |[stack, packed]| {
                for planned in &self.bands {
                    let PlannedBand { rows, band: Band { cols, indices }, leaves, packs } = planned;
                    let at = |row: usize, step: usize, col: usize| row.wrapping_mul(step).wrapping_add(col);
                    let mut col = cols.start;
                    while col < cols.end {
                        let of_four = rows.len() >= self.min_rows_of_four;
                        let vectors = self.kernels.panel_vectors((cols.end - col) / lanes, of_four);
                        let to = c.wrapping_add(at(rows.start, c_step, col));
                        let added = Added { factor: beta, x: to.cast_const(), strides: (c_step, 1) };
                        let tile = Tile {
                            a: a.wrapping_add(at(
                                rows.start,
                                a_steps.0,
                                indices.start.wrapping_mul(a_steps.1),
                            )),
                            a_steps,
                            b: b.wrapping_add(at(indices.start, b_step, col)),
                            b_step,
                            packed_b: if *packs { packed.as_mut_ptr() } else { null_mut() },
                            leaves: &self.leaves[leaves.clone()],
                            stack: stack.as_mut_ptr(),
                            parts: null_mut(),
                            ahead: Cell::new(Ahead::NOTHING),
                            next_rows_ahead: a_steps.1 == 1 && col == cols.start,
                            joins: 0,
                            keep: false,
                            c: to,
                            c_step,
                            alpha,
                            added: (beta != T::ZERO).then_some(added),
                        };
                        // SAFETY: the tiles are inside the product, whose elements are inside the operands and the result, which are
                        // borrowed. The stack has room for the leaves' nodes, and the packed columns for a panel.
                        unsafe { self.column(tile, rows.len(), vectors) };
                        col += vectors * lanes;
                    }
                }
            },
        );
    }

    /// Computes a column of tiles: the first one, and those below it.
    ///
    /// # Safety
    /// The operands and the result cover the tiles, and the buffers are large enough. No other code writes the result.
    unsafe fn column(&self, mut tile: Tile<T>, rows: usize, vectors: usize) {
        let TileKernels { tiles, four_vectors, lanes, .. } = self.kernels;
        let of_four = vectors > tiles[0].len();
        let mut left = rows;
        while left > 0 {
            let four = if of_four { four_rows(left, four_vectors) } else { None };
            let count = four.map_or_else(|| tile_rows(left, tiles), |(rows, _)| rows);
            tile.next_rows_ahead &= left > count;
            // SAFETY: the caller's promise; this CPU has the plan's instruction set.
            unsafe {
                match four {
                    Some((_, kernel)) => kernel(&tile),
                    None if of_four => {
                        let half = tiles[count - 1][1];
                        half(&tile);
                        half(&Tile {
                            b: tile.b.wrapping_add(2 * lanes),
                            c: tile.c.wrapping_add(2 * lanes),
                            added: tile.added.map(|added| added.at(0, 2 * lanes)),
                            ahead: Cell::new(Ahead::NOTHING),
                            ..tile
                        });
                    }
                    None => tiles[count - 1][vectors - 1](&tile),
                }
            }
            // Columns are packed for many rows, and the first tile of those has all rows of a tile.
            if !tile.packed_b.is_null() {
                (tile.b, tile.b_step) = (tile.packed_b.cast_const(), vectors * lanes);
                tile.packed_b = null_mut();
            }
            left -= count;
            tile.a = tile.a.wrapping_add(count.wrapping_mul(tile.a_steps.0));
            tile.c = tile.c.wrapping_add(count.wrapping_mul(tile.c_step));
            tile.added = tile.added.map(|added| added.at(count, 0));
        }
    }
}

/// Returns the rows of the next tile of four vectors, and its kernel, if so many rows are left; or `None` for fewer rows than one has.
fn four_rows<T>(left: usize, four_vectors: &[&[TileFn<T>]]) -> Option<(usize, TileFn<T>)> {
    let most = four_vectors.len();
    // The last two tiles share their rows, as others do.
    let wanted = if left > most + most / 2 { most } else { left.div_ceil(left.div_ceil(most)) };
    let of = |rows: usize| Some((rows, *four_vectors[rows - 1].first()?));
    (wanted..=left.min(most)).find_map(of).or_else(|| (1..wanted).rev().find_map(of))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::product::{Gemm, LeafContraction};
    use crate::isa::simd::with_isa;

    fn mat<T>(data: &[T], shape: (usize, usize), strides: (usize, usize)) -> MatRef<'_, T> {
        MatRef::new(data, shape, strides).expect("a matrix inside the slice")
    }

    /// Returns a band for some rows, of several forms: staircases as attention has them, all, or nothing.
    fn band(form: usize, rows: &Range<usize>, [len, cols]: [usize; 2]) -> Band {
        let clip = |range: Range<usize>, most: usize| range.start.min(most - 1)..range.end.min(most);
        match form {
            0 => Band { cols: 0..cols, indices: clip(0..rows.end, len) },
            1 => Band { cols: rows.start.min(cols)..cols, indices: clip(rows.start..len, len) },
            2 => Band { cols: 0..cols, indices: clip(rows.start / 2..rows.start / 2 + 40, len) },
            3 if rows.start.is_multiple_of(5) => Band { cols: 0..0, indices: 0..1 },
            _ => Band { cols: 0..cols, indices: 0..len },
        }
    }

    /// Each element in a band has the bits of the whole product with zeros for the indices that the band leaves out.
    fn check<T: Gemm>(bits: impl Fn(T) -> u64) {
        let noise = |i: usize| T::of(((i * 7919 + 13) % 1009) as f64 * 0.01 - 5.0);
        let untouched = T::of(77.0);
        let sizes = [[1, 1, 16], [17, 64, 32], [64, 33, 64], [200, 64, 32], [330, 130, 112], [40, 300, 16]];
        for ([m, k, n], form) in sizes.into_iter().flat_map(|size| (0..5).map(move |form| (size, form))) {
            // Columns that lie across or along the contraction; results with room between rows.
            let (a_steps, step) = if form % 2 == 0 { ((1, m + 3), n + 5) } else { ((k + 1, 1), n) };
            let a: Vec<T> = (0..(m + 3) * (k + 1)).map(noise).collect();
            let b: Vec<T> = (0..k * (n + 5)).map(|i| noise(i + 77)).collect();
            for (alpha, beta) in [(1.0, 0.0), (0.3, 1.0)].map(|(x, y)| (T::of(x), T::of(y))) {
                let plan = BandedProduct::<T>::new([m, k, n], |rows| band(form, &rows, [k, n])).unwrap();
                let mut got = vec![untouched; m * step];
                let into = MatMut::new(&mut got, (m, n), (step, 1)).unwrap();
                plan.run(alpha, mat(&a, (m, k), a_steps), mat(&b, (k, n), (n + 5, 1)), beta, into);
                let (tile, lanes) = (plan.kernels.tiles.len(), plan.kernels.lanes);
                let mut want = vec![untouched; m * step];
                for row in 0..m {
                    let first = row / tile * tile;
                    let Band { cols, indices } = band(form, &(first..m.min(first + tile)), [k, n]);
                    let kept = |j: usize| a[row * a_steps.0 + j * a_steps.1];
                    let kept: Vec<T> =
                        (0..k).map(|j| if indices.contains(&j) { kept(j) } else { T::ZERO }).collect();
                    let cols = if cols.is_empty() { 0..0 } else { cols.start / lanes * lanes..n };
                    if cols.is_empty() {
                        continue;
                    }
                    let columns = mat(&b[cols.start..], (k, cols.len()), (n + 5, 1));
                    let c = &mut want[row * step + cols.start..][..cols.len()];
                    let c = MatMut::new(c, (1, cols.len()), (n, 1)).unwrap();
                    T::product(alpha, mat(&kept, (1, k), (k, 1)), columns, beta, c);
                }
                // No sum here is a zero, whose sign the zeros might decide.
                let wrong = got.iter().zip(&want).position(|(&x, &y)| bits(x) != bits(y));
                assert_eq!(wrong, None, "{m}x{k}x{n}, form {form}");
            }
        }
    }

    #[test]
    fn bands_have_the_bits_of_the_whole() {
        for &isa in Isa::available() {
            with_isa(isa, || {
                check::<f32>(|x| x.to_bits().into());
                check::<f64>(|x| x.to_bits());
            });
        }
    }

    /// Sums over some leaves of a longer range, with bands as high as tiles of four vectors and as others.
    #[test]
    fn bands_over_leaves_have_the_bits_of_the_whole() {
        let noise = |i: usize| ((i * 7919 + 13) % 1009) as f32 * 0.01 - 5.003;
        let run = 2..7;
        let of = LeafRuns { len: 200, runs: std::slice::from_ref(&run) };
        let (len, rows) = (of.indices().len(), 22);
        for (&isa, cols) in Isa::available().iter().flat_map(|isa| [16, 32, 64, 112].map(|cols| (isa, cols)))
        {
            let a: Vec<f32> = (0..rows * len).map(noise).collect();
            let b: Vec<f32> = (0..len * cols).map(|i| noise(i + 77)).collect();
            let indices = |rows: Range<usize>| rows.start * 3..(rows.end * 5).min(len);
            with_isa(isa, || {
                let plan = BandedProduct::<f32>::over_leaves(of, [rows, cols], indices).expect("few rows");
                let (mut got, mut want) = (vec![0.0; rows * cols], vec![0.0; rows * cols]);
                let into = MatMut::new(&mut got, (rows, cols), (cols, 1)).unwrap();
                plan.run(1.0, mat(&a, (rows, len), (1, rows)), mat(&b, (len, cols), (cols, 1)), 0.0, into);
                for planned in &plan.bands {
                    for row in planned.rows.clone() {
                        let kept = |j: usize| {
                            if planned.band.indices.contains(&j) { a[j * rows + row] } else { 0.0 }
                        };
                        let kept: Vec<f32> = (0..len).map(kept).collect();
                        let into =
                            MatMut::new(&mut want[row * cols..][..cols], (1, cols), (cols, 1)).unwrap();
                        let whole = LeafContraction::new(of);
                        f32::product_over(
                            &whole,
                            mat(&kept, (1, len), (len, 1)),
                            mat(&b, (len, cols), (cols, 1)),
                            into,
                        );
                    }
                }
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&got), bits(&want), "{cols} columns, {isa:?}");
            });
        }
    }

    #[test]
    fn bands_outside_the_product_and_parts_of_vectors_are_refused() {
        let plan = |shape, cols: Range<usize>, indices: Range<usize>| {
            std::panic::catch_unwind(|| {
                BandedProduct::<f32>::new(shape, |_| Band { cols: cols.clone(), indices: indices.clone() })
                    .is_some()
            })
        };
        assert!(plan([4, 8, 16], 0..16, 0..8).unwrap());
        assert!(!plan([4, 8, 17], 0..16, 0..8).unwrap());
        for (cols, indices) in [(0..17, 0..8), (0..16, 0..9), (0..16, 3..3)] {
            assert!(plan([4, 8, 16], cols.clone(), indices.clone()).is_err(), "{cols:?} {indices:?}");
        }
    }
}
