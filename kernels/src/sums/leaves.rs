//! Reductions of rows along the [summation tree](crate::sums::tree), many leaves at a time.
//!
//! A row of `len` elements is split `depth` times. The lengths of the `2^depth` nodes at that depth differ by at most one: node `i`
//! is a longer one if the bits of `i` in reversed order are less than the remainder of `len / 2^depth`, because a node of odd
//! length has the longer half on its left. No node has more than [`LEAF`] elements; a leaf that ends one level above is two nodes
//! of half its length here, which is its own last join. So all nodes at that depth are evaluated alike: those of a *group*
//! are the [lanes](crate::sums::lanes) of a vector. A group's nodes are neighbours in a row, or in several short rows, and memory
//! is read in order. Joins of whole levels follow.

use std::marker::PhantomData;

use crate::isa::simd::opaque_index;
use crate::num::real::Num;
use crate::summation::{LEAF, SplitRule};
use crate::sums::lanes::{LaneSource, Lanes, LanesFold, LanesPart, PlainLanes, collapse};
use crate::sums::neighbours::{join_levels, level};
use crate::sums::reducer::{JoinOperation, Reducer};
use crate::sums::row_terms::RowTerm;
use crate::sums::unordered::in_any_order;

/// The most splits of a row whose nodes are joined by whole levels. A longer row is several of such rows, so that nodes
/// stay in the nearest cache.
const LEVELS: u32 = 8;
/// The number of nodes that are joined together: those of several short rows.
const NODES: usize = 512;
/// The most nodes of a long row that wait for their neighbours.
const STACK: usize = usize::BITS as usize;

/// The starts of rows in a slice.
#[derive(Clone, Copy)]
pub(crate) enum RowStarts<'a> {
    /// Row `i` starts at `first + i * stride`.
    Strided { first: usize, stride: usize },
    /// Row `i` starts at `first + offsets[i][0]`.
    Listed { first: usize, offsets: &'a [[usize; 2]] },
}

impl RowStarts<'_> {
    #[inline(always)]
    pub(crate) fn of(self, i: usize) -> usize {
        match self {
            RowStarts::Strided { first, stride } => first + i * stride,
            RowStarts::Listed { first, offsets } => first + offsets[i][0],
        }
    }
}

/// Rows of one length, at least 1, and their results. The nodes of whole rows are not [finished](Reducer::finish).
pub(crate) struct RowsFold<'a, X: RowTerm<T>, T: Num> {
    pub(crate) data: &'a [X::Element],
    pub(crate) len: usize,
    pub(crate) starts: RowStarts<'a>,
    /// Memory for nodes, which grows to what is needed.
    pub(crate) nodes: &'a mut Vec<T>,
    pub(crate) out: &'a mut [T],
}

/// Returns the number of nodes at the lowest depth of a row of `len` elements.
pub(crate) fn leaf_count(len: usize) -> usize {
    1 << SplitRule::Halves.depth(len, LEAF)
}

