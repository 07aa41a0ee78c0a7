//! The summation tree of a contraction, as lists of leaves and blocks in ascending order.
//!
//! The summed dims are taken outermost first. A dim's range is split by the one rule ([`SplitRule::Halves`]): outer
//! dims down to single indices, the innermost down to leaves of at most [`LEAF`]. A leaf is one chain of fused
//! multiply-adds in ascending order, which starts with a product; a node is the sum of its left and its right half. How
//! a node is cut depends on its extents alone, so a node evaluated apart has the bits it has inside the whole.
//!
//! A sum over [`LeafRuns`] follows [`SplitRule::PowerOfTwo`] instead, and leaves out some of the leaves.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use crate::Dims;
use crate::summation::{LEAF, SplitRule};

/// A leaf, and the number of joins after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ContractionLeaf {
    /// The number of indices in the leaf.
    pub(super) len: u32,
    /// The number of joins of the two topmost nodes after it.
    pub(super) merges: u32,
}

/// A node that a tile computes in one call, and the number of joins after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ContractionBlock {
    /// Its leaves in [`Contraction::leaves`]. The joins of the last one end with the block.
    pub(super) leaves: Range<usize>,
    /// Its first index.
    pub(super) start: usize,
    /// Its number of indices.
    pub(super) len: usize,
    /// The number of joins of the two topmost blocks after it.
    pub(super) merges: u32,
}

/// The leaves that are present in a sum of one dim that follows [`SplitRule::PowerOfTwo`]. Leaf `i` has the indices from
/// `i * LEAF` on. A node with one part that is present is that part.
///
/// ```
/// // A sum of 70 indices, in leaves of 32, 32 and 6, without the first leaf.
/// let runs = isoshard_kernels::LeafRuns { len: 70, runs: &[1..3] };
/// assert_eq!(runs.indices(), 32..70);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct LeafRuns<'a> {
    /// The number of indices of the whole sum.
    pub len: usize,
    /// The present leaves: ranges that ascend and do not touch.
    pub runs: &'a [Range<usize>],
}

impl LeafRuns<'_> {
    /// Returns the range from the first present index to the last one.
    pub fn indices(&self) -> Range<usize> {
        match (self.runs.first(), self.runs.last()) {
            (Some(first), Some(last)) => first.start * LEAF..last.end.saturating_mul(LEAF).min(self.len),
            _ => 0..0,
        }
    }

    /// Panics unless the runs have leaves, ascend, and are leaves of the sum: tiles read an operand leaf by leaf.
    pub(super) fn expect_leaves_of_the_sum(&self) {
        let ascend = self.runs.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let inside = self.runs.last().is_none_or(|last| last.end <= self.len.div_ceil(LEAF));
        let fits = inside && ascend && self.runs.iter().all(|run| run.start < run.end);
        assert!(fits, "{:?} are no ascending leaves of a sum of {} indices", self.runs, self.len);
    }
}

/// The whole tree, split into blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Contraction {
    /// All leaves in ascending order.
    pub(super) leaves: Vec<ContractionLeaf>,
    /// All blocks in ascending order; empty if the sum has no elements.
    pub(super) blocks: Vec<ContractionBlock>,
    /// The largest number of nodes on the stack within a block.
    pub(super) depth: usize,
    /// The largest number of finished blocks on the stack.
    pub(super) levels: usize,
    /// The largest number of indices in a block.
    pub(super) longest: usize,
}

impl Contraction {
    /// Returns the tree over `extents`, outermost first, in blocks of at most `block` indices (and at least a leaf).
    /// Without dims it has a single index.
    pub(super) fn new(extents: &[usize], block: usize) -> Contraction {
        let mut tree = Contraction::default();
        let extents = if extents.is_empty() { &[1] } else { extents };
        if let Some((&first, rest)) = extents.split_first()
            && extents.iter().all(|&e| e > 0)
        {
            tree.node(first, rest, block.max(LEAF), &mut TreeCursor::default());
        }
        tree.measure();
        tree
    }

    /// Returns [`Contraction::new`] from a cache per thread.
    pub(super) fn cached(extents: &[usize], block: usize) -> Rc<Contraction> {
        type Entry = (Dims, usize, Rc<Contraction>);
        const ENTRIES: usize = 32;
        thread_local! {
            static CACHE: RefCell<Vec<Entry>> = const { RefCell::new(Vec::new()) };
        }
        CACHE.with_borrow_mut(|cache| {
            if let Some(found) = cache.iter().find(|e| e.0[..] == *extents && e.1 == block) {
                return found.2.clone();
            }
            let tree = Rc::new(Contraction::new(extents, block));
            if cache.len() == ENTRIES {
                cache.remove(0);
            }
            cache.push((Dims::from_slice(extents), block, tree.clone()));
            tree
        })
    }

