//! The kernels of products of a few rows: one vector of lines, over the whole tree.

use std::ops::Range;

use super::lines::{LineVector, UnitsIn};
use super::vector::Vector;
use crate::gemm::contraction::Contraction;
use crate::num::real::Widen;
use crate::summation::LEAF;

/// The operands and the destination of a few lines. Distances are in elements.
pub(in crate::gemm) struct ThinTile<'a, E: Widen> {
    /// The rows: the elements at one index of the contraction are contiguous, and all indices.
    pub(in crate::gemm) rows: *const E::Wide,
    /// The first element of the first line.
    pub(in crate::gemm) matrix: *const E,
    /// The distance from line to line.
    pub(in crate::gemm) step: usize,
    /// The number of elements in a line.
    pub(in crate::gemm) len: usize,
    pub(in crate::gemm) tree: &'a Contraction,
    /// The buffer for finished nodes.
    pub(in crate::gemm) stack: *mut E::Wide,
    /// The sums of the first row; those of its columns are contiguous.
    pub(in crate::gemm) sums: *mut E::Wide,
    /// The distance from row to row of the sums.
    pub(in crate::gemm) sums_step: usize,
}

/// Computes the sums of a vector of lines and each row, in the order of the tree.
///
/// # Safety
/// The CPU has `V`'s instruction set. The tile's rows and lines cover the tree's indices, lines have at least a piece,
/// the stack has room for all unfinished nodes, and the sums for `ROWS` vectors.
#[inline(always)]
pub(in crate::gemm) unsafe fn sums_of_lines<V, E, const ROWS: usize, const LEAVES: usize>(t: &ThinTile<'_, E>)
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
                let mut sums = [[V::sum_identity(); ROWS]; LEAVES];
                let mut whole = 0;
                let few_rows = LEAVES > 1 && ROWS < 4;
                if few_rows && together == LEAVES && now.iter().all(|leaf| leaf.len as usize == LEAF) {
                    // Distances that the compiler knows need no registers. (With four rows it makes slower code of them.)
                    whole = LEAF;
                    multiply_side_by_side::<V, E, ROWS, LEAVES>(t, start, |_| LEAF, LEAF, &mut sums);
                } else if together == LEAVES {
                    let len = |i: usize| now[i].len as usize;
                    whole = (0..LEAVES).fold(LEAF, |least, i| least.min(len(i))) / BLOCK * BLOCK;
                    multiply_side_by_side::<V, E, ROWS, LEAVES>(t, start, len, whole, &mut sums);
                }
                if together == LEAVES && now.iter().all(|leaf| leaf.len as usize == whole) {
                    for (i, sums) in sums.iter_mut().enumerate() {
                        stack = join(sums, joins(i), stack);
                    }
                    start += LEAVES * whole;
                } else {
                    // A copy, so that the sums of whole blocks stay in registers.
                    let copy = sums;
                    for (i, leaf) in now.iter().enumerate() {
                        let end = start + leaf.len as usize;
                        let mut sums = add_rest::<V, E, ROWS>(t, start + whole..end, copy[i]);
                        stack = join(&mut sums, joins(i), stack);
                        start = end;
                    }
                }
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

/// Adds the products of the first `whole` elements of neighbouring leaves of these lengths. The first leaf begins at the index `start`.
///
/// # Safety
/// The conditions of [`sums_of_lines`] hold; the leaves are inside the lines.
#[inline(always)]
unsafe fn multiply_side_by_side<V, E, const ROWS: usize, const LEAVES: usize>(
    t: &ThinTile<'_, E>,
    start: usize,
    len: impl Fn(usize) -> usize,
    whole: usize,
    sums: &mut [[V; ROWS]; LEAVES],
) where
    V: LineVector,
    E: UnitsIn<V> + Widen<Wide = V::T>,
{
    let mut starts = [start; LEAVES];
    for i in 1..LEAVES {
        starts[i] = starts[i - 1] + len(i - 1);
    }
    for done in (0..whole).step_by(BLOCK) {
        for i in 0..LEAVES {
            // SAFETY: the caller's promise.
            unsafe { add_block::<V, E, ROWS>(t, starts[i] + done, &mut sums[i]) };
        }
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