impl<X: RowTerm<T>, T: Num, F: Reducer<T>> LanesFold<T, F> for RowsFold<'_, X, T> {
    const JOINS_LEAVES: bool = true;

    #[inline(always)]
    fn run<L: Lanes<N>, const N: usize>(self, lanes: L) {
        let RowsFold { data, len, starts, nodes, out } = self;
        let row = |i: usize| row_at(data, len, starts, i);
        let leaves = RowLeaves::<N>::new(len);
        if nodes.len() < NODES + STACK {
            nodes.resize(NODES + STACK, T::ZERO);
        }
        let (nodes, stack) = nodes.split_at_mut(NODES);
        // A row is a part of a unit whose nodes are joined by levels, or it is several units.
        let (depth, levels) = (leaves.depth, leaves.depth.min(LEVELS));
        let (rows, units) =
            if depth > LEVELS { (1, 1usize << (depth - LEVELS)) } else { (NODES >> depth, 1) };
        // Hidden from the compiler, which would choose each number of the pattern by itself.
        let patterns = std::hint::black_box(&leaves.patterns);
        // The group's number in its row, the next row, and the place of the group.
        let (mut group, mut next_row, mut at) = (0, 0, data.as_ptr());
        let deeper = leaves.groups.max(1).trailing_zeros();
        for (batch, out) in out.chunks_mut(rows).enumerate() {
            let (count, mut top) = (out.len() << levels, 0);
            for unit in 0..units {
                for nodes in nodes.as_chunks_mut::<N>().0.iter_mut().take(count.div_ceil(N)) {
                    let (mut offsets, mut pattern) = ([0; N], &patterns[0]);
                    let (from, places) = if leaves.groups == 0 {
                        // Several rows; the last group has the last row several times.
                        let last = batch * rows + out.len() - 1;
                        for (lane, offset) in offsets.iter_mut().enumerate() {
                            *offset = row((next_row + (lane >> depth)).min(last)) + pattern.places[lane];
                        }
                        next_row += N >> depth;
                        (data.as_ptr(), &offsets)
                    } else {
                        if group == 0 {
                            at = data.as_ptr().wrapping_add(row(next_row));
                            next_row += 1;
                        }
                        let from = at;
                        let more = leaves.more > 0 && reversed(group, deeper) < leaves.more;
                        pattern = &patterns[usize::from(more)];
                        at = at.wrapping_add(pattern.len);
                        group = (group + 1) & (leaves.groups - 1);
                        (from, &pattern.places)
                    };
                    // SAFETY: `row` has checked that each row is inside, and the places are those of its nodes.
                    *nodes = unsafe {
                        if leaves.groups > 0 && leaves.full == LEAF / N {
                            leaves.nodes::<X, T, F, _, _>(lanes, WholeLeaves(from), &pattern.lens)
                        } else {
                            let places = PlacesAfter { at: from, places };
                            leaves.nodes::<X, T, F, _, _>(lanes, places, &pattern.lens)
                        }
                    };
                }
                lanes.apart::<T, F, _>(LevelsOfNodes { nodes: &mut *nodes, len: count, levels });
                if units > 1 {
                    // The tree above is perfect. Its nodes are joined as a binary counter carries.
                    let mut node = nodes[0];
                    for _ in 0..unit.trailing_ones() {
                        top -= 1;
                        node = F::join(stack[top], node);
                    }
                    stack[top] = node;
                    top += 1;
                }
            }
            out.copy_from_slice(if units > 1 { &stack[..1] } else { &nodes[..out.len()] });
        }
    }

    /// Wrapping sums and products have the same bits in any order. Other rows follow the tree, on x86-64 in little code.
    #[inline(always)]
    fn run_plain(self) {
        if const { !T::DTYPE.is_float() && !matches!(F::OPERATION, JoinOperation::Other) } {
            for (i, out) in self.out.iter_mut().enumerate() {
                *out = in_any_order::<X, T, F>(&self.data[self.starts.of(i)..][..self.len]);
            }
        } else if cfg!(target_arch = "x86_64") {
            for (i, out) in self.out.iter_mut().enumerate() {
                *out = by_definition::<X, T, F>(&self.data[self.starts.of(i)..][..self.len]);
            }
        } else {
            LanesFold::<T, F>::run::<_, 4>(self, PlainLanes);
        }
    }
}

/// Returns the start of row `i` of `len` elements.
///
/// # Panics
/// Panics if the row is not inside `data`.
#[inline(always)]
fn row_at<E>(data: &[E], len: usize, starts: RowStarts<'_>, i: usize) -> usize {
    let start = starts.of(i);
    assert!(data[start..].len() >= len, "the row is inside");
    start
}

/// Returns the node over a row, by the definition of the tree. Padding changes no node.
#[inline(never)]
fn by_definition<X: RowTerm<T>, T: Num, F: Reducer<T>>(row: &[X::Element]) -> T {
    if row.len() > LEAF {
        let (a, b) = row.split_at(SplitRule::Halves.left_of(row.len()));
        return F::join(by_definition::<X, T, F>(a), by_definition::<X, T, F>(b));
    }
    let mut nodes = [F::PAD; LEAF];
    for i in 0..row.len() {
        let i = opaque_index(i);
        nodes[i] = X::of(row[i]);
    }
    join_levels::<T, F>(&mut nodes, LEAF.ilog2());
    nodes[0]
}

/// The nodes of a row at its lowest depth, in groups of `N`.
struct RowLeaves<const N: usize> {
    depth: u32,
    /// The number of groups in a row, or 0 if a row is a part of a group.
    groups: usize,
    /// The two ways in which the longer nodes of a group are distributed.
    patterns: [NodePattern<N>; 2],
    /// A group has the second pattern if its reversed number is less than this.
    more: usize,
    /// The number of vectors that are full in every node, and of those that any node has elements of.
    full: usize,
    used: usize,
}

