//! The summation tree, the order in which a reduction combines elements. It depends on the reduced extents alone.
//!
//! Reduced dims are taken outermost first. [`SplitRule::Halves`] splits a dim's range: outer dims down to single
//! indices, the innermost one down to *leaves* of at most [`LEAF`]. In a leaf neighbours are added: elements 0 and 1, 2
//! and 3, …, then those sums in the same way; an element without a neighbour moves up unchanged. So a leaf is a tree
//! itself, and any aligned part of it whose length is a power of two is one of its nodes.
//!
//! The tree is evaluated in two ways, which both vectorise. [`RowTree`] takes contiguous rows. In a short row it pads every
//! leaf to 32 elements with the reduction's identity, joins the [neighbours](crate::sums::neighbours) in two leaves at a time, and
//! then the results level by level. In several rows, or in a long one, it evaluates as many [leaves](crate::sums::leaves) at a
//! time as a vector has lanes.
//! [`merges`] lists the tree for a stack machine: push an element, then join the two topmost entries a listed number of
//! times. There an entry can be a block of columns.

use std::ops::Range;

use crate::isa::simd::Isa;
use crate::memory::KernelList;
use crate::num::real::Num;
use crate::summation::{LEAF, SplitRule};
use crate::sums::lanes;
use crate::sums::leaves::{RowStarts, RowsFold, leaf_count};
use crate::sums::neighbours::{self, Joiner, PAIR, Shuffles, TreeFold};
use crate::sums::reducer::Reducer;
use crate::sums::row_terms::{Elements, RowTerm};

/// The tree over a contiguous row of a fixed length, with the buffers to evaluate it.
///
/// ```
/// use isoshard_kernels::{MaxReducer, RowTree, SumReducer};
/// let row = [1e8f32, 1.0, 1.0, -1e8, 2.0];
/// assert_eq!(RowTree::new(5).fold::<SumReducer>(&row), ((1e8 + 1.0) + (1.0 - 1e8)) + 2.0);
/// assert_eq!(RowTree::new(5).fold::<MaxReducer>(&row), 1e8);
/// ```
pub struct RowTree<T> {
    len: usize,
    /// The leaves of a row that is no longer than a block.
    block: BlockLeaves,
    nodes: Vec<T>,
    shuffles: Shuffles,
    isa: Isa,
    /// The memory of [`RowsFold`].
    many_nodes: Vec<T>,
}

/// The largest number of elements in a block. A block's nodes fill a part of the nearest cache.
const BLOCK: usize = 8192;

/// The leaves of a block, in pairs that are siblings.
struct BlockLeaves {
    len: usize,
    /// True if every leaf has [`LEAF`] elements, so that no leaf needs padding and `pairs` is empty.
    full: bool,
    pairs: Vec<LeafPair>,
}

/// Two neighbouring leaves: the start of the first, and their lengths. The second may be missing: its length is 0.
#[derive(Clone, Copy)]
struct LeafPair {
    start: u32,
    lens: [u8; 2],
}

impl<T: Num> RowTree<T> {
    /// Returns the tree over `len` elements.
    pub fn new(len: usize) -> Self {
        let block = BlockLeaves::new(if len <= BLOCK { len } else { 0 });
        // Each pair of leaves leaves the joiner 8 nodes.
        let nodes = vec![T::ZERO; 8 * block.pair_count()];
        RowTree {
            len,
            block,
            nodes,
            shuffles: Shuffles::detect(),
            isa: Isa::current(),
            many_nodes: Vec::new(),
        }
    }

    /// Returns the reduction of `row`.
    #[inline(always)]
    pub fn fold<F: Reducer<T>>(&mut self, row: &[T]) -> T {
        assert_eq!(row.len(), self.len, "the row has the tree's length");
        if self.len <= BLOCK {
            return self.block.fold::<T, F>(row, &mut self.nodes, self.shuffles);
        }
        let mut node = [T::ZERO];
        self.fold_at::<F>(row, RowStarts::Strided { first: 0, stride: 0 }, &mut node);
        node[0]
    }

    /// Sets `out[i]` to the reduction of row `i` of `rows`. Many leaves are evaluated at once, so this is faster than a
    /// call per row.
    ///
    /// ```
    /// use isoshard_kernels::{RowTree, SumReducer};
    /// let mut sums = [0.0; 2];
    /// RowTree::new(3).fold_rows::<SumReducer>(&[1.0, 2.0, 3.0, 10.0, 20.0, 30.0], &mut sums);
    /// assert_eq!(sums, [6.0, 60.0]);
    /// ```
    ///
    /// # Panics
    /// Panics if `rows` has not a row for each result.
    #[inline(always)]
    pub fn fold_rows<F: Reducer<T>>(&mut self, rows: &[T], out: &mut [T]) {
        assert_eq!(rows.len(), self.len * out.len(), "a row of the tree's length for each result");
        self.fold_at::<F>(rows, RowStarts::Strided { first: 0, stride: self.len }, out);
        out.iter_mut().for_each(|node| *node = F::finish(*node));
    }

