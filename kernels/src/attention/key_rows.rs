//! The operands of the products of queries and keys: a head's rows of keys or values, copied once for all blocks of queries, and a
//! block's queries as columns.

use std::ops::Range;

use super::query_block::QueryBlock;
use super::scratch::Scratch;
use crate::gemm::{BandedProduct, Gemm, MatRef, packs_lines};
use crate::isa::caches::CACHE_LINE_BYTES;
use crate::summation::LEAF;

/// Returns the keys that some of these blocks compute, and those between.
fn computed_keys<'b>(blocks: impl Iterator<Item = &'b QueryBlock>) -> Range<usize> {
    let ranges = blocks.filter(|block| block.from < block.to).map(|block| block.from..block.to);
    ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
}

/// A head's rows of keys, for products of several blocks of queries. They are read where they are, or copied next to each other
/// once if that pays.
pub(super) struct NeighbouringRows<'a, T> {
    copy: Option<Scratch<T>>,
    keys: Range<usize>,
    step: usize,
    /// The most keys of a block; 0 for a single block, which reads rows once, where they are.
    widest: usize,
    /// The number of blocks that read a row, on average; 0 for a single block.
    readers: usize,
    side: Side,
    /// The head, if its rows are read where they are.
    head: Option<MatRef<'a, T>>,
}

/// The operand of products that rows of keys are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// The left one: a tile reads a few lines of each row. Rows that are far apart are in as many pages, and are copied if many blocks read
    /// them. For two or three blocks the copies cost as much as they save (`benches/results/2026-11-27-xeon.md`).
    Left,
    /// The right one, which products pack if lines share few sets of a cache. Such rows are copied, and others that are far apart, if
    /// several blocks read them: each of a block's tiles reads all of them (`benches/results/2026-11-28-long-attention.md`).
    Right,
}

impl Side {
    /// Returns true if copies of rows pay that are `apart` bytes apart.
    fn copies(self, rows: &NeighbouringRows<'_, impl Sized>, apart: usize) -> bool {
        match self {
            Side::Left => rows.readers >= 4 && apart >= 1024,
            Side::Right => packs_lines(rows.widest, apart) || rows.readers >= 2 && apart >= 1024,
        }
    }
}

impl<'a, T: Gemm> NeighbouringRows<'a, T> {
    /// Returns no rows yet, for these blocks and rows of `d` elements.
    pub(super) fn new<'b>(
        blocks: impl Iterator<Item = &'b QueryBlock> + Clone,
        d: usize,
        side: Side,
    ) -> Self {
        let line = CACHE_LINE_BYTES / size_of::<T>();
        let widths = blocks.clone().map(|block| block.to - block.from);
        let (mut widest, mut reads) =
            widths.fold((0, 0), |(widest, reads), width| (width.max(widest), reads + width));
        if d == 0 || blocks.clone().nth(1).is_none() {
            (widest, reads) = (0, 0);
        }
        let lines = d.next_multiple_of(line);
        let step = if packs_lines(widest, lines * size_of::<T>()) { lines + line } else { lines };
        let keys = computed_keys(blocks);
        let readers = reads / keys.len().max(1);
        NeighbouringRows { copy: None, keys, step, widest, readers, side, head: None }
    }

    /// Takes the rows of another head.
    pub(super) fn fill(&mut self, x: MatRef<'a, T>) {
        if !self.side.copies(self, x.strides().0 * size_of::<T>()) {
            self.head = Some(x);
            return;
        }
        let copy = self.copy.get_or_insert_with(|| Scratch::new(self.keys.len() * self.step));
        T::copy_rows(x.rows(self.keys.start, self.keys.len()), self.step, copy.get());
        self.head = None;
    }

    /// Returns the rows of some keys.
    pub(super) fn rows(&self, keys: Range<usize>, d: usize) -> MatRef<'_, T> {
        match (self.head, &self.copy) {
            (Some(head), _) => head.rows(keys.start, keys.len()),
            (None, Some(copy)) => {
                let data = &copy.view()[(keys.start - self.keys.start) * self.step..];
                MatRef::new(data, (keys.len(), d), (self.step, 1)).expect("copied rows")
            }
            (None, None) => unreachable!("the rows are filled before they are read"),
        }
    }
}

