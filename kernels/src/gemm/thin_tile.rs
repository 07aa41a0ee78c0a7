//! The kernels of products of a few rows: one vector of lines, or a few vectors of columns, over the whole tree.

use std::array::from_fn;
use std::ops::Range;

use super::contraction::Contraction;
use super::lines::{LineVector, StoredIn, UnitsIn};
use super::vector::Vector;
use crate::num::real::Widen;
use crate::summation::LEAF;

/// The operands and the destination of a few columns. Distances are in elements.
pub(super) struct ThinTile<'a, E: Widen> {
    /// The rows: the elements at one index of the contraction are contiguous, and all indices.
    pub(super) rows: *const E::Wide,
    /// The first element of the first column.
    pub(super) matrix: *const E,
    /// The distance from column to column if each is a line, else along the contraction.
    pub(super) step: usize,
    /// The number of elements in a column.
    pub(super) len: usize,
    pub(super) tree: &'a Contraction,
    /// The buffer for finished nodes.
    pub(super) stack: *mut E::Wide,
    /// The sums of the first row; those of its columns are contiguous.
    pub(super) sums: *mut E::Wide,
    /// The distance from row to row of the sums.
    pub(super) sums_step: usize,
}

/// Computes the sums of a vector of lines and each row, in the order of the tree.
///
/// # Safety
/// The CPU has `V`'s instruction set. The tile's rows and lines cover the tree's indices, lines have at least a piece,
/// the stack has room for all unfinished nodes, and the sums for `ROWS` vectors.
#[inline(always)]
pub(super) unsafe fn sums_of_lines<V, E, const ROWS: usize, const LEAVES: usize>(t: &ThinTile<'_, E>)
where
    V: LineVector,
    E: UnitsIn<V> + Widen<Wide = V::T>,
{
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        let mut stack = t.stack;
        for block in &t.tree.blocks {
            let mut leaves = &t.tree.leaves[block.leaves.clone()];
            let mut start = block.start;
            while !leaves.is_empty() {
                let together = if leaves.len() >= LEAVES { LEAVES } else { 1 };
                let (now, later) = leaves.split_at(together);
                // The last leaf's joins are followed by the block's.
                let joins = |i: usize| {
                    now[i].merges + if later.is_empty() && i + 1 == together { block.merges } else { 0 }
                };
                if together < LEAVES {
                    let [mut sums] = leaves_side_by_side::<V, E, ROWS, 1>(t, start, [now[0].len as usize]);
                    stack = join(&mut sums, joins(0), stack);
                } else {
                    let mut sums = if now.iter().all(|leaf| leaf.len as usize == LEAF) {
                        whole_leaves_side_by_side::<V, E, ROWS, LEAVES>(t, start)
                    } else {
                        leaves_side_by_side::<V, E, ROWS, LEAVES>(t, start, from_fn(|i| now[i].len as usize))
                    };
                    for (i, sums) in sums.iter_mut().enumerate() {
                        stack = join(sums, joins(i), stack);
                    }
                }
                start += now.iter().map(|leaf| leaf.len as usize).sum::<usize>();
                leaves = later;
            }
        }
        for row in 0..ROWS {
            V::load(t.stack.add(row * V::LANES)).store(t.sums.add(row * t.sums_step));
        }
    }
}

/// Adds the last `merges` nodes of the stack to a node, and pushes it. Returns the stack's end.
///
/// # Safety
/// The CPU has `V`'s instruction set; the stack has these nodes, and room for the sum.
#[inline(always)]
unsafe fn join<V: Vector>(sums: &mut [V], merges: u32, mut stack: *mut V::T) -> *mut V::T {
    let len = sums.len() * V::LANES;
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        for _ in 0..merges {
            stack = stack.sub(len);
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = V::load(stack.add(i * V::LANES)).add(*sum);
            }
        }
        for (i, sum) in sums.iter().enumerate() {
            sum.store(stack.add(i * V::LANES));
        }
        stack.add(len)
    }
}

