//! Nodes of a reduction tree: how a sum over several dims is split.

use std::ops::Range;

use super::IndexBox;
use crate::tensor::{Dims, Leaf, SplitRule};

/// A node of the reduction tree: a single index of each outer dim, a range of one dim, and all of the inner dims.
///
/// The range of the outermost dim is halved ([`SplitRule`]) down to single indices, then that of the next dim; that of
/// the innermost dim is halved down to leaves, which are added up as [`Leaf`] says. The tree below a node depends
/// only on the node's lengths. A node that is evaluated alone therefore has the bits that it has inside the whole
/// tree.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct TreeNode {
    /// The first index along each dim.
    pub(crate) start: Dims,
    /// The number of indices along each dim.
    pub(crate) len: Dims,
}

impl TreeNode {
    /// Returns the root of the tree over dims of these extents.
    pub(crate) fn root(extents: &[usize]) -> TreeNode {
        TreeNode { start: Dims::from_elem(0, extents.len()), len: extents.into() }
    }

    /// Returns the number of summed indices below this node.
    pub(crate) fn numel(&self) -> usize {
        self.len.iter().product()
    }

    /// Returns the two children of this node, or `None` for a leaf or an empty range.
    pub(crate) fn halves(&self, leaf: Leaf) -> Option<(TreeNode, TreeNode)> {
        if self.numel() < 2 {
            return None;
        }
        let d = self
            .len
            .iter()
            .position(|&n| n > 1)
            .expect("a node of two or more indices has a dim of two or more");
        let n = self.len[d];
        let left = left_of(n, (d + 1 == self.len.len()).then_some(leaf))?;
        let (mut a, mut b) = (self.clone(), self.clone());
        a.len[d] = left;
        (b.start[d], b.len[d]) = (self.start[d] + left, n - left);
        Some((a, b))
    }

    /// Returns the node with this range of dim `d`.
    pub(super) fn with(&self, d: usize, range: Range<usize>) -> TreeNode {
        let mut node = self.clone();
        (node.start[d], node.len[d]) = (range.start, range.len());
        node
    }

    /// Returns the number of indices in common with a box.
    pub(super) fn overlap(&self, block: &IndexBox) -> usize {
        let common = |d: usize| {
            let end = (self.start[d] + self.len[d]).min(block.start[d] + block.len[d]);
            end.saturating_sub(self.start[d].max(block.start[d]))
        };
        (0..self.start.len()).map(common).product()
    }
}

/// Returns the number of `n` indices (at least 2) that go to the left child, or `None` for a leaf that cannot be
/// split.
pub(super) fn left_of(n: usize, leaf: Option<Leaf>) -> Option<usize> {
    leaf.map_or(Some(SplitRule::Halves.left_of(n)), |leaf| leaf.left_of(SplitRule::Halves, n))
}

/// Returns the number of halvings of the range `whole` after which one part of it is `range`.
pub(super) fn depth_in(mut whole: Range<usize>, range: &Range<usize>, leaf: Option<Leaf>) -> usize {
    let mut depth = 0;
    while whole != *range {
        let mid = whole.start + left_of(whole.len(), leaf).expect("the range is a node");
        whole = if range.start < mid { whole.start..mid } else { mid..whole.end };
        depth += 1;
    }
    depth
}