/// The nodes of a group: their places from the group's start on, their lengths, and the sum of these. If a row is a part of
/// a group, the places begin anew in each row.
struct NodePattern<const N: usize> {
    places: [usize; N],
    /// The elements of each vector of the nodes.
    lens: [[u8; N]; VECTORS],
    len: usize,
}

/// The most vectors of a node.
const VECTORS: usize = LEAF / 4;

/// Returns the lowest `bits` bits of `i` in reversed order.
#[inline(always)]
fn reversed(i: usize, bits: u32) -> usize {
    if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) }
}

impl<const N: usize> RowLeaves<N> {
    fn new(len: usize) -> RowLeaves<N> {
        let depth = SplitRule::Halves.depth(len, LEAF);
        let (shortest, longer) = (len >> depth, len % (1 << depth));
        let in_group = N.ilog2().min(depth);
        let deeper = depth - in_group;
        let pattern = |longer: usize| {
            let (mut places, mut lens, mut next) = ([0; N], [[0; N]; VECTORS], 0);
            for (lane, place) in places.iter_mut().enumerate() {
                let node = lane % (1 << in_group);
                let len = shortest + usize::from(reversed(node, in_group) < longer);
                next = if node == 0 { 0 } else { next };
                *place = next;
                for (i, lens) in lens.iter_mut().enumerate() {
                    lens[lane] = len.saturating_sub(i * N).min(N) as u8;
                }
                next += len;
            }
            NodePattern { places, lens, len: next }
        };
        RowLeaves {
            depth,
            groups: if in_group == N.ilog2() { 1 << deeper } else { 0 },
            patterns: [pattern(longer >> deeper), pattern((longer >> deeper) + 1)],
            more: longer % (1 << deeper),
            full: shortest / N,
            used: (shortest + usize::from(longer > 0)).div_ceil(N),
        }
    }

    /// Returns the nodes of a group.
    ///
    /// # Safety
    /// As many elements as `lens` says follow each place.
    #[inline(always)]
    unsafe fn nodes<X: RowTerm<T>, T: Num, F: Reducer<T>, L: Lanes<N>, P: Places<X::Element>>(
        &self,
        lanes: L,
        at: P,
        lens: &[[u8; N]; VECTORS],
    ) -> [T; N] {
        let group = VectorsOfGroup { lanes, at, lens, full: self.full };
        // SAFETY: the caller's promise.
        unsafe {
            match LEAF / N {
                2 => group.pair::<X, T, F>(0),
                4 if self.used > 2 => lanes.join::<T, F>(group.pair::<X, T, F>(0), group.pair::<X, T, F>(2)),
                4 => group.pair::<X, T, F>(0),
                _ => {
                    let mut node = group.pair::<X, T, F>(0);
                    if self.used > 2 {
                        node = lanes.join::<T, F>(node, group.pair::<X, T, F>(2));
                    }
                    if self.used > 4 {
                        let mut upper = group.pair::<X, T, F>(4);
                        if self.used > 6 {
                            upper = lanes.join::<T, F>(upper, group.pair::<X, T, F>(6));
                        }
                        node = lanes.join::<T, F>(node, upper);
                    }
                    node
                }
            }
        }
    }
}

/// The place of each node of a group.
trait Places<T>: Copy {
    fn at(self, lane: usize) -> *const T;
}

/// Whole leaves side by side.
#[derive(Clone, Copy)]
struct WholeLeaves<T>(*const T);

impl<T: Copy> Places<T> for WholeLeaves<T> {
    #[inline(always)]
    fn at(self, lane: usize) -> *const T {
        self.0.wrapping_add(lane * LEAF)
    }
}

/// Places from a group's start on.
#[derive(Clone, Copy)]
struct PlacesAfter<'a, T, const N: usize> {
    at: *const T,
    places: &'a [usize; N],
}

impl<T: Copy, const N: usize> Places<T> for PlacesAfter<'_, T, N> {
    #[inline(always)]
    fn at(self, lane: usize) -> *const T {
        self.at.wrapping_add(self.places[lane])
    }
}

