//! The products of a block whose scores lie [by keys](QueryBlock::lie_by_keys), in bands: windows decide which pairs of queries and
//! keys a tile computes or sums.

use std::ops::Range;

use super::lane_windows::{LANES, Seen};
use super::query_block::QueryBlock;
use crate::gemm::{Band, BandedProduct, Gemm, LeafRuns};
use crate::summation::LEAF;

impl QueryBlock {
    /// Plans the product of keys `[keys, d]` and queries `[d, lanes]`: the cells that any query sees.
    pub(super) fn pair_bands<T: Gemm>(&self, d: usize) -> BandedProduct<T> {
        let cols = self.lanes.len() * LANES;
        let seen = |keys: Range<usize>| {
            let cells = keys.start / LANES..keys.end.div_ceil(LANES);
            let sees = |group: &usize| cells.clone().any(|cell| self.lanes[*group].seen(cell) != Seen::None);
            let first = (0..self.lanes.len()).find(sees).unwrap_or(0);
            let end = (0..self.lanes.len()).rfind(sees).map_or(0, |last| last + 1);
            Band { cols: first * LANES..end * LANES, indices: 0..d }
        };
        BandedProduct::new([self.to - self.from, d, cols], seen).expect("whole vectors of queries")
    }

    /// Plans the product of scores as rows of queries, `[queries, keys]`, and keys `[keys, d]`, along the tree over the keys. Returns
    /// `None` if scores lie by queries, or `d` columns are not whole vectors.
    pub(super) fn query_bands<T: Gemm>(&self, d: usize) -> Option<BandedProduct<T>> {
        if self.lanes.is_empty() || self.leaves.is_empty() {
            return None;
        }
        let seen = |rows: Range<usize>| {
            let windows = rows.map(|i| self.window(i)).filter(|window| !window.is_empty());
            let seen = windows.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
            seen.unwrap_or(0..1)
        };
        let leaves = self.from / LEAF..self.to.div_ceil(LEAF);
        let of = LeafRuns { len: self.to, runs: std::slice::from_ref(&leaves) };
        BandedProduct::over_leaves(of, [self.rows, d], seen)
    }

    /// Plans the product of scores as rows of keys, `[keys, queries]`, and queries `[queries, d]`, along the tree over the queries.
    /// Returns `None` as [`QueryBlock::query_bands`] does.
    pub(super) fn key_bands<T: Gemm>(&self, d: usize) -> Option<BandedProduct<T>> {
        if self.lanes.is_empty() {
            return None;
        }
        let queries: Vec<Range<usize>> = (0..self.rows).map(|i| self.window(i)).collect();
        let seeing = |keys: Range<usize>| {
            // Windows ascend with the queries.
            let first = queries.partition_point(|window| window.end <= keys.start);
            let end = queries.partition_point(|window| window.start < keys.end);
            Band { cols: 0..d, indices: if first < end { first..end } else { 0..1 } }
        };
        BandedProduct::new([self.to - self.from, self.rows, d], seeing)
    }
}
