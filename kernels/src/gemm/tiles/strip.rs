//! The kernel of products of a few rows and a matrix whose columns are next to each other.
//!
//! A strip of many columns goes down the matrix: a piece of a row of the matrix at a time, as long as memory is read well,
//! and several rows side by side. So the sums are in the nearest cache instead of registers; a tile of columns that has its
//! sums in registers would read a vector or two from each row, which lie on as many pages.

use super::lines::StoredIn;
use super::vector::Vector;
use crate::gemm::contraction::Contraction;
use crate::isa::caches::Caches;
use crate::num::real::Widen;

/// The operands of a strip of columns. Distances are in elements.
pub(in crate::gemm) struct Strip<'a, E: Widen> {
    /// The rows: the elements at one index of the contraction are contiguous, and all indices.
    pub(in crate::gemm) rows: *const E::Wide,
    /// The first element of the first column.
    pub(in crate::gemm) matrix: *const E,
    /// The distance along the contraction.
    pub(in crate::gemm) step: usize,
    /// The number of columns: a vector or more.
    pub(in crate::gemm) columns: usize,
    pub(in crate::gemm) tree: &'a Contraction,
    /// The buffer for nodes. In a node, each row has [`room`] for its columns; the last vector of them ends with the last
    /// column, so some may be in the vector before as well. The first node is the result.
    pub(in crate::gemm) nodes: *mut E::Wide,
}

/// Returns the number of sums that `columns` columns take, in vectors of `lanes`.
pub(in crate::gemm) fn room(columns: usize, lanes: usize) -> usize {
    columns.next_multiple_of(lanes)
}

/// Returns the place of a column's sum among those of its row.
pub(in crate::gemm) fn place(column: usize, columns: usize, lanes: usize) -> usize {
    if column < columns / lanes * lanes { column } else { column + room(columns, lanes) - columns }
}

/// Returns the number of columns in a strip of `rows` rows: their sums fill half of the first cache. It is two
/// vectors or more, so that a vector fewer leaves one.
pub(in crate::gemm) fn most_columns<T>(rows: usize, lanes: usize) -> usize {
    let bytes = Caches::current().first / 2;
    (bytes / (rows * size_of::<T>()) / lanes * lanes).max(2 * lanes)
}

/// Computes the sums of each row and column, in the order of the tree. `DEPTH` rows of the matrix are read side by side.
///
/// # Safety
/// The CPU has `V`'s instruction set. The rows and columns cover the tree's indices, and the buffer has room for all
/// unfinished nodes and one more.
#[inline(always)]
pub(in crate::gemm) unsafe fn sums_of_strip<V, E, const ROWS: usize, const DEPTH: usize>(t: &Strip<'_, E>)
where
    V: Vector,
    E: StoredIn<V> + Widen<Wide = V::T>,
{
    let node_len = ROWS * room(t.columns, V::LANES);
    let mut node = t.nodes;
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        for block in &t.tree.blocks {
            let leaves = &t.tree.leaves[block.leaves.clone()];
            let mut at = block.start;
            for (i, leaf) in leaves.iter().enumerate() {
                let end = at + leaf.len as usize;
                let start = at;
                while at < end {
                    let deep = end - at >= DEPTH;
                    if deep {
                        add_rows::<V, E, ROWS, DEPTH>(t, at, at == start, node);
                    } else {
                        add_rows::<V, E, ROWS, 1>(t, at, at == start, node);
                    }
                    at += if deep { DEPTH } else { 1 };
                }
                let merges = leaf.merges + if i + 1 == leaves.len() { block.merges } else { 0 };
                for _ in 0..merges {
                    node = node.sub(node_len);
                    for place in (0..node_len).step_by(V::LANES) {
                        let left = node.add(place);
                        V::load(left).add(V::load(left.add(node_len))).store(left);
                    }
                }
                node = node.add(node_len);
            }
        }
    }
}

/// Adds the products of `DEPTH` indices from `at` on to a node, or makes it of them if they are the first.
///
/// # Safety
/// The conditions of [`sums_of_strip`] hold; the indices are inside the contraction.
#[inline(always)]
unsafe fn add_rows<V, E, const ROWS: usize, const DEPTH: usize>(
    t: &Strip<'_, E>,
    at: usize,
    first: bool,
    node: *mut V::T,
) where
    V: Vector,
    E: StoredIn<V> + Widen<Wide = V::T>,
{
    let room = room(t.columns, V::LANES);
    // SAFETY: the caller's promise, for everything below; the last vector ends with the last column.
    unsafe {
        let mut x = [[V::sum_identity(); DEPTH]; ROWS];
        for (row, x) in x.iter_mut().enumerate() {
            for (i, x) in x.iter_mut().enumerate() {
                *x = V::splat(*t.rows.add((at + i) * ROWS + row));
            }
        }
        let matrix = t.matrix.wrapping_add(at * t.step);
        for place in (0..room).step_by(V::LANES) {
            let column = place.min(t.columns - V::LANES);
            // Adding a product to -0.0 gives that product, also if it is a signed zero.
            let mut sums = [V::sum_identity(); ROWS];
            if !first {
                for (row, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load(node.add(row * room + place));
                }
            }
            for i in 0..DEPTH {
                let loaded = E::load_lanes(matrix.wrapping_add(i * t.step + column));
                for (sum, x) in sums.iter_mut().zip(&x) {
                    *sum = x[i].fma(loaded, *sum);
                }
            }
            for (row, sum) in sums.iter().enumerate() {
                sum.store(node.add(row * room + place));
            }
        }
    }
}