/// The elements of a group's nodes: from each node a vector, then the next one.
#[derive(Clone, Copy)]
struct VectorsOfGroup<'a, P, L, const N: usize> {
    lanes: L,
    at: P,
    lens: &'a [[u8; N]; VECTORS],
    full: usize,
}

impl<P: Copy, L: Lanes<N>, const N: usize> VectorsOfGroup<'_, P, L, N> {
    /// Returns the nodes over the vectors `i` and `i + 1` of each node.
    ///
    /// # Safety
    /// As many elements as `lens` says follow each place.
    #[inline(always)]
    unsafe fn pair<X: RowTerm<T>, T: Num, F: Reducer<T>>(self, i: usize) -> [T; N]
    where
        P: Places<X::Element>,
    {
        let mut nodes = [F::PAD; N];
        self.lanes.apart::<T, F, _>(PairOfGroup { group: self, i, nodes: &mut nodes, of: PhantomData::<X> });
        nodes
    }
}

/// The vectors `i` and `i + 1` of each node of a group. [`VectorsOfGroup::pair`] makes it, so its promise holds.
struct PairOfGroup<'a, X, T, P, L, const N: usize> {
    group: VectorsOfGroup<'a, P, L, N>,
    i: usize,
    nodes: &'a mut [T; N],
    of: PhantomData<X>,
}

impl<X: RowTerm<T>, T: Num, F: Reducer<T>, P: Places<X::Element>, M, const N: usize> LanesPart<T, F, N>
    for PairOfGroup<'_, X, T, P, M, N>
{
    #[inline(always)]
    fn run<L: Lanes<N>>(self, lanes: L) {
        let PairOfGroup { group: VectorsOfGroup { at, lens, full, .. }, i, nodes, of } = self;
        let (vectors, pad) = (FullVectors { lanes, at, skipped: i * N, of }, F::PAD);
        let lens = [&lens[i], &lens[i + 1]];
        let [a, b] = if i + 1 < full {
            collapse::<T, F, L, _, N, 2>(lanes, vectors)
        } else if i < full {
            collapse::<T, F, L, _, N, 2>(lanes, FirstElements::<_, _, _, _, N, true> { vectors, lens, pad })
        } else {
            collapse::<T, F, L, _, N, 2>(lanes, FirstElements::<_, _, _, _, N, false> { vectors, lens, pad })
        };
        *nodes = lanes.join::<T, F>(a, b);
    }
}

/// Two whole vectors, after as many elements as are skipped.
#[derive(Clone, Copy)]
struct FullVectors<X, P, L> {
    lanes: L,
    at: P,
    skipped: usize,
    of: PhantomData<X>,
}

impl<X: RowTerm<T>, T: Num, P: Places<X::Element>, L: Lanes<N>, const N: usize> LaneSource<T, N, 2>
    for FullVectors<X, P, L>
{
    #[inline(always)]
    fn vectors(self, i: usize) -> [[T; N]; 2] {
        let at = self.at.at(i).wrapping_add(self.skipped);
        // SAFETY: `PairOfGroup` makes it of vectors that are full in every node.
        unsafe { [X::whole(self.lanes, at), X::whole(self.lanes, at.wrapping_add(N))] }
    }
}

/// The first elements of two vectors, and padding. If `FULL` the first vector is whole.
#[derive(Clone, Copy)]
struct FirstElements<'a, X, T, P, L, const N: usize, const FULL: bool> {
    vectors: FullVectors<X, P, L>,
    lens: [&'a [u8; N]; 2],
    pad: T,
}

impl<X: RowTerm<T>, T: Num, P: Places<X::Element>, L: Lanes<N>, const N: usize, const FULL: bool>
    LaneSource<T, N, 2> for FirstElements<'_, X, T, P, L, N, FULL>
{
    #[inline(always)]
    fn vectors(self, i: usize) -> [[T; N]; 2] {
        let (first, second) = (usize::from(self.lens[0][i]), usize::from(self.lens[1][i]));
        let FullVectors { lanes, at, skipped, .. } = self.vectors;
        let at = at.at(i).wrapping_add(skipped);
        // SAFETY: the elements belong to the node, as the caller of `VectorsOfGroup::pair` promises; no vector has more than
        // `N`.
        unsafe {
            let first = if FULL { X::whole(lanes, at) } else { X::first(lanes, at, first, self.pad) };
            [first, X::first(lanes, at.wrapping_add(N), second, self.pad)]
        }
    }
}

