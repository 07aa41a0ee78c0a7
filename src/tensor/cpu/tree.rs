//! The summation tree, the order in which a reduction combines elements. It depends on the reduced extents alone.
//!
//! Reduced dims are taken outermost first. [`SplitRule::Halves`] splits a dim's range: outer dims down to single
//! indices, the innermost one down to *leaves* of at most [`LEAF`]. In a leaf neighbours are added: elements 0 and 1, 2
//! and 3, …, then those sums in the same way; an element without a neighbour moves up unchanged. So a leaf is a tree
//! itself, and any aligned part of it whose length is a power of two is one of its nodes.
//!
//! The tree is evaluated in two ways, which both vectorise. [`RowTree`] takes a contiguous row: it pads every leaf to
//! 32 elements with the reduction's identity, and then halves the whole row level by level. [`merges`] lists the tree
//! for a stack machine: push an element, then join the two topmost entries a listed number of times. There an entry can
//! be a block of columns.

use super::real::Num;
use crate::tensor::{LEAF, SplitRule};

/// The operation that joins two nodes of a tree.
pub trait Reducer<T>: Copy {
    /// The identity on the right: `join(a, PAD)` is `a`.
    const PAD: T;
    /// The result over no elements.
    const EMPTY: T;
    /// Joins two nodes; `a` has the lower indices.
    fn join(a: T, b: T) -> T;
    /// Returns the result from the node of the whole range, which may be a single element that was never joined.
    #[inline(always)]
    fn finish(a: T) -> T {
        a
    }
}

/// The sum.
#[derive(Clone, Copy)]
pub struct SumReducer;

/// The maximum, [`Num::max`].
#[derive(Clone, Copy)]
pub struct MaxReducer;

/// The minimum, [`Num::min`].
#[derive(Clone, Copy)]
pub struct MinReducer;

impl<T: Num> Reducer<T> for SumReducer {
    const PAD: T = T::SUM_PAD;
    const EMPTY: T = T::ZERO;
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.add(b)
    }
}

impl<T: Num> Reducer<T> for MaxReducer {
    const PAD: T = T::LOWEST;
    const EMPTY: T = T::LOWEST;
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.max(b)
    }
    /// Returns the canonical NaN for any NaN, as a join does.
    #[inline(always)]
    fn finish(a: T) -> T {
        a.max(Self::PAD)
    }
}

impl<T: Num> Reducer<T> for MinReducer {
    const PAD: T = T::HIGHEST;
    const EMPTY: T = T::HIGHEST;
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.min(b)
    }
    #[inline(always)]
    fn finish(a: T) -> T {
        a.min(Self::PAD)
    }
}

/// The tree over a contiguous row of a fixed length, with the buffers to evaluate it.
///
/// ```
/// use isoshard::tensor::cpu::{MaxReducer, RowTree, SumReducer};
/// let row = [1e8f32, 1.0, 1.0, -1e8, 2.0];
/// assert_eq!(RowTree::new(5).fold::<SumReducer>(&row), ((1e8 + 1.0) + (1.0 - 1e8)) + 2.0);
/// assert_eq!(RowTree::new(5).fold::<MaxReducer>(&row), 1e8);
/// ```
pub struct RowTree<T> {
    len: usize,
    /// The leaves, `(start, length)`, as those of a perfect binary tree; missing leaves have length 0.
    leaves: Vec<(usize, usize)>,
    /// True if every leaf has [`LEAF`] elements, so that rows need no padding.
    full: bool,
    even: Vec<T>,
    odd: Vec<T>,
    sums: Vec<T>,
}

/// The number of leaves that are padded together, so that each level is one long loop.
const GROUP: usize = 16;

impl<T: Num> RowTree<T> {
    /// Returns the tree over `len` elements.
    pub fn new(len: usize) -> Self {
        let depth = SplitRule::Halves.depth(len, LEAF);
        let mut leaves = Vec::with_capacity(1 << depth);
        place(0, len, depth, &mut leaves);
        let full = leaves.iter().all(|s| s.1 == LEAF);
        let sums = if full { 0 } else { leaves.len() };
        let scratch = if full { len / 2 } else { (GROUP * LEAF).max(sums) };
        RowTree {
            len,
            leaves,
            full,
            even: vec![T::ZERO; scratch],
            odd: vec![T::ZERO; scratch],
            sums: vec![T::ZERO; sums],
        }
    }

