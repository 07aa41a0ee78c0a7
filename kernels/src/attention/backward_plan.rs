//! The plan of the [backward pass](super::backward): blocks of queries over each [part of the keys](super::key_parts), with their products.

use std::ops::Range;

use super::call::AttentionKernel;
use super::key_parts::{PartStep, key_parts};
use super::key_rows::NeighbouringRows;
use super::query_block::{BlockSum, Factors, KeySums, LEAF_ROWS, QueryBlock, Stripe, masked_product};
use super::window::WindowRule;
use crate::gemm::{BandedProduct, Gemm};
use crate::summation::SplitRule;

/// A part of the keys, with the blocks of all queries.
pub(super) struct KeyPart<T: 'static> {
    pub(super) keys: Range<usize>,
    pub(super) leaves: Vec<Leaf<T>>,
}

/// A leaf of queries as a block, with the plans of its products.
pub(super) struct Leaf<T: 'static> {
    pub(super) block: QueryBlock,
    /// The number of joins that follow it in the tree over queries.
    pub(super) joins: u8,
    /// The step that its queries take in this part, or `None` if they see none of its keys.
    pub(super) step: Option<PartStep>,
    /// The products of queries and keys, and of gradients and values, if scores lie by keys.
    pub(super) pairs: Option<[BandedProduct<T>; 2]>,
    /// The gradients of queries.
    over_keys: OverKeys<T>,
    /// The gradients of keys and of values.
    pub(super) over_queries: [OverQueries<T>; 2],
}

/// Sums over the keys of a block.
struct OverKeys<T: 'static> {
    /// The block's [stripes](QueryBlock::stripes), each with the sums over the keys that it sees; or all rows, if there are bands.
    stripes: Vec<(Stripe, KeySums<T>)>,
    bands: Option<BandedProduct<T>>,
}

/// Sums over the queries of a block.
pub(super) struct OverQueries<T: 'static> {
    /// The leaves of keys [by the rows](QueryBlock::leaves_by_rows) that see them; or by all rows, if there are bands.
    pub(super) seen_by: Vec<Stripe>,
    pub(super) bands: Option<BandedProduct<T>>,
}

impl<T: Gemm> Leaf<T> {
    pub(super) fn new(
        rule: &WindowRule,
        block: QueryBlock,
        [d, dv]: [usize; 2],
        (joins, step): (u8, Option<PartStep>),
    ) -> Leaf<T> {
        let stripes = block.stripes(rule);
        let over_queries = [d, dv].map(|d| {
            let bands = block.key_bands(d);
            let seen_by = block.leaves_by_rows(if bands.is_some() { &[] } else { &stripes });
            OverQueries { seen_by, bands }
        });
        let bands = block.query_bands(d);
        let stripes = if bands.is_some() { block.leaves_by_rows(&[]) } else { stripes.to_vec() };
        let with_sums = |stripe: Stripe| {
            let sums = block.over_keys(&stripe.leaves);
            (stripe, sums)
        };
        let over_keys = OverKeys { stripes: stripes.into_iter().map(with_sums).collect(), bands };
        let pairs = (!block.lanes.is_empty()).then(|| [d, dv].map(|d| block.pair_bands(d)));
        Leaf { block, joins, step, pairs, over_keys, over_queries }
    }

    /// Computes the gradients of the block's queries from those of its products with keys.
    pub(super) fn query_gradients(
        &self,
        factors: Factors,
        ds: &[T],
        keys: &NeighbouringRows<'_, T>,
        dq: &mut [T],
    ) {
        let d = dq.len() / self.block.rows;
        for (Stripe { rows, .. }, sums) in &self.over_keys.stripes {
            let into = &mut dq[rows.start * d..rows.end * d];
            if sums.keys.is_empty() {
                into.fill(T::ZERO);
                continue;
            }
            let (a, b) = (self.block.part(ds, rows, sums.keys.clone()), keys.rows(sums.keys.clone(), d));
            let factors = (factors, self.over_keys.bands.as_ref());
            masked_product(factors, BlockSum::Keys(&sums.over), a, b, (into, (d.max(1), 1)));
        }
    }
}

impl<T: Gemm> AttentionKernel<'_, T> {
    /// Plans the blocks of all queries for each part of the keys. Only scores by keys have several parts.
    pub(super) fn parts(
        &self,
        queries: usize,
        keys: usize,
        [d, dv]: [usize; 2],
        by_keys: bool,
    ) -> Vec<KeyPart<T>> {
        let ranges: Vec<Range<usize>> = if by_keys {
            key_parts::<T>(keys, [d, dv]).collect()
        } else {
            std::iter::once(0..keys).collect()
        };
        let mut parts: Vec<KeyPart<T>> =
            ranges.into_iter().map(|keys| KeyPart { keys, leaves: Vec::new() }).collect();
        for (rows, joins) in leaves(queries).into_iter().filter(|(rows, _)| !rows.is_empty()) {
            let whole = self.leaf_block(rows, keys);
            // A block that sees no key has its results in the first part.
            let seen = |part: &KeyPart<T>| whole.from < part.keys.end && part.keys.start < whole.to;
            let first = parts.iter().position(seen).unwrap_or(0);
            let last = parts.iter().rposition(seen).unwrap_or(0);
            let mut steps = PartStep::of(first..last + 1).peekable();
            for (i, part) in parts.iter_mut().enumerate() {
                let mut block = whole.clone();
                if (first, last) != (i, i) {
                    block.retain(&self.scores.rule, |keys| part.keys.contains(&keys.start));
                }
                if by_keys {
                    block.lie_by_keys(&self.scores.rule);
                }
                let step = steps.next_if(|(at, _)| *at == i).map(|(_, step)| step);
                part.leaves.push(Leaf::new(&self.scores.rule, block, [d, dv], (joins, step)));
            }
        }
        parts
    }

    /// Returns these queries as a block.
    pub(super) fn leaf_block(&self, rows: Range<usize>, keys: usize) -> QueryBlock {
        QueryBlock::new(&self.scores.rule, rows.start, self.q_start + rows.start, rows.len(), keys)
    }
}

/// Returns the leaves of the tree over `queries` in order, each with the number of joins that follow it.
pub(super) fn leaves(queries: usize) -> Vec<(Range<usize>, u8)> {
    fn halve(range: Range<usize>, list: &mut Vec<(Range<usize>, u8)>) {
        if range.len() <= LEAF_ROWS {
            return list.push((range, 0));
        }
        let mid = SplitRule::Halves.mid(range.start, range.end);
        halve(range.start..mid, list);
        halve(mid..range.end, list);
        list.last_mut().expect("just pushed").1 += 1;
    }
    let mut list = Vec::new();
    halve(0..queries, &mut list);
    list
}