    /// Sets `out[i]` to the node of row `i` of `data`. It is not finished.
    ///
    /// # Panics
    /// Panics if a row is not inside `data`.
    #[inline(always)]
    pub(crate) fn fold_at<F: Reducer<T>>(&mut self, data: &[T], starts: RowStarts<'_>, out: &mut [T]) {
        self.fold_terms_at::<Elements, F>(data, starts, out);
    }

    /// Does the same with terms of the elements.
    #[inline(always)]
    pub(crate) fn fold_terms_at<X: RowTerm<T>, F: Reducer<T>>(
        &mut self,
        data: &[X::Element],
        starts: RowStarts<'_>,
        out: &mut [T],
    ) {
        if self.len == 0 {
            return out.fill(F::EMPTY);
        }
        let leaves = leaf_count(self.len);
        let fold = RowsFold::<X, T> { data, len: self.len, starts, nodes: &mut self.many_nodes, out };
        lanes::run::<T, F, _>(self.isa, leaves, fold);
    }

    /// Returns the length of a row.
    pub(crate) fn row_len(&self) -> usize {
        self.len
    }
}

impl BlockLeaves {
    fn new(len: usize) -> BlockLeaves {
        let depth = SplitRule::Halves.depth(len, LEAF);
        let full = len == LEAF << depth;
        let mut pairs = Vec::with_capacity(if full { 0 } else { 1 << depth.saturating_sub(1) });
        if !full {
            place(0, len, depth, &mut pairs);
        }
        BlockLeaves { len, full, pairs }
    }

    /// Returns the number of pairs of leaves; a single leaf is a pair.
    fn pair_count(&self) -> usize {
        self.pairs.len().max(self.len.div_ceil(PAIR))
    }

    /// Returns the reduction of `row`, which is as long as the block. `nodes` has room for eight nodes per pair.
    #[inline(always)]
    fn fold<T: Num, F: Reducer<T>>(&self, row: &[T], nodes: &mut [T], shuffles: Shuffles) -> T {
        if self.len == 0 {
            return F::EMPTY;
        }
        neighbours::run::<T, F, _>(BlockFold { block: self, row, nodes }, shuffles)
    }
}

/// The reduction of one block, which is not empty.
struct BlockFold<'a, T> {
    block: &'a BlockLeaves,
    row: &'a [T],
    nodes: &'a mut [T],
}

impl<T: Num, F: Reducer<T>> TreeFold<T, F> for BlockFold<'_, T> {
    type Out = T;
    #[inline(always)]
    fn run<J: Joiner>(self, joiner: J) -> T {
        let BlockFold { block, row, nodes } = self;
        let nodes = &mut nodes[..8 * block.pair_count()];
        let places = nodes.as_chunks_mut::<8>().0;
        if block.full && block.len >= PAIR {
            for (pair, node) in row.as_chunks::<PAIR>().0.iter().zip(places) {
                *node = joiner.eighths::<T, F>(pair);
            }
        } else if block.full {
            return joiner.leaf::<T, F>(row.first_chunk().expect("a whole leaf"));
        } else {
            for (pair, node) in block.pairs.iter().zip(places) {
                let lens = [usize::from(pair.lens[0]), usize::from(pair.lens[1])];
                *node = joiner.eighths_at::<T, F>(row, pair.start as usize, lens);
            }
        }
        joiner.fold::<T, F>(nodes)
    }
}

/// The tree by [`SplitRule::PowerOfTwo`] over consecutive whole leaves of a row, with the buffers to evaluate it. The
/// other leaves of the row are absent: a node with one part is that part.
///
/// ```
/// use isoshard_kernels::{BlockTree, SumReducer};
/// let row: Vec<f32> = (0..96).map(|i| i as f32).collect();
/// let mut tree = BlockTree::new(96);
/// assert_eq!(tree.fold::<SumReducer>(0, &row), 4560.0);
/// // The same elements as leaves 1, 2 and 3 of a longer row: the second and the third are neighbours.
/// assert_eq!(tree.fold::<SumReducer>(1, &row), 4560.0);
/// ```
pub struct BlockTree<T> {
    nodes: Vec<T>,
    shuffles: Shuffles,
}

impl<T: Num> BlockTree<T> {
    /// Returns the tree for rows of up to `len` elements.
    pub fn new(len: usize) -> Self {
        BlockTree { nodes: vec![T::ZERO; len / LEAF], shuffles: Shuffles::detect() }
    }