    /// Returns the reduction of `row`.
    #[inline(always)]
    pub fn fold<F: Reducer<T>>(&mut self, row: &[T]) -> T {
        assert_eq!(row.len(), self.len, "the row has the tree's length");
        if self.len == 0 {
            return F::EMPTY;
        }
        if self.full {
            let half = self.len / 2;
            halve::<T, F>(row, &mut self.odd[..half]);
            return halve_to::<T, F>(&mut self.odd, &mut self.even, half, 1);
        }
        for (leaves, sums) in self.leaves.chunks(GROUP).zip(self.sums.chunks_mut(GROUP)) {
            for (&(start, len), leaf) in leaves.iter().zip(self.even.chunks_exact_mut(LEAF)) {
                pad::<T, F>(row, start, len, leaf);
            }
            let count = leaves.len();
            // After five levels, an odd number, the result is in the other buffer.
            halve_to::<T, F>(&mut self.even, &mut self.odd, count * LEAF, count);
            sums.copy_from_slice(&self.odd[..count]);
        }
        self.even[..self.sums.len()].copy_from_slice(&self.sums);
        halve_to::<T, F>(&mut self.even, &mut self.odd, self.sums.len(), 1)
    }
}

/// The tree by [`SplitRule::PowerOfTwo`] over consecutive whole leaves of a row, with the buffers to evaluate it. The
/// other leaves of the row are absent: a node with one part is that part.
///
/// ```
/// use isoshard::tensor::cpu::{BlockTree, SumReducer};
/// let row: Vec<f32> = (0..96).map(|i| i as f32).collect();
/// let mut tree = BlockTree::new(96);
/// assert_eq!(tree.fold::<SumReducer>(0, &row), 4560.0);
/// // The same elements as leaves 1, 2 and 3 of a longer row: the second and the third are neighbours.
/// assert_eq!(tree.fold::<SumReducer>(1, &row), 4560.0);
/// ```
pub struct BlockTree<T> {
    even: Vec<T>,
    odd: Vec<T>,
}

impl<T: Num> BlockTree<T> {
    /// Returns the tree for rows of up to `len` elements.
    pub fn new(len: usize) -> Self {
        BlockTree { even: vec![T::ZERO; len / 2], odd: vec![T::ZERO; len / 2] }
    }

    /// Returns the reduction of `row`, the elements of whole leaves from leaf `first` on.
    ///
    /// # Panics
    /// Panics if the row is longer than the tree allows, or its length is no multiple of [`LEAF`].
    #[inline(always)]
    pub fn fold<F: Reducer<T>>(&mut self, first: usize, row: &[T]) -> T {
        assert!(row.len().is_multiple_of(LEAF) && row.len() / 2 <= self.odd.len(), "whole leaves that fit");
        let (mut first, mut count) = (first, row.len() / LEAF);
        if count == 0 {
            return F::EMPTY;
        }
        halve::<T, F>(row, &mut self.odd[..row.len() / 2]);
        // After four more levels, an even number, the leaves' values are in the same buffer.
        halve_to::<T, F>(&mut self.odd, &mut self.even, row.len() / 2, count);
        let nodes = &mut self.odd;
        while count > 1 {
            let (last, parent) = (first + count, first / 2);
            for (i, node) in (parent..last.div_ceil(2)).enumerate() {
                // A node's parts: the left one is absent below `first`, the right one from `last` on.
                let (left, right) = (2 * node, 2 * node + 1);
                nodes[i] = match (left >= first, right < last) {
                    (true, true) => F::join(nodes[left - first], nodes[right - first]),
                    (true, false) => nodes[left - first],
                    (false, _) => nodes[right - first],
                };
            }
            (first, count) = (parent, last.div_ceil(2) - parent);
        }
        nodes[0]
    }
}

