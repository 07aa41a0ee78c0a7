//! Parts of [attention](super): blocks of queries, heads as matrices, and products that leave out masked keys.

use std::ops::Range;

use smallvec::SmallVec;

use super::lane_windows::{LANES, LaneWindows};
use super::window::WindowRule;
use crate::gemm::{BandedProduct, Gemm, LeafContraction, LeafRuns, MatMut, MatRef};
use crate::summation::{LEAF, SplitRule};

/// The largest number of query rows of a block in the forward pass if scores lie by queries. Any number gives the same bits; a small
/// block has few scores of keys that a causal mask leaves out, and its scores stay in a cache. Blocks of 16 rows are slower even if
/// their scores alone fit the second cache (`benches/results/2026-11-28-zen3.md`).
pub(super) const ROWS: usize = 32;

/// The largest number of queries of a leaf, which is a block in the backward pass. In the forward pass it is a block if scores lie by
/// keys and take at most half of the second cache; for many keys that is faster than [`ROWS`] (`benches/results/2026-11-27-xeon.md`).
pub(super) const LEAF_ROWS: usize = 64;

/// A block of query rows, and the leaves of keys that any of them sees.
#[derive(Clone, Debug)]
pub(super) struct QueryBlock {
    /// The first row's index among the given queries.
    pub(super) start: usize,
    /// The first row's position in the sequence of keys.
    pub(super) position: usize,
    pub(super) rows: usize,
    /// The number of all keys.
    pub(super) keys: usize,
    /// The leaves of keys that are computed: ranges that ascend and do not touch.
    pub(super) leaves: Vec<Range<usize>>,
    /// The first key that is computed, a multiple of [`LEAF`].
    pub(super) from: usize,
    /// The key after the last one that is computed.
    pub(super) to: usize,
    /// The number of keys of the scores: `to - from` rounded up to whole leaves.
    pub(super) width: usize,
    /// The products that give the scores if they lie by queries: rows, and the keys that they see.
    pub(super) products: Vec<(Range<usize>, Range<usize>)>,
    /// The windows of each [`LANES`] queries, if the scores [lie by keys](QueryBlock::lie_by_keys), or nothing.
    pub(super) lanes: Vec<LaneWindows>,
}

impl QueryBlock {
    /// Returns the block of `rows` queries from `start` on, whose first query has the position `position`.
    pub(super) fn new(
        rule: &WindowRule,
        start: usize,
        position: usize,
        rows: usize,
        keys: usize,
    ) -> QueryBlock {
        let [first, last] = [position, position + rows.max(1) - 1].map(|p| rule.span(p, keys));
        let mut block = QueryBlock {
            start,
            position,
            rows,
            keys,
            leaves: Vec::new(),
            from: 0,
            to: 0,
            width: 0,
            products: Vec::new(),
            lanes: Vec::new(),
        };
        if first.start < last.end {
            block.leaves.push(first.start / LEAF..last.end.div_ceil(LEAF));
        }
        block.measure();
        // The last leaf ends where the last window does.
        block.to = block.to.min(last.end.max(block.from));
        block.plan_products(rule);
        block
    }

    /// Lets the scores of queries lie side by side, a row of whole vectors of queries for each key. Else they lie by queries, a row of keys
    /// for each.
    pub(super) fn lie_by_keys(&mut self, rule: &WindowRule) {
        let window = |i: usize| {
            let span = if i < self.rows { rule.span(self.position + i, self.keys) } else { 0..0 };
            [span.start, span.end].map(|key| key.clamp(self.from, self.to) - self.from)
        };
        let lanes = |first: usize| LaneWindows::new(std::array::from_fn(|lane| window(first + lane)));
        self.lanes = (0..self.rows).step_by(LANES).map(lanes).collect();
        self.products.clear();
    }

    /// Returns the keys that a query sees, from the block's first one on, if the scores lie by keys.
    pub(super) fn window(&self, query: usize) -> Range<usize> {
        self.lanes[query / LANES].of(query % LANES)
    }

    /// Returns the distances of a query's and of a key's scores from the next one's.
    #[inline(always)]
    pub(super) fn steps(&self) -> (usize, usize) {
        if self.lanes.is_empty() { (self.width, 1) } else { (1, self.lanes.len() * LANES) }
    }