/// The number of elements of a leaf that are multiplied before the next leaf's turn: a multiple of a piece, so small that
/// the CPU sees the chains of several leaves at a time.
const BLOCK: usize = 8;

/// Returns the sums of neighbouring leaves of these lengths; the first begins at the index `start`.
///
/// # Safety
/// The conditions of [`sums_of_lines`] hold; the leaves are inside the lines.
#[inline(always)]
unsafe fn leaves_side_by_side<V, E, const ROWS: usize, const LEAVES: usize>(
    t: &ThinTile<'_, E>,
    start: usize,
    lens: [usize; LEAVES],
) -> [[V; ROWS]; LEAVES]
where
    V: LineVector,
    E: UnitsIn<V> + Widen<Wide = V::T>,
{
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        let mut sums = [[V::sum_identity(); ROWS]; LEAVES];
        let mut starts = [start; LEAVES];
        for i in 1..LEAVES {
            starts[i] = starts[i - 1] + lens[i - 1];
        }
        let shortest = lens.iter().fold(usize::MAX, |least, &len| least.min(len));
        let whole = shortest / BLOCK * BLOCK;
        for done in (0..whole).step_by(BLOCK) {
            for (sums, start) in sums.iter_mut().zip(starts) {
                add_block::<V, E, ROWS>(t, start + done, sums);
            }
        }
        if lens.iter().any(|&len| len > whole) {
            // A copy, so that the sums of whole blocks stay in registers.
            let mut rest = sums;
            for ((sums, start), len) in rest.iter_mut().zip(starts).zip(lens) {
                *sums = add_rest::<V, E, ROWS>(t, start + whole..start + len, *sums);
            }
            sums = rest;
        }
        sums
    }
}

/// Returns the sums of neighbouring leaves of [`LEAF`] indices: distances that the compiler knows need no registers.
///
/// # Safety
/// The conditions of [`sums_of_lines`] hold; the leaves are inside the lines.
#[inline(always)]
unsafe fn whole_leaves_side_by_side<V, E, const ROWS: usize, const LEAVES: usize>(
    t: &ThinTile<'_, E>,
    start: usize,
) -> [[V; ROWS]; LEAVES]
where
    V: LineVector,
    E: UnitsIn<V> + Widen<Wide = V::T>,
{
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        // Adding a product to -0.0 gives that product, also if it is a signed zero.
        let mut sums = [[V::sum_identity(); ROWS]; LEAVES];
        for done in (0..LEAF).step_by(BLOCK) {
            for (i, sums) in sums.iter_mut().enumerate() {
                add_block::<V, E, ROWS>(t, start + done + i * LEAF, sums);
            }
        }
        sums
    }
}

/// Adds the products of a block that begins at the index `at`.
///
/// # Safety
/// The conditions of [`sums_of_lines`] hold; the block is inside the lines.
#[inline(always)]
unsafe fn add_block<V, E, const ROWS: usize>(t: &ThinTile<'_, E>, at: usize, sums: &mut [V; ROWS])
where
    V: LineVector,
    E: UnitsIn<V> + Widen<Wide = V::T>,
{
    let piece = V::PIECE * E::PER_UNIT;
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        let (lines, rows) = (t.matrix.add(at), t.rows.add(at * ROWS));
        for i in 0..BLOCK / piece {
            let units = V::piece(lines.add(i * piece).cast(), t.step * size_of::<E>());
            multiply::<V, E, ROWS>(rows.add(i * piece * ROWS), units.as_ref(), sums);
        }
    }
}

/// Adds the products of the rows' elements and the lines' units, one after the other.
///
/// # Safety
/// The CPU has `V`'s instruction set; `rows` covers the units' indices.
#[inline(always)]
unsafe fn multiply<V: Vector, E: UnitsIn<V>, const ROWS: usize>(
    rows: *const V::T,
    units: &[V],
    sums: &mut [V; ROWS],
) {
    for (i, &unit) in units.iter().enumerate() {
        // SAFETY: the caller's promise, for everything below.
        unsafe {
            let columns = E::columns(unit);
            for (j, &column) in columns[..E::PER_UNIT].iter().enumerate() {
                for (row, sum) in sums.iter_mut().enumerate() {
                    let x = V::splat(*rows.add((i * E::PER_UNIT + j) * ROWS + row));
                    *sum = x.fma(column, *sum);
                }
            }
        }
    }
}