/// Returns the largest element, ignoring NaNs. It serves as a shift that cancels out later, for which the sign of a
/// zero does not matter and NaNs propagate through other operands.
///
/// ```
/// use isoshard::tensor::cpu::row_max;
/// assert_eq!(row_max(&[1.0f32, f32::NAN, 3.0]), 3.0);
/// ```
#[inline(always)]
pub fn row_max<T: Num>(row: &[T]) -> T {
    #[inline(always)]
    fn join<T: Num>(a: T, b: T) -> T {
        if b > a { b } else { a }
    }
    let mut lanes = [T::LOWEST; LEAF];
    let (blocks, rest) = row.as_chunks::<LEAF>();
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane = join(*lane, x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = join(*lane, x);
    }
    let mut width = LEAF;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
    }
    lanes[0]
}

/// Returns the tree over `len` indices as a list: after pushing index `i`, join the two topmost entries `list[i]`
/// times. One entry remains at the end. `leaf` is [`LEAF`](crate::tensor::LEAF) for the innermost reduced dim and 1 for
/// the others.
///
/// ```
/// use isoshard::tensor::cpu::merges;
/// assert_eq!(merges(5, 32), [0, 1, 0, 2, 1]); // ((0 1) (2 3)) 4
/// ```
pub fn merges(len: usize, leaf: usize) -> Vec<u8> {
    fn fill(a: usize, b: usize, leaf: usize, list: &mut [u8]) {
        if b - a > leaf {
            let mid = SplitRule::Halves.mid(a, b);
            fill(a, mid, leaf, list);
            fill(mid, b, leaf, list);
            list[b - 1] += 1;
            return;
        }
        let last = b - a - 1;
        for (i, joins) in list[a..b].iter_mut().enumerate() {
            // As in a binary counter; the last element also joins the nodes that had no neighbour.
            let carries = if i < last { i.trailing_ones() } else { i.count_ones() };
            *joins = carries as u8;
        }
    }
    let mut list = vec![0; len];
    if len > 0 {
        fill(0, len, leaf, &mut list);
    }
    list
}

/// Appends the leaves of `a..b` as those of a perfect binary tree of `depth` levels.
fn place(a: usize, b: usize, depth: u32, leaves: &mut Vec<(usize, usize)>) {
    if b - a > LEAF {
        let mid = SplitRule::Halves.mid(a, b);
        place(a, mid, depth - 1, leaves);
        place(mid, b, depth - 1, leaves);
        return;
    }
    leaves.push((a, b - a));
    leaves.resize(leaves.len() + (1 << depth) - 1, (0, 0));
}

/// Copies a leaf of `row` into `leaf` and pads it.
#[inline(always)]
fn pad<T: Num, F: Reducer<T>>(row: &[T], start: usize, len: usize, leaf: &mut [T]) {
    let leaf: &mut [T; LEAF] = leaf.try_into().expect("a leaf's width");
    if let Some(wide) = row.get(start..start + LEAF) {
        // Copies the full width at once and overwrites the elements after the leaf.
        leaf.copy_from_slice(wide);
        leaf[len..].fill(F::PAD);
        return;
    }
    leaf[..len].copy_from_slice(&row[start..start + len]);
    leaf[len..].fill(F::PAD);
}

/// Joins neighbours, one level of the tree.
#[inline(always)]
fn halve<T: Num, F: Reducer<T>>(src: &[T], dst: &mut [T]) {
    for (d, pair) in dst.iter_mut().zip(src.chunks_exact(2)) {
        *d = F::join(pair[0], pair[1]);
    }
}

