//! The summation tree of a contraction as kernels walk it: a list of leaves, divided into parts that are nodes.

use crate::tensor::{LEAF, SplitRule};

/// The summation tree over some extents, outermost first; the same tree as in products on the CPU.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tree {
    /// All leaves in ascending order; empty if nothing is summed.
    pub(super) leaves: Vec<ContractionLeaf>,
}

/// A leaf: some neighbouring indices of the contraction, and the joins that follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ContractionLeaf {
    /// The number of indices.
    pub(super) len: u32,
    /// The number of times that the two topmost nodes of the stack are joined after this leaf.
    pub(super) merges: u32,
    /// The distance from the root.
    pub(super) depth: u32,
}

/// A node of the tree that is computed separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SeparateNode {
    /// The range of its leaves.
    pub(super) leaves: (usize, usize),
    /// Its first index.
    pub(super) start: usize,
}

impl Tree {
    /// Builds the tree over `extents`; without dims it has a single index.
    pub(super) fn new(extents: &[usize]) -> Tree {
        let mut tree = Tree::default();
        let extents = if extents.is_empty() { &[1] } else { extents };
        if let Some((&first, rest)) = extents.split_first()
            && !extents.contains(&0)
        {
            tree.node(first, rest, 0);
        }
        tree
    }

    /// Returns the depth of the deepest leaf.
    pub(super) fn deepest(&self) -> u32 {
        self.leaves.iter().map(|l| l.depth).max().unwrap_or(0)
    }

    /// Returns the depth down to which the tree is complete, so that its nodes may be parts.
    pub(super) fn full_depth(&self) -> u32 {
        self.leaves.iter().map(|l| l.depth).min().unwrap_or(0)
    }

    /// Returns true if the length of every leaf is a multiple of `n`.
    pub(super) fn is_in_groups_of(&self, n: u32) -> bool {
        self.leaves.iter().all(|l| l.len.is_multiple_of(n))
    }

    /// Returns the nodes at `depth`, which is at most [`Tree::full_depth`], in ascending order.
    pub(super) fn parts(&self, depth: u32) -> Vec<SeparateNode> {
        let (mut parts, mut first, mut start, mut at) = (Vec::new(), 0, 0, 0);
        for (i, leaf) in self.leaves.iter().enumerate() {
            at += leaf.len as usize;
            // The joins after a leaf end at the depth of the node that they complete.
            if leaf.depth - leaf.merges <= depth {
                parts.push(SeparateNode { leaves: (first, i + 1), start });
                (first, start) = (i + 1, at);
            }
        }
        parts
    }

    /// Adds the node over `len` indices of one dim and all inner dims.
    fn node(&mut self, len: usize, inner: &[usize], depth: u32) {
        match inner.split_first() {
            None if len <= LEAF => self.leaves.push(ContractionLeaf { len: len as u32, merges: 0, depth }),
            Some((&next, inner)) if len == 1 => self.node(next, inner, depth),
            _ => {
                let left = SplitRule::Halves.left_of(len);
                self.node(left, inner, depth + 1);
                self.node(len - left, inner, depth + 1);
                self.leaves.last_mut().expect("two nodes have leaves").merges += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_and_parts_by_hand() {
        let of = |extents: &[usize]| -> Vec<(u32, u32, u32)> {
            Tree::new(extents).leaves.iter().map(|l| (l.len, l.merges, l.depth)).collect()
        };
        assert_eq!(of(&[0]), []);
        assert_eq!(of(&[3, 0]), []);
        assert_eq!((of(&[]), of(&[32])), (vec![(1, 0, 0)], vec![(32, 0, 0)]));
        assert_eq!(of(&[65]), [(17, 0, 2), (16, 1, 2), (32, 1, 1)]);
        assert_eq!(of(&[2, 40]), [(20, 0, 2), (20, 1, 2), (20, 0, 2), (20, 2, 2)]);
        let tree = Tree::new(&[65]);
        assert_eq!((tree.deepest(), tree.full_depth()), (2, 1));
        let parts = [SeparateNode { leaves: (0, 2), start: 0 }, SeparateNode { leaves: (2, 3), start: 33 }];
        assert_eq!(tree.parts(1), parts);
        assert_eq!(tree.parts(0), [SeparateNode { leaves: (0, 3), start: 0 }]);
    }

    #[test]
    fn parts_are_all_nodes_of_a_depth() {
        for extents in [&[1000][..], &[7, 100], &[5, 3, 40], &[2048], &[33], &[1]] {
            let tree = Tree::new(extents);
            for depth in 0..=tree.full_depth() {
                let parts = tree.parts(depth);
                assert_eq!(parts.len(), 1 << depth, "{extents:?} at {depth}");
                let mut behind = (0, 0);
                for part in parts {
                    assert_eq!((part.leaves.0, part.start), behind);
                    let leaves = &tree.leaves[part.leaves.0..part.leaves.1];
                    let len: usize = leaves.iter().map(|l| l.len as usize).sum();
                    behind = (part.leaves.1, part.start + len);
                }
                assert_eq!(behind, (tree.leaves.len(), extents.iter().product()));
            }
        }
    }
}
