//! The summation tree of a contraction, as lists of leaves and blocks in ascending order.
//!
//! The summed dims are taken outermost first. A dim's range is split by the one rule ([`SplitRule::Halves`]): outer
//! dims down to single indices, the innermost down to leaves of at most [`LEAF`]. A leaf is one chain of fused
//! multiply-adds in ascending order, which starts with a product; a node is the sum of its left and its right half. How
//! a node is cut depends on its extents alone, so a node evaluated apart has the bits it has inside the whole.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use crate::tensor::{Dims, LEAF, SplitRule};

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
        tree.depth =
            tree.blocks.iter().map(|b| max_stack_len(&tree.leaves[b.leaves.clone()])).max().unwrap_or(0);
        let joins = tree.blocks.iter().map(|b| ContractionLeaf { len: 0, merges: b.merges });
        tree.levels = max_stack_len(&joins.collect::<Vec<_>>());
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

/// Returns the largest height of the stack.
fn max_stack_len(steps: &[ContractionLeaf]) -> usize {
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
}
