//! The parts of a grouped sum: the nodes of its tree that are rounded before they are joined.

use super::ReductionTree;
use super::tree_node::TreeNode;
use crate::tensor::{FoldOrder, FoldStep};

impl ReductionTree {
    /// Returns the parts below the node, in the tree's order: the nodes that are rounded before they are joined. A
    /// node below its parts is a part itself.
    pub(crate) fn parts_of(&self, node: &TreeNode) -> Vec<TreeNode> {
        let mut parts = Vec::new();
        self.append_parts(node.clone(), self.deepest().saturating_sub(self.depth_of(node)), &mut parts);
        parts
    }

    fn append_parts(&self, node: TreeNode, levels: usize, parts: &mut Vec<TreeNode>) {
        match node.halves(self.leaf).filter(|_| levels > 0) {
            Some((a, b)) => {
                self.append_parts(a, levels - 1, parts);
                self.append_parts(b, levels - 1, parts);
            }
            None => parts.push(node),
        }
    }

    /// Returns the order in which `parts` are joined to `nodes`: one operand per part.
    pub(crate) fn join_order(&self, parts: &[TreeNode], nodes: &[TreeNode]) -> FoldOrder {
        let push = |(operand, part): (usize, &TreeNode)| (part.clone(), FoldStep::Push { operand, node: 0 });
        let held = parts.iter().enumerate().map(push).collect();
        let mut steps = Vec::new();
        nodes.iter().for_each(|node| self.emit(node.clone(), &held, &mut steps));
        FoldOrder::new(vec![1; parts.len()], steps)
    }

    /// Returns the depth below which shards may not split the tree.
    pub(super) fn deepest(&self) -> usize {
        self.groups.map_or(usize::MAX, |groups| groups.depth())
    }

    /// Returns the number of nodes above `node`.
    pub(super) fn depth_of(&self, node: &TreeNode) -> usize {
        let (mut here, mut depth) = (TreeNode::root(&self.extents), 0);
        while here != *node {
            let (a, b) = here.halves(self.leaf).expect("the node is in the tree");
            here = if node.start < b.start { a } else { b };
            depth += 1;
        }
        depth
    }
}