    /// Returns the number of elements of the scores.
    pub(super) fn scores_len(&self) -> usize {
        if self.lanes.is_empty() { self.rows * self.width } else { self.lanes.len() * LANES * self.width }
    }

    fn measure(&mut self) {
        let range = LeafRuns { len: self.keys, runs: &self.leaves }.indices();
        (self.from, self.to) = (range.start, range.end);
        self.width = (range.end - range.start).next_multiple_of(LEAF);
    }

    /// Lists the products of each [stripe](QueryBlock::stripes) with the keys that it sees.
    fn plan_products(&mut self, rule: &WindowRule) {
        let mut products = Vec::with_capacity(2);
        for Stripe { rows, leaves } in self.stripes(rule) {
            products.extend(self.runs_in(&leaves).map(|run| (rows.clone(), self.keys_of(run))));
        }
        self.products = products;
    }

    /// Keeps the leaves whose keys `keep` accepts.
    pub(super) fn retain(&mut self, rule: &WindowRule, keep: impl Fn(Range<usize>) -> bool) {
        let mut kept: Vec<Range<usize>> = Vec::new();
        for leaf in self.leaves.drain(..).flatten() {
            if !keep(leaf * LEAF..((leaf + 1) * LEAF).min(self.keys)) {
                continue;
            }
            match kept.last_mut() {
                Some(run) if run.end == leaf => run.end += 1,
                _ => kept.push(leaf..leaf + 1),
            }
        }
        let end = self.to;
        self.leaves = kept;
        self.measure();
        self.to = self.to.min(end.max(self.from));
        self.plan_products(rule);
    }

    /// Returns the rows that the upper half of a tree over all rows has, and the others, each with the leaves that they
    /// see; or all rows, if both see the same leaves.
    pub(super) fn stripes(&self, rule: &WindowRule) -> SmallVec<[Stripe; 2]> {
        let mid = if self.rows > LEAF { SplitRule::Halves.mid(0, self.rows) } else { self.rows };
        let first = self.from / LEAF;
        let stripe = |rows: Range<usize>| {
            // Windows ascend with the rows, empty ones too.
            let [top, last] = [rows.start, rows.end - 1].map(|i| rule.span(self.position + i, self.keys));
            let [from, to] = [top.start, last.end].map(|key| key.clamp(self.from, self.to) - self.from);
            let leaves = if from < to { from / LEAF..to.div_ceil(LEAF) } else { 0..0 };
            Stripe { rows, leaves: first + leaves.start..first + leaves.end }
        };
        let mut stripes: SmallVec<[Stripe; 2]> =
            [0..mid, mid..self.rows].into_iter().filter(|rows| !rows.is_empty()).map(stripe).collect();
        if stripes.len() == 2 && stripes[0].leaves == stripes[1].leaves {
            stripes.pop();
            stripes[0].rows = 0..self.rows;
        }
        stripes
    }

    /// Returns the computed leaves among these, as ranges.
    pub(super) fn runs_in(&self, leaves: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let (from, to) = (leaves.start, leaves.end);
        let clipped = move |run: &Range<usize>| run.start.max(from)..run.end.min(to);
        self.leaves.iter().map(clipped).filter(|run| run.start < run.end)
    }

    /// Returns the keys of a range of leaves.
    pub(super) fn keys_of(&self, leaves: Range<usize>) -> Range<usize> {
        leaves.start * LEAF..(leaves.end * LEAF).min(self.to)
    }

    /// Returns the ranges of leaves that are computed, each with the rows of the [stripes](QueryBlock::stripes) that see
    /// it; or with all rows, if none does.
    pub(super) fn leaves_by_rows(&self, stripes: &[Stripe]) -> Vec<Stripe> {
        let mut list = Vec::with_capacity(3);
        for run in &self.leaves {
            let mut at = run.start;
            while at < run.end {
                let bounds = stripes.iter().flat_map(|stripe| [stripe.leaves.start, stripe.leaves.end]);
                let end = bounds.filter(|&leaf| leaf > at).min().unwrap_or(run.end).min(run.end);
                let seeing = stripes.iter().filter(|stripe| stripe.leaves.contains(&at));
                let rows = seeing.map(|stripe| stripe.rows.clone()).reduce(|a, b| a.start..b.end);
                list.push(Stripe { rows: rows.unwrap_or(0..self.rows), leaves: at..end });
                at = end;
            }
        }
        list
    }