/// The joins of neighbours in the first `len` nodes, `levels` times, in place. `len` is a multiple of `2^levels`.
struct LevelsOfNodes<'a, T> {
    nodes: &'a mut [T],
    len: usize,
    levels: u32,
}

impl<T: Num, F: Reducer<T>, const N: usize> LanesPart<T, F, N> for LevelsOfNodes<'_, T> {
    #[inline(always)]
    fn run<L: Lanes<N>>(self, lanes: L) {
        let LevelsOfNodes { nodes, mut len, mut levels } = self;
        while levels >= N.ilog2() && len >= N * N {
            // Nodes after the last one are joined as well, and not used.
            for i in 0..len.div_ceil(N * N) {
                let square = NodeVectors { nodes: &nodes[i * N * N..][..N * N] };
                // The places written are before all that are still to be read.
                let [joined] = collapse::<T, F, L, _, N, 1>(lanes, square);
                nodes[i * N..][..N].copy_from_slice(&joined);
            }
            (len, levels) = (len / N, levels - N.ilog2());
        }
        for _ in 0..levels {
            len /= 2;
            let mut i = 0;
            while i + 16 <= len {
                let joined = level::<T, F, 32, 16>(nodes[2 * i..].first_chunk().expect("two nodes for each"));
                nodes[i..][..16].copy_from_slice(&joined);
                i += 16;
            }
            while i < len {
                nodes[i] = F::join(nodes[2 * i], nodes[2 * i + 1]);
                i += 1;
            }
        }
    }
}

/// `N` vectors of neighbouring nodes.
#[derive(Clone, Copy)]
struct NodeVectors<'a, T> {
    nodes: &'a [T],
}