    /// Returns the reduction of `row`, the elements of whole leaves from leaf `first` on.
    ///
    /// # Panics
    /// Panics if the row is longer than the tree allows, or its length is no multiple of [`LEAF`].
    #[inline(always)]
    pub fn fold<F: Reducer<T>>(&mut self, first: usize, row: &[T]) -> T {
        let count = row.len() / LEAF;
        assert!(row.len().is_multiple_of(LEAF) && count <= self.nodes.len(), "whole leaves that fit");
        if count == 0 {
            return F::EMPTY;
        }
        let fold = LeavesFold { first, count, row, nodes: &mut self.nodes };
        neighbours::run::<T, F, _>(fold, self.shuffles)
    }

    /// Sets `out[i]` to the reduction of row `i` of `data`, whose rows have `len` elements: of the leaves `leaves[i]` of
    /// the row, which are counted from leaf `first` on. The CPU overlaps the joins of several rows.
    ///
    /// ```
    /// use isoshard_kernels::{BlockTree, SumReducer};
    /// let rows: Vec<f32> = (0..128).map(|i| i as f32).collect();
    /// let mut sums = [0.0; 2];
    /// BlockTree::new(64).fold_rows::<SumReducer>(0, (&rows, 64), &[0..2, 1..2], &mut sums);
    /// assert_eq!(sums, [2016.0, 3568.0]);
    /// ```
    ///
    /// # Panics
    /// Panics if a row is longer than the tree allows, or its length is no multiple of [`LEAF`].
    #[inline(always)]
    pub fn fold_rows<F: Reducer<T>>(
        &mut self,
        first: usize,
        (data, len): (&[T], usize),
        leaves: &[Range<usize>],
        out: &mut [T],
    ) {
        assert!(len.is_multiple_of(LEAF) && len / LEAF <= self.nodes.len(), "whole leaves that fit");
        let nodes = &mut self.nodes[..];
        neighbours::run::<T, F, _>(RowsOfLeaves { first, data, len, leaves, nodes, out }, self.shuffles);
    }
}

/// The reductions of rows by [`LeavesFold`].
struct RowsOfLeaves<'a, T> {
    first: usize,
    data: &'a [T],
    len: usize,
    leaves: &'a [Range<usize>],
    nodes: &'a mut [T],
    out: &'a mut [T],
}

impl<T: Num, F: Reducer<T>> TreeFold<T, F> for RowsOfLeaves<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<J: Joiner>(self, joiner: J) {
        let rows = self.data.chunks_exact(self.len.max(1)).zip(self.leaves);
        for ((row, leaves), out) in rows.zip(self.out) {
            let (first, count) = (self.first + leaves.start, leaves.len());
            let row = &row[leaves.start * LEAF..leaves.end * LEAF];
            let fold = LeavesFold { first, count, row, nodes: &mut *self.nodes };
            *out = if count == 0 { F::EMPTY } else { F::finish(TreeFold::<T, F>::run(fold, joiner)) };
        }
    }
}

/// The reduction of `count` whole leaves, at least one, from leaf `first` on.
struct LeavesFold<'a, T> {
    first: usize,
    count: usize,
    row: &'a [T],
    nodes: &'a mut [T],
}

impl<T: Num, F: Reducer<T>> TreeFold<T, F> for LeavesFold<'_, T> {
    type Out = T;
    #[inline(always)]
    fn run<J: Joiner>(self, joiner: J) -> T {
        let LeavesFold { first, count, row, nodes } = self;
        let (pairs, last) = row.as_chunks::<PAIR>();
        for (pair, node) in pairs.iter().zip(nodes.chunks_exact_mut(2)) {
            let [a, b, c, d, e, f, g, h] = joiner.eighths::<T, F>(pair);
            node[0] = F::join(F::join(a, b), F::join(c, d));
            node[1] = F::join(F::join(e, f), F::join(g, h));
        }
        if let Some(last) = last.first_chunk() {
            nodes[count - 1] = joiner.leaf::<T, F>(last);
        }
        join_leaves(first, &mut nodes[..count], F::join)
    }
}

/// Joins the nodes of consecutive leaves, at least one, from leaf `first` on: [`BlockTree`]'s tree. Nodes can be vectors.
#[inline(always)]
pub(crate) fn join_leaves<N: Copy>(mut first: usize, nodes: &mut [N], join: impl Fn(N, N) -> N) -> N {
    let mut count = nodes.len();
    while count > 1 {
        let (last, parent) = (first + count, first / 2);
        for (i, node) in (parent..last.div_ceil(2)).enumerate() {
            // A node's parts: the left one is absent below `first`, the right one from `last` on.
            let (left, right) = (2 * node, 2 * node + 1);
            nodes[i] = match (left >= first, right < last) {
                (true, true) => join(nodes[left - first], nodes[right - first]),
                (true, false) => nodes[left - first],
                (false, _) => nodes[right - first],
            };
        }
        (first, count) = (parent, last.div_ceil(2) - parent);
    }
    nodes[0]
}