    /// Returns the leaves that row `i` sees in part, of those that are computed, counted from the first one.
    #[inline(always)]
    pub(super) fn seen_leaves(&self, rule: &WindowRule, i: usize) -> Range<usize> {
        let span = rule.span(self.position + i, self.keys);
        let (from, to) = (span.start.max(self.from), span.end.min(self.to));
        if from >= to {
            return 0..0;
        }
        (from - self.from) / LEAF..(to - self.from).div_ceil(LEAF)
    }

    /// Returns the sums over the keys of some leaves, and these keys.
    pub(super) fn over_keys<T: Gemm>(&self, leaves: &Range<usize>) -> KeySums<T> {
        let runs: SmallVec<[Range<usize>; 4]> = self.runs_in(leaves).collect();
        let runs = LeafRuns { len: self.to, runs: &runs };
        KeySums { over: LeafContraction::new(runs), keys: runs.indices() }
    }

    /// Returns the scores of some queries, as rows, and keys.
    pub(super) fn part<'a, T>(
        &self,
        data: &'a [T],
        rows: &Range<usize>,
        keys: Range<usize>,
    ) -> MatRef<'a, T> {
        let (query, key) = self.steps();
        let data = &data[rows.start * query + (keys.start - self.from) * key..];
        MatRef::new(data, (rows.len(), keys.len()), (query, key)).expect("room for the block")
    }

    /// Returns the place of the products of some queries and whole leaves of keys.
    pub(super) fn products_mut<'a, T>(
        &self,
        data: &'a mut [T],
        rows: &Range<usize>,
        keys: Range<usize>,
    ) -> MatMut<'a, T> {
        let data = &mut data[rows.start * self.width + (keys.start - self.from)..];
        let shape = (rows.len(), keys.len().next_multiple_of(LEAF));
        MatMut::new(data, shape, (self.width, 1)).expect("room for the block")
    }

    /// Returns the place of the products of all keys and lanes, if the scores lie by keys.
    pub(super) fn lanes_mut<'a, T>(&self, data: &'a mut [T]) -> MatMut<'a, T> {
        let (_, step) = self.steps();
        MatMut::new(data, (self.to - self.from, step), (step, 1)).expect("room for the block")
    }
}

/// Some rows of a [block](QueryBlock), and the range of leaves of keys that they see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stripe {
    pub(super) rows: Range<usize>,
    pub(super) leaves: Range<usize>,
}

/// Sums over the keys of some leaves.
pub(super) struct KeySums<T> {
    pub(super) over: LeafContraction<T>,
    pub(super) keys: Range<usize>,
}

/// The sums of a product of a block's probabilities or gradients.
#[derive(Clone, Copy)]
pub(super) enum BlockSum<'a, T> {
    /// Sums over keys.
    Keys(&'a LeafContraction<T>),
    /// Sums over queries, which are added to the result times this factor.
    Queries(T),
}

impl<T: Gemm> BlockSum<'_, T> {
    /// Returns the factor of the result to which the sums are added.
    fn onto(&self) -> T {
        match self {
            BlockSum::Keys(_) => T::ZERO,
            BlockSum::Queries(onto) => *onto,
        }
    }
}