/// Joins neighbours from `len` values in `a` down to `to`, alternating between the buffers, and returns the first
/// result.
#[inline(always)]
fn halve_to<T: Num, F: Reducer<T>>(a: &mut [T], b: &mut [T], mut len: usize, to: usize) -> T {
    let (mut src, mut dst) = (a, b);
    while len > to {
        len /= 2;
        halve::<T, F>(&src[..2 * len], &mut dst[..len]);
        std::mem::swap(&mut src, &mut dst);
    }
    src[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the sum by the definition of the tree.
    fn by_definition(x: &[f32]) -> f32 {
        fn leaf(x: &[f32]) -> f32 {
            let mut level = x.to_vec();
            while level.len() > 1 {
                level = level.chunks(2).map(|c| if c.len() == 2 { c[0] + c[1] } else { c[0] }).collect();
            }
            level[0]
        }
        if x.len() <= LEAF {
            return if x.is_empty() { 0.0 } else { leaf(x) };
        }
        let (a, b) = x.split_at(x.len().div_ceil(2));
        by_definition(a) + by_definition(b)
    }

    fn by_stack(x: &[f32]) -> f32 {
        let mut stack: Vec<f32> = Vec::new();
        for (&x, &m) in x.iter().zip(&merges(x.len(), LEAF)) {
            stack.push(x);
            for _ in 0..m {
                let top = stack.pop().unwrap();
                *stack.last_mut().unwrap() += top;
            }
        }
        assert!(stack.len() <= 1);
        stack.first().copied().unwrap_or(0.0)
    }

    #[test]
    fn row_and_stack_follow_the_definition() {
        let x: Vec<f32> = (0..5000).map(|i| ((i * 7919 % 1009) as f32 - 500.0) * 1.000_123).collect();
        for n in (0..1200).chain([1536, 2048, 2049, 4095, 4096, 4097, 5000]) {
            let want = by_definition(&x[..n]).to_bits();
            assert_eq!(RowTree::new(n).fold::<SumReducer>(&x[..n]).to_bits(), want, "{n}");
            assert_eq!(by_stack(&x[..n]).to_bits(), want, "{n}");
        }
        assert_eq!(RowTree::new(1).fold::<SumReducer>(&[-0.0f32]).to_bits(), (-0.0f32).to_bits());
        assert_eq!(RowTree::new(3).fold::<MaxReducer>(&[-5i32, -7, -6]), -5);
        assert_eq!(RowTree::new(0).fold::<MaxReducer>(&[] as &[i32]), i32::MIN);
        assert!(RowTree::new(3).fold::<MinReducer>(&[1.0f32, f32::NAN, 0.0]).is_nan());
    }

    #[test]
    fn whole_leaves_follow_the_definition_and_absent_ones_change_nothing() {
        fn by_definition(x: &[Option<f32>]) -> Option<f32> {
            if let [x] = x {
                return *x;
            }
            let (a, b) = x.split_at(SplitRule::PowerOfTwo.left_of(x.len()));
            match (by_definition(a), by_definition(b)) {
                (Some(a), Some(b)) => Some(a + b),
                (a, b) => a.or(b),
            }
        }
        let x: Vec<f32> = (0..640).map(|i| ((i * 7919 % 1009) as f32 - 500.0) * 1.000_123).collect();
        for leaves in 1..20 {
            for first in 0..leaves {
                let (from, to) = (first * LEAF, leaves * LEAF);
                let present: Vec<_> = (0..640).map(|i| (from..to).contains(&i).then(|| x[i])).collect();
                let got = BlockTree::new(to - from).fold::<SumReducer>(first, &x[from..to]);
                for len in [to, 640] {
                    let want = by_definition(&present[..len]).unwrap();
                    assert_eq!(got.to_bits(), want.to_bits(), "leaves {first} to {leaves} of {len}");
                }
            }
        }
    }

    #[test]
    fn power_of_two_parts_are_nodes() {
        let x: Vec<f32> = (0..768).map(|i| (i as f32).sin()).collect();
        for (n, parts) in [(8, 4), (32, 8), (768, 2), (768, 8), (512, 64)] {
            let sums: Vec<f32> = x[..n].chunks(n / parts).map(by_stack).collect();
            let mut joint = sums.clone();
            while joint.len() > 1 {
                joint = joint.chunks(2).map(|c| c[0] + c[1]).collect();
            }
            assert_eq!(joint[0].to_bits(), by_stack(&x[..n]).to_bits(), "{n} in {parts}");
        }
    }
}