/// Returns the largest element, ignoring NaNs. It serves as a shift that cancels out later, for which the sign of a
/// zero does not matter and NaNs propagate through other operands.
///
/// ```
/// use isoshard_kernels::row_max;
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
/// times. One entry remains at the end. `leaf` is [`LEAF`](crate::summation::LEAF) for the innermost reduced dim and 1 for
/// the others.
///
/// ```
/// use isoshard_kernels::merges;
/// assert_eq!(merges(5, 32), [0, 1, 0, 2, 1]); // ((0 1) (2 3)) 4
/// ```
pub fn merges(len: usize, leaf: usize) -> Vec<u8> {
    merge_list(len, leaf).to_vec()
}

/// Returns [`merges`] in memory that a limit counts. Unwinds up to [`catch`](crate::memory::catch) if there is no room.
pub(crate) fn merge_list(len: usize, leaf: usize) -> KernelList<u8> {
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
    let mut list = KernelList::new();
    list.resize(len);
    if len > 0 {
        fill(0, len, leaf, &mut list);
    }
    list
}

/// Appends the leaves of `a..b`, in pairs, as those of a perfect binary tree of `depth` levels.
fn place(a: usize, b: usize, depth: u32, pairs: &mut Vec<LeafPair>) {
    let mid = if b - a > LEAF { SplitRule::Halves.mid(a, b) } else { b };
    if depth > 1 {
        place(a, mid, depth - 1, pairs);
        // A leaf above the last level has no sibling there, so a whole pair is missing.
        place(mid, b, depth - 1, pairs);
        return;
    }
    pairs.push(LeafPair { start: a as u32, lens: [(mid - a) as u8, (b - mid) as u8] });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, MaxReducer, MinReducer, SumReducer, with_isa};

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

    /// A join whose result depends on the grouping of its operands.
    #[derive(Clone, Copy)]
    struct Uneven;

    impl<T: Num> Reducer<T> for Uneven {
        const PAD: T = T::LOWEST;
        const EMPTY: T = T::ZERO;
        #[inline(always)]
        fn join(a: T, b: T) -> T {
            let apart = a.sub(b);
            let float = T::DTYPE.is_float();
            let joint = if float { apart.magnitude().add(T::constant(0.75)) } else { apart.mul(apart) };
            let joint = if b == Self::PAD { a } else { joint };
            if a == Self::PAD { b } else { joint }
        }
    }

    /// Compares the tree over each length with its definition, in one type and with each instruction set.
    fn check_every_length<T: Num>(lens: impl IntoIterator<Item = usize>) {
        fn by_definition<T: Num>(x: &[T]) -> T {
            let left = match x.len() {
                0 => return T::ZERO,
                1 => return x[0],
                len if len <= LEAF => len.next_power_of_two() / 2,
                len => len.div_ceil(2),
            };
            let (a, b) = x.split_at(left);
            Uneven::join(by_definition(a), by_definition(b))
        }
        for len in lens {
            // The elements after the row are not part of it.
            let x: Vec<T> = (0..len + 99).map(|i| T::constant((i * 7919 % 127) as f64)).collect();
            let want = by_definition(&x[..len]);
            for &isa in Isa::available() {
                let got = with_isa(isa, || RowTree::new(len).fold::<Uneven>(&x[..len]));
                assert_eq!(got, want, "{len} elements of {}, {isa:?}", T::DTYPE);
                let mut tree = with_isa(isa, || RowTree::new(len));
                tree.fold::<Uneven>(&x[1..][..len]);
                assert_eq!(tree.fold::<Uneven>(&x[..len]), want, "a second row of {len}");
            }
        }
    }

    #[test]
    fn every_length_follows_the_definition_in_every_type() {
        check_every_length::<f32>((0..700).chain(BLOCK - 33..BLOCK + 34));
        check_every_length::<f32>([
            2 * BLOCK - 1,
            2 * BLOCK,
            2 * BLOCK + 1,
            3 * BLOCK + 5,
            8 * BLOCK,
            100_003,
        ]);
        check_every_length::<f64>((0..300).chain([BLOCK + 1, 20_001]));
        check_every_length::<i64>((0..300).chain([BLOCK + 1, 20_001]));
        check_every_length::<u8>((0..300).chain([BLOCK + 1, 20_001]));
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