/// The most elements in a piece of a line.
const MAX_PIECE: usize = 8;

/// Returns the sums with the products at the indices `range`, which may be fewer than a piece.
///
/// # Safety
/// The conditions of [`sums_of_lines`] hold; the range is inside the lines.
#[inline(always)]
unsafe fn add_rest<V, E, const ROWS: usize>(
    t: &ThinTile<'_, E>,
    range: Range<usize>,
    mut sums: [V; ROWS],
) -> [V; ROWS]
where
    V: LineVector,
    E: UnitsIn<V> + Widen<Wide = V::T>,
{
    let (mut at, piece, step) = (range.start, V::PIECE * E::PER_UNIT, t.step * size_of::<E>());
    // SAFETY: the caller's promise, for everything below; a piece that would exceed the lines is their last one.
    unsafe {
        while range.end - at >= piece {
            let units = V::piece(t.matrix.add(at).cast(), step);
            multiply::<V, E, ROWS>(t.rows.add(at * ROWS), units.as_ref(), &mut sums);
            at += piece;
        }
        if at < range.end {
            let first = at.min(t.len - piece);
            let units = V::piece(t.matrix.add(first).cast(), step);
            let mut columns = [V::sum_identity(); MAX_PIECE];
            for (columns, &unit) in columns.chunks_exact_mut(E::PER_UNIT).zip(units.as_ref()) {
                columns.copy_from_slice(&E::columns(unit)[..E::PER_UNIT]);
            }
            for k in at..range.end {
                for (row, sum) in sums.iter_mut().enumerate() {
                    *sum = V::splat(*t.rows.add(k * ROWS + row)).fma(columns[k - first], *sum);
                }
            }
        }
        sums
    }
}

/// Computes the sums of `VECTORS` vectors of contiguous columns and each row, in the order of the tree.
///
/// # Safety
/// The CPU has `V`'s instruction set. The tile's rows and columns cover the tree's indices, the stack has room for all
/// unfinished nodes, and the sums for `ROWS` times `VECTORS` vectors.
#[inline(always)]
pub(super) unsafe fn sums_of_columns<V, E, const ROWS: usize, const VECTORS: usize>(t: &ThinTile<'_, E>)
where
    V: Vector,
    E: StoredIn<V> + Widen<Wide = V::T>,
{
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        let mut stack = t.stack;
        for block in &t.tree.blocks {
            let (mut rows, mut columns) =
                (t.rows.add(block.start * ROWS), t.matrix.wrapping_add(block.start * t.step));
            let leaves = &t.tree.leaves[block.leaves.clone()];
            for (i, leaf) in leaves.iter().enumerate() {
                let merges = leaf.merges + if i + 1 == leaves.len() { block.merges } else { 0 };
                let mut sums = [[V::sum_identity(); VECTORS]; ROWS];
                for _ in 0..leaf.len {
                    let loaded: [V; VECTORS] = from_fn(|j| E::load_lanes(columns.add(j * V::LANES)));
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let x = V::splat(*rows.add(row));
                        for (sum, &column) in sums.iter_mut().zip(&loaded) {
                            *sum = x.fma(column, *sum);
                        }
                    }
                    (rows, columns) = (rows.add(ROWS), columns.wrapping_add(t.step));
                }
                stack = join(sums.as_flattened_mut(), merges, stack);
            }
        }
        for row in 0..ROWS {
            for j in 0..VECTORS {
                let sum = V::load(t.stack.add((row * VECTORS + j) * V::LANES));
                sum.store(t.sums.add(row * t.sums_step + j * V::LANES));
            }
        }
    }
}