impl<T: Num, const N: usize> LaneSource<T, N, 1> for NodeVectors<'_, T> {
    #[inline(always)]
    fn vectors(self, i: usize) -> [[T; N]; 1] {
        [*self.nodes[i * N..].first_chunk().expect("N vectors")]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sums::row_terms::Elements;
    use crate::{Isa, MaxReducer, MinReducer, Real, RowTree, SumReducer, with_isa};

    /// A join that shows how its operands are grouped.
    #[derive(Clone, Copy)]
    struct Distance;

    impl<T: Num> Reducer<T> for Distance {
        const PAD: T = T::LOWEST;
        const EMPTY: T = T::ZERO;
        #[inline(always)]
        fn join(a: T, b: T) -> T {
            let distance = a.sub(b);
            let joint = if T::DTYPE.is_float() { distance.magnitude() } else { distance.mul(distance) };
            let joint = if b == T::LOWEST { a } else { joint };
            if a == T::LOWEST { b } else { joint }
        }
    }

    /// Joins the elements by the definition of the tree.
    fn by_definition<T: Num, F: Reducer<T>>(x: &[T]) -> T {
        if let [x] = x {
            return *x;
        }
        let (a, b) = x.split_at(crate::Leaf::Pairs.left_of(SplitRule::Halves, x.len()).unwrap());
        F::join(by_definition::<T, F>(a), by_definition::<T, F>(b))
    }

    /// Returns a number's bits, with one value for all NaNs.
    fn bits<T: Num>(x: T) -> u64 {
        let x = x.to_f64();
        if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() }
    }

    /// Compares rows of `x` with the definition: with every instruction set, one element and `stride` elements apart.
    fn check<T: Num, F: Reducer<T>>(x: &[T], lens: &[usize], counts: &[usize], stride: usize) {
        for &len in lens {
            let most = *counts.iter().max().unwrap();
            for (first, apart) in [(0, 1), (1, stride), (2, len)] {
                let row = |i: usize| &x[first + i * apart..][..len];
                let want: Vec<u64> = (0..most).map(|i| bits(by_definition::<T, F>(row(i)))).collect();
                for &isa in Isa::available() {
                    for &count in counts {
                        let mut got = vec![T::ZERO; count];
                        let mut tree = with_isa(isa, || RowTree::new(len));
                        let last = first + (count - 1) * apart + len;
                        // No element after the last row is read.
                        let data = x[..last].to_vec();
                        tree.fold_at::<F>(&data, RowStarts::Strided { first, stride: apart }, &mut got);
                        if isa == Isa::Baseline {
                            // The vectors that targets other than x86-64 have.
                            let (mut plain, nodes) = (vec![T::ZERO; count], &mut Vec::new());
                            let starts = RowStarts::Strided { first, stride: apart };
                            let fold =
                                RowsFold::<Elements, T> { data: &data, len, starts, nodes, out: &mut plain };
                            LanesFold::<T, F>::run::<_, 4>(fold, PlainLanes);
                            let plain: Vec<u64> = plain.into_iter().map(bits).collect();
                            assert_eq!(plain, want[..count], "{count} rows of {len}, plain vectors");
                        }
                        let got: Vec<u64> = got.into_iter().map(bits).collect();
                        assert_eq!(
                            got,
                            want[..count],
                            "{count} rows of {len}, {apart} apart, {} {isa:?}",
                            T::DTYPE
                        );
                    }
                }
            }
        }
    }

    fn noise<T: Num>(len: usize) -> Vec<T> {
        (0..len).map(|i| T::constant((i * 7919 % 1009) as f64 - 500.0)).collect()
    }

    /// Numbers of very different sizes, zeros of both signs, and now and then an infinity or NaN.
    fn unruly<A: Real>(len: usize) -> Vec<A> {
        let element = |i: usize| match i * 31 % 1013 {
            0 => f64::INFINITY,
            1 => f64::NEG_INFINITY,
            2 => f64::NAN,
            3..300 => -0.0,
            300..400 => 0.0,
            k => ((k as f64).sin() * 1.1) * 10f64.powi(k as i32 % 13 - 6),
        };
        (0..len).map(|i| A::of(element(i))).collect()
    }

    /// Every length of a leaf, lengths around those at which a leaf is split, and around a row of several blocks.
    #[test]
    fn rows_follow_the_definition() {
        let lens: Vec<usize> = (1..70)
            .chain([95, 96, 97, 127, 128, 129, 255, 256, 257, 511, 513, 700, 1000, 1023, 1024])
            .collect();
        let counts = [1, 2, 3, 5, 8, 15, 16, 17, 33];
        check::<f32, Distance>(&noise(1 << 16), &lens, &counts, 1031);
        check::<f32, SumReducer>(&unruly(1 << 16), &lens, &counts, 1031);
        check::<f64, SumReducer>(&unruly(1 << 16), &lens, &counts, 1031);
        check::<f32, MaxReducer>(&unruly(1 << 15), &[1, 5, 33, 100, 513], &counts, 517);
        check::<f64, MinReducer>(&unruly(1 << 15), &[1, 5, 33, 100, 513], &counts, 517);
        for len in [7, 100, 513] {
            check::<i64, Distance>(&noise(1 << 15), &[len], &counts, 517);
            check::<i32, Distance>(&noise(1 << 15), &[len], &counts, 517);
            check::<u8, Distance>(&noise(1 << 15), &[len], &counts, 517);
        }
    }

    /// More rows than are joined together, and rows that are longer than is joined by levels.
    #[test]
    fn many_rows_and_long_ones_follow_the_definition() {
        check::<f32, Distance>(&noise(1 << 15), &[3, 33, 40], &[513, 700], 7);
        check::<f32, Distance>(&noise(1 << 15), &[300], &[64, 65], 311);
        let long = [8191, 8192, 8193, 8447, 16_384, 16_385, 20_001, 100_003];
        check::<f32, Distance>(&noise(1 << 19), &long, &[1, 3], 100_100);
        check::<f64, SumReducer>(&unruly(1 << 19), &long[2..], &[2], 100_100);
    }

    #[test]
    #[should_panic(expected = "the row is inside")]
    fn a_row_that_ends_after_the_data_is_refused() {
        let starts = RowStarts::Strided { first: 0, stride: 40 };
        RowTree::new(40).fold_at::<SumReducer>(&[0f32; 79], starts, &mut [0.0; 2]);
    }

    #[test]
    #[should_panic]
    fn a_row_that_begins_after_the_data_is_refused() {
        let starts = RowStarts::Listed { first: 0, offsets: &[[usize::MAX - 5, 0]] };
        RowTree::new(3000).fold_at::<SumReducer>(&[0f32; 3000], starts, &mut [0.0]);
    }
}