/// Rows as columns: the matrix `[d, rows]` with contiguous rows, which products read without packing it again.
pub(super) struct TransposedRows<T> {
    data: Scratch<T>,
    d: usize,
    step: usize,
}

impl<T: Gemm> TransposedRows<T> {
    /// Returns room for `len` rows of `d` elements.
    fn new(len: usize, d: usize) -> Self {
        // Whole leaves and one cache line: an odd number of lines, so that neighbouring rows are in different sets of a
        // cache.
        let step = len.next_multiple_of(LEAF) + CACHE_LINE_BYTES / size_of::<T>();
        TransposedRows { data: Scratch::new(d * step), d, step }
    }

    /// Copies rows. Zeros follow them up to a whole leaf.
    fn fill(&mut self, x: MatRef<'_, T>) {
        assert_eq!(x.shape().1, self.d, "rows for which there is room");
        if self.d > 0 && x.shape().0 > 0 {
            T::copy_rows(x.t(), self.step, self.data.get());
        }
    }

    /// Returns columns.
    fn columns(&self, columns: Range<usize>) -> MatRef<'_, T> {
        let data = self.data.view();
        let data = &data[columns.start.min(data.len())..];
        MatRef::new(data, (self.d, columns.len()), (self.step, 1)).expect("columns that are filled")
    }
}

/// The operands of the products of queries and keys. One side is [columns](TransposedRows).
pub(super) enum PairOperands<'a, T> {
    /// Scores lie by queries: a head's keys are columns, those from the first one on that blocks compute.
    ByQuery(TransposedRows<T>, Range<usize>),
    /// Scores lie by keys: a block's queries are columns.
    ByKey(TransposedRows<T>, NeighbouringRows<'a, T>),
}

impl<'a, T: Gemm> PairOperands<'a, T> {
    /// Returns no operands yet, for these blocks and rows of `d` elements.
    pub(super) fn new<'b>(blocks: impl Iterator<Item = &'b QueryBlock> + Clone, d: usize) -> Self {
        if blocks.clone().any(|block| !block.lanes.is_empty()) {
            let most = blocks.clone().map(|block| block.rows).max().unwrap_or(0);
            let keys = NeighbouringRows::new(blocks, d, Side::Left);
            return PairOperands::ByKey(TransposedRows::new(most, d), keys);
        }
        let keys = computed_keys(blocks);
        PairOperands::ByQuery(TransposedRows::new(keys.len(), d), keys)
    }

    /// Takes the keys of another head.
    pub(super) fn fill(&mut self, x: MatRef<'a, T>) {
        match self {
            PairOperands::ByQuery(columns, keys) => columns.fill(x.rows(keys.start, keys.len())),
            PairOperands::ByKey(_, keys) => keys.fill(x),
        }
    }

    /// Multiplies a block's queries with the keys that they see: with the block's [plan](QueryBlock::pair_bands) if its scores lie by
    /// keys.
    pub(super) fn multiply(
        &mut self,
        (block, bands): (&QueryBlock, Option<&BandedProduct<T>>),
        scale: T,
        queries: MatRef<'_, T>,
        s: &mut [T],
    ) {
        match self {
            PairOperands::ByQuery(columns, first) => {
                for (own, keys) in &block.products {
                    let from = keys.start - first.start;
                    let columns = columns.columns(from..from + keys.len().next_multiple_of(LEAF));
                    let into = block.products_mut(s, own, keys.clone());
                    T::product(scale, queries.rows(own.start, own.len()), columns, T::ZERO, into);
                }
            }
            PairOperands::ByKey(columns, keys) => {
                columns.fill(queries);
                let into = block.lanes_mut(s);
                let (keys, columns) =
                    (keys.rows(block.from..block.to, columns.d), columns.columns(0..into.shape().1));
                bands.expect("a plan for scores by keys").run(scale, keys, columns, T::ZERO, into);
            }
        }
    }
}