/// Computes `c += a @ b` or `c = a @ b`, in the planned bands if there are any and factors are finite. An element -0 of `a` stands for a key or a query that is left out. With
/// [`Factors::Any`] it is not multiplied by infinities or NaNs of `b`.
pub(super) fn masked_product<T: Gemm>(
    (factors, bands): (Factors, Option<&BandedProduct<T>>),
    sum: BlockSum<'_, T>,
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    (c, strides): (&mut [T], (usize, usize)),
) {
    let product = |a: MatRef<'_, T>, b: MatRef<'_, T>, c: MatMut<'_, T>| match sum {
        BlockSum::Keys(over) => T::product_over(over, a, b, c),
        BlockSum::Queries(onto) => T::product(T::ONE, a, b, onto, c),
    };
    let ((m, k), n) = (a.shape(), b.shape().1);
    if factors == Factors::Finite || is_finite(b) {
        let c = MatMut::new(c, (m, n), strides).expect("the result's place");
        return match bands {
            Some(bands) => bands.run(T::ONE, a, b, sum.onto(), c),
            None => product(a, b, c),
        };
    }
    // Row by row, with zeros for what the row leaves out: a product with -0 that changes no sum.
    let mut kept = vec![T::ZERO; k * n];
    for i in 0..m {
        let row = a.rows(i, 1);
        for j in 0..k {
            let (x, y) = (row.data()[j * row.strides().1], b.rows(j, 1));
            let left_out = x == T::ZERO && T::ONE / x < T::ZERO;
            for (c, kept) in kept[j * n..][..n].iter_mut().enumerate() {
                *kept = if left_out { T::ZERO } else { y.data()[c * y.strides().1] };
            }
        }
        let kept = MatRef::new(&kept, (k, n), (n.max(1), 1)).expect("a copy");
        let at = (i * strides.0).min(c.len());
        product(row, kept, MatMut::new(&mut c[at..], (1, n), strides).expect("a row of the result"));
    }
}

/// The values that the right operand of a [masked product](masked_product) may have.
///
/// Products first take it that all are [finite](Factors::Finite). An infinity or a NaN that meets a key or query which is left out
/// makes a NaN, and no sum that has one is finite. So [finite results](super::score_rows::put_rows) are right, and others
/// are computed again with [any](Factors::Any) factors. No operand is searched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Factors {
    /// Finite values.
    Finite,
    /// Any values.
    Any,
}

/// Returns true if no element is an infinity or a NaN.
fn is_finite<T: Gemm>(x: MatRef<'_, T>) -> bool {
    let ((m, n), (_, step)) = (x.shape(), x.strides());
    (0..m).all(|i| (0..n).all(|j| x.rows(i, 1).data()[j * step] * T::ZERO == T::ZERO))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every leaf that a row sees is computed for it, and summed over a node of the tree over rows that has the row.
    #[test]
    fn stripes_have_all_that_their_rows_see() {
        let cases =
            (0..200usize).flat_map(|seed| [(seed, 1), (seed, 31), (seed, 33), (seed, 50), (seed, 64)]);
        let mut parted = 0;
        for (seed, rows) in cases {
            let window = |which: usize| (!(seed / which).is_multiple_of(5)).then_some(seed * which % 97);
            let rule = WindowRule { before: window(3), after: window(7) };
            let (position, keys) = (seed * 13 % 150, 1 + seed * 29 % 260);
            let mut block = QueryBlock::new(&rule, 0, position, rows, keys);
            if seed % 3 == 0 {
                block.retain(&rule, |keys| (keys.start / LEAF + seed) % 4 != 1);
            }
            let stripes = block.stripes(&rule);
            let by_rows = block.leaves_by_rows(&stripes);
            let listed: Vec<usize> = by_rows.iter().flat_map(|stripe| stripe.leaves.clone()).collect();
            assert_eq!(listed, block.leaves.iter().cloned().flatten().collect::<Vec<_>>(), "each leaf once");
            let mid = SplitRule::Halves.mid(0, rows);
            for Stripe { rows: of, .. } in &by_rows {
                assert!(*of == (0..rows) || rows > LEAF && (*of == (0..mid) || *of == (mid..rows)), "{of:?}");
            }
            parted += usize::from(by_rows.iter().any(|stripe| stripe.rows != (0..rows)));
            for i in 0..rows {
                let stripe =
                    stripes.iter().find(|stripe| stripe.rows.contains(&i)).expect("every row is in one");
                for leaf in block.seen_leaves(&rule, i).map(|leaf| block.from / LEAF + leaf) {
                    assert!(
                        stripe.leaves.contains(&leaf),
                        "{seed}: row {i} of {rows}, leaf {leaf}, {stripe:?}"
                    );
                    let of = by_rows.iter().find(|stripe| stripe.leaves.contains(&leaf));
                    assert!(of.is_none_or(|of| of.rows.contains(&i)), "{seed}: row {i}, leaf {leaf}, {of:?}");
                }
            }
        }
        assert!(parted > 100, "{parted} cases have leaves that half of the rows see");
    }
}