    /// Returns the tree over some leaves of a sum, in blocks of at most `block` indices without gaps. Indices count from
    /// the first one that is present.
    pub(super) fn over_runs(of: LeafRuns<'_>, block: usize) -> Contraction {
        let mut tree = Contraction::default();
        let size = of.runs.last().map_or(1, |last| last.end.next_power_of_two());
        tree.present_node((0, size), of, block.max(LEAF), false);
        tree.measure();
        tree
    }

    /// Sets the heights of the stacks and the length of the longest block.
    fn measure(&mut self) {
        self.longest = self.blocks.iter().map(|b| b.len).max().unwrap_or(0);
        self.depth =
            self.blocks.iter().map(|b| max_stack_len(&self.leaves[b.leaves.clone()])).max().unwrap_or(0);
        let joins = self.blocks.iter().map(|b| ContractionLeaf { len: 0, merges: b.merges });
        self.levels = max_stack_len(&joins.collect::<Vec<_>>());
    }

    /// Appends the node over the `size` leaves from `first` on, as far as they are present. Returns false if none is.
    fn present_node(
        &mut self,
        (first, size): (usize, usize),
        of: LeafRuns<'_>,
        block: usize,
        inside: bool,
    ) -> bool {
        let from = of.runs.partition_point(|run| run.end <= first);
        let to = of.runs.partition_point(|run| run.start < first + size);
        let [here @ .., last] = &of.runs[from..to] else { return false };
        let start = here.first().unwrap_or(last).start.max(first);
        let len = last.end.min(first + size).saturating_mul(LEAF).min(of.len) - start * LEAF;
        let starts_block = !inside && here.is_empty() && len <= block;
        let (inside, first_leaf) = (inside || starts_block, self.leaves.len());
        if size == 1 {
            self.leaves.push(ContractionLeaf { len: len as u32, merges: 0 });
        } else {
            let half = size / 2;
            let left = self.present_node((first, half), of, block, inside);
            if self.present_node((first + half, half), of, block, inside) && left {
                let merges = if inside {
                    &mut self.leaves.last_mut().expect("two nodes have leaves").merges
                } else {
                    &mut self.blocks.last_mut().expect("two nodes have blocks").merges
                };
                *merges += 1;
            }
        }
        if starts_block {
            let (leaves, start) = (first_leaf..self.leaves.len(), start * LEAF - of.indices().start);
            self.blocks.push(ContractionBlock { leaves, start, len, merges: 0 });
        }
        true
    }

    /// Appends the node over `len` indices of one dim and all of the dims inside.
    fn node(&mut self, len: usize, inner: &[usize], block: usize, cursor: &mut TreeCursor) {
        let total = len * inner.iter().product::<usize>();
        let starts_block = !cursor.in_block && total <= block;
        let (first_leaf, start) = (self.leaves.len(), cursor.start);
        cursor.in_block |= starts_block;
        match inner.split_first() {
            None if len <= LEAF => {
                cursor.start += len;
                self.leaves.push(ContractionLeaf { len: len as u32, merges: 0 });
            }
            Some((&next, inner)) if len == 1 => self.node(next, inner, block, cursor),
            _ => {
                let left = SplitRule::Halves.left_of(len);
                self.node(left, inner, block, cursor);
                self.node(len - left, inner, block, cursor);
                let merges = if cursor.in_block {
                    &mut self.leaves.last_mut().expect("two nodes have leaves").merges
                } else {
                    &mut self.blocks.last_mut().expect("two nodes have blocks").merges
                };
                *merges += 1;
            }
        }
        if starts_block {
            cursor.in_block = false;
            self.blocks.push(ContractionBlock {
                leaves: first_leaf..self.leaves.len(),
                start,
                len: total,
                merges: 0,
            });
        }
    }
}

/// The position of the traversal of the tree.
#[derive(Default)]
struct TreeCursor {
    /// The next leaf's first index.
    start: usize,
    /// True inside a block.
    in_block: bool,
}

/// Returns the leaves of a tree's indices in a range: the others are left out, and a node with one part that is present is that part.
pub(super) fn clipped(tree: &[ContractionLeaf], range: &Range<usize>) -> Vec<ContractionLeaf> {
    let (mut leaves, mut stack, mut end) = (Vec::new(), Vec::new(), 0);
    for leaf in tree {
        let start = end;
        end += leaf.len as usize;
        let len = end.min(range.end).saturating_sub(start.max(range.start));
        let mut present = len > 0;
        if present {
            leaves.push(ContractionLeaf { len: len as u32, merges: 0 });
        }
        for _ in 0..leaf.merges {
            let left = stack.pop().expect("two nodes");
            if let (true, true, Some(last)) = (left, present, leaves.last_mut()) {
                last.merges += 1;
            }
            present |= left;
        }
        stack.push(present);
    }
    leaves
}

/// Returns the largest height of the stack.
pub(super) fn max_stack_len(steps: &[ContractionLeaf]) -> usize {
    let (mut now, mut most) = (0usize, 0);
    for step in steps.iter() {
        now = now + 1 - step.merges as usize;
        most = most.max(now);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaves(extents: &[usize]) -> Vec<(u32, u32)> {
        Contraction::new(extents, usize::MAX).leaves.iter().map(|l| (l.len, l.merges)).collect()
    }

    #[test]
    fn leaves_by_hand() {
        assert_eq!(leaves(&[0]), []);
        assert_eq!(leaves(&[3, 0]), []);
        assert_eq!((leaves(&[1]), leaves(&[])), (vec![(1, 0)], vec![(1, 0)]));
        assert_eq!(leaves(&[32]), [(32, 0)]);
        assert_eq!(leaves(&[33]), [(17, 0), (16, 1)]);
        assert_eq!(leaves(&[65]), [(17, 0), (16, 1), (32, 1)]);
        assert_eq!(leaves(&[128]), [(32, 0), (32, 1), (32, 0), (32, 2)]);
        assert_eq!(leaves(&[3, 1]), [(1, 0), (1, 1), (1, 1)]);
        assert_eq!(leaves(&[2, 40]), [(20, 0), (20, 1), (20, 0), (20, 2)]);
        assert_eq!(leaves(&[1, 40]), leaves(&[40]));
    }

    #[test]
    fn blocks_cut_the_same_tree() {
        for extents in [&[1000][..], &[7, 100], &[5, 3, 40], &[64], &[2048]] {
            let whole = Contraction::new(extents, usize::MAX);
            assert_eq!((whole.blocks.len(), whole.levels), (1, 1));
            for block in [32, 50, 100, 128, 512] {
                let cut = Contraction::new(extents, block);
                let mut leaves = cut.leaves.clone();
                let mut at = 0;
                for b in &cut.blocks {
                    assert_eq!((b.start, b.leaves.start < b.leaves.end, b.len <= block), (at, true, true));
                    at += b.len;
                    leaves[b.leaves.end - 1].merges += b.merges;
                }
                assert_eq!((at, &leaves), (extents.iter().product(), &whole.leaves));
                assert!(cut.depth <= whole.depth);
            }
        }
        let cut = Contraction::new(&[4096], 1024);
        assert_eq!((cut.blocks.len(), cut.levels, cut.depth), (4, 2, 5));
    }

    #[test]
    fn indices_left_out_leave_their_siblings() {
        let tree = Contraction::new(&[128], usize::MAX).leaves;
        let list = |range| clipped(&tree, &range).iter().map(|l| (l.len, l.merges)).collect::<Vec<_>>();
        assert_eq!(clipped(&tree, &(0..128)), tree);
        assert_eq!(list(0..8), [(8, 0)]);
        assert_eq!(list(40..56), [(16, 0)]);
        assert_eq!(list(31..33), [(1, 0), (1, 1)]);
        assert_eq!(list(63..70), [(1, 0), (6, 1)]);
        assert_eq!(list(40..128), [(24, 0), (32, 0), (32, 2)]);
        assert_eq!(list(5..97), [(27, 0), (32, 1), (32, 0), (1, 2)]);
        assert_eq!(list(9..9), []);
    }

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "a list of one run")]
    fn absent_leaves_leave_their_siblings() {
        let over = |len, runs: &[Range<usize>], block| Contraction::over_runs(LeafRuns { len, runs }, block);
        let list = |len, runs: &[Range<usize>]| {
            over(len, runs, 4096).leaves.iter().map(|l| (l.len, l.merges)).collect::<Vec<_>>()
        };
        assert_eq!(list(0, &[]), []);
        assert_eq!(list(70, &[0..3]), [(32, 0), (32, 1), (6, 1)]);
        assert_eq!(list(70, &[1..3]), [(32, 0), (6, 1)]);
        assert_eq!(list(224, &[0..7]), [(32, 0), (32, 1), (32, 0), (32, 2), (32, 0), (32, 1), (32, 2)]);
        assert_eq!(list(224, &[3..7]), [(32, 0), (32, 0), (32, 1), (32, 2)]);
        // Two runs are two blocks, which begin where their indices do, counted from the first one.
        let cut = over(224, &[1..2, 5..7], 4096);
        let blocks: Vec<_> = cut.blocks.iter().map(|b| (b.start, b.len, b.merges)).collect();
        assert_eq!(blocks, [(0, 32, 0), (128, 64, 1)]);
        assert_eq!((cut.levels, over(224, &[0..7], 64).blocks.len()), (1, 4));
    }
}
