//! The terms of a sum in parts: which of them each rank has added up, as finished nodes of the summation tree.
//!
//! A `Partial` sum that an operator makes in exact mode comes from cutting the dims summed over: each rank has a box of
//! the terms' indices. The tree over those indices (see [`TreeNode`]) does not depend on the mesh, so what a rank can finish by
//! itself is the *forest* of the largest nodes inside its box: one node where the cut falls on the tree, a few where it
//! falls between, none for an empty box. Ranks hold one tensor for each node, and adding them up in the tree's order
//! gives the bits that one rank gives.

use std::ops::Range;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::piece::Piece;
use super::{Block, Layout, Mesh, Region};
use crate::tensor::{Dims, FoldOrder, FoldStep, Leaf, Shape, SplitRule};

/// The terms of a sum in parts, and who has added up which.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ReductionTree {
    /// The extents of the dims summed over, outermost first.
    pub extents: Shape,
    /// The form of the tree's leaves.
    pub leaf: Leaf,
    /// How the mesh axes split these dims.
    pub layout: Layout,
    /// The axes along which the parts have been added up already, ascending.
    pub done: SmallVec<[usize; 2]>,
}

/// A node of the summation tree: single indices of the outer dims, a range of one dim, all of the inner ones.
///
/// The outermost dim's range is split ([`SplitRule`]) down to single indices, then the next dim's; the innermost one's down to
/// leaves, which continue as [`Leaf`] says. What lies below a node depends on its lengths alone, so evaluated apart it has
/// the bits that it has inside the whole.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TreeNode {
    /// The first index.
    pub start: Dims,
    /// The number of indices along each dim.
    pub len: Dims,
}

impl TreeNode {
    /// The root over dims of these extents.
    pub fn root(extents: &[usize]) -> TreeNode {
        TreeNode { start: Dims::from_elem(0, extents.len()), len: extents.into() }
    }

    /// The number of terms.
    pub fn numel(&self) -> usize {
        self.len.iter().product()
    }

    /// The two nodes below this one; none for a leaf, and for an empty range.
    pub fn halves(&self, leaf: Leaf) -> Option<(TreeNode, TreeNode)> {
        if self.numel() < 2 {
            return None;
        }
        let d = self.len.iter().position(|&n| n > 1).expect("two tree lie along some dim");
        let n = self.len[d];
        let left = left_of(n, (d + 1 == self.len.len()).then_some(leaf))?;
        let (mut a, mut b) = (self.clone(), self.clone());
        a.len[d] = left;
        (b.start[d], b.len[d]) = (self.start[d] + left, n - left);
        Some((a, b))
    }

    /// The same with this range of dim `d`.
    fn with(&self, d: usize, range: Range<usize>) -> TreeNode {
        let mut node = self.clone();
        (node.start[d], node.len[d]) = (range.start, range.len());
        node
    }

    fn overlap(&self, block: &Block) -> usize {
        let common = |d: usize| {
            let end = (self.start[d] + self.len[d]).min(block.start[d] + block.len[d]);
            end.saturating_sub(self.start[d].max(block.start[d]))
        };
        (0..self.start.len()).map(common).product()
    }
}

impl ReductionTree {
    /// The terms that the ranks of a mesh hold before anything is added up.
    pub fn new(extents: Shape, leaf: Leaf, layout: Layout) -> ReductionTree {
        ReductionTree { extents, leaf, layout, done: SmallVec::new() }
    }

    /// The axes whose parts have still to be added up, ascending.
    pub fn open_axes(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layout.ndim()).filter(|a| !self.layout.axis(*a).is_replicate() && !self.done.contains(a))
    }

    /// The same after adding up along `axes`; none where nothing is left to add.
    pub fn after(&self, axes: &[usize]) -> Option<ReductionTree> {
        let mut new = self.clone();
        new.done.extend(axes.iter().copied().filter(|a| !self.layout.axis(*a).is_replicate()));
        new.done.sort_unstable();
        new.done.dedup();
        let open = new.open_axes().next().is_some();
        open.then_some(new)
    }

    /// The nodes that the rank at `coords` holds, in the tree's order; none where its box cuts a leaf that cannot be cut.
    pub fn finished_nodes(&self, mesh: &Mesh, coords: &[usize]) -> Option<Vec<TreeNode>> {
        if self.is_flattened() {
            return self.forest_of_blocks(mesh, coords);
        }
        let dims = 0..self.extents.len();
        let held: SmallVec<[Ranges; 4]> = dims.map(|d| self.held(mesh, coords, d)).collect();
        if held.iter().any(|h| h.is_empty()) {
            return Some(Vec::new());
        }
        // Below the last dim that is not whole, nodes have all; above it, single indices.
        let Some(cut) = (0..held.len()).rev().find(|&d| !is_whole(&held[d], self.extents[d])) else {
            return Some(vec![TreeNode::root(&self.extents)]);
        };
        let mut ranges = Vec::new();
        if !cover(0..self.extents[cut], &held[cut], self.leaf_of(cut), &mut ranges) {
            return None;
        }
        let mut nodes = vec![TreeNode::root(&self.extents)];
        for (d, held) in held[..cut].iter().enumerate() {
            let at = |node: &TreeNode, i: usize| node.with(d, i..i + 1);
            let each =
                |node: &TreeNode| held.iter().cloned().flatten().map(|i| at(node, i)).collect::<Vec<_>>();
            nodes = nodes.iter().flat_map(each).collect();
        }
        Some(nodes.iter().flat_map(|node| ranges.iter().map(|r| node.with(cut, r.clone()))).collect())
    }

    /// The largest number of nodes that a rank holds; none where some rank's box does not consist of nodes.
    ///
    /// Dim by dim, since each axis cuts one: what it takes does not grow with the product of the axes that cut different dims.
    pub fn most_nodes(&self, mesh: &Mesh) -> Option<usize> {
        let open: Vec<usize> = self.open_axes().collect();
        if self.is_flattened() {
            let mut positions = self.positions(mesh, &open).into_iter();
            return positions.try_fold(0, |most, c| Some(self.forest_of_blocks(mesh, &c)?.len().max(most)));
        }
        if self.extents.contains(&0) {
            return Some(0);
        }
        let held = |d: usize| {
            let axes: Vec<usize> =
                open.iter().copied().filter(|&a| self.layout.axis(a).split_dims().contains(&d)).collect();
            let all = self.positions(mesh, &axes).into_iter().map(|c| self.held(mesh, &c, d));
            all.filter(|held| !held.is_empty()).collect::<Vec<Ranges>>()
        };
        let mut dims = (0..self.extents.len()).map(|d| (d, held(d))).rev();
        // Where a rank has all of a dim, no other that is cut from it has any.
        let Some((cut, held)) = dims.find(|(d, held)| !held.iter().all(|h| is_whole(h, self.extents[*d])))
        else {
            return Some(1);
        };
        let (mut most, mut ranges) = (0, Vec::new());
        for held in &held {
            ranges.clear();
            if !cover(0..self.extents[cut], held, self.leaf_of(cut), &mut ranges) {
                return None;
            }
            most = most.max(ranges.len());
        }
        let indices = |held: &Ranges| held.iter().map(Range::len).sum::<usize>();
        Some(dims.fold(most, |n, (_, held)| n * held.iter().map(indices).max().unwrap_or(0)))
    }

    /// How the parts of `members`, the ranks that differ from `coords` along `axes` only, are added up: what is left are
    /// the nodes of their union.
    ///
    /// # Panics
    /// Where some rank's box does not consist of nodes: see [`ReductionTree::most_nodes`].
    pub fn order(&self, mesh: &Mesh, coords: &[usize], members: &[Dims], axes: &[usize]) -> FoldOrder {
        let mut held = FxHashMap::default();
        let mut nodes_len = Vec::with_capacity(members.len());
        for (member, at) in members.iter().enumerate() {
            let nodes = self.finished_nodes(mesh, at).expect("fits");
            nodes_len.push(nodes.len());
            for (node, n) in nodes.into_iter().enumerate() {
                held.insert(n, FoldStep::Push { operand: member, node });
            }
        }
        let mut done = self.clone();
        done.done.extend(axes.iter().copied().filter(|a| !self.layout.axis(*a).is_replicate()));
        let mut steps = Vec::new();
        for node in done.finished_nodes(mesh, coords).expect("a union of nodes consists of nodes") {
            self.emit(node, &held, &mut steps);
        }
        if self.extents.contains(&0) && self.after(axes).is_none() {
            steps.push(FoldStep::Empty);
        }
        FoldOrder::new(nodes_len, steps)
    }

    fn emit(&self, node: TreeNode, held: &FxHashMap<TreeNode, FoldStep>, steps: &mut Vec<FoldStep>) {
        if let Some(&push) = held.get(&node) {
            return steps.push(push);
        }
        let (a, b) = node.halves(self.leaf).expect("each leaf is held by somebody");
        self.emit(a, held, steps);
        self.emit(b, held, steps);
        steps.push(FoldStep::Join);
    }

    /// True where an axis cuts several dims as one, so that what a rank has need not be a box.
    fn is_flattened(&self) -> bool {
        self.layout.ragged_axis().is_some_and(|a| self.layout.axis(a).split_dims().len() > 1)
    }

    /// The form of the leaves of dim `d`; only the innermost has any.
    fn leaf_of(&self, d: usize) -> Option<Leaf> {
        (d + 1 == self.extents.len()).then_some(self.leaf)
    }

    /// The indices that the rank at `coords` has by its cut alone.
    fn region_at(&self, mesh: &Mesh, coords: &[usize]) -> Region {
        Piece::at(mesh, &self.layout, &self.extents, coords).region()
    }

    /// The indices of dim `d` that the rank at `coords` and the ranks along `done` have.
    fn held(&self, mesh: &Mesh, coords: &[usize], d: usize) -> Ranges {
        let done: SmallVec<[usize; 2]> =
            self.done.iter().copied().filter(|&a| self.layout.axis(a).split_dims().contains(&d)).collect();
        let mut at = Dims::from_slice(coords);
        let mut ranges = Ranges::new();
        for place in self.positions(mesh, &done) {
            done.iter().for_each(|&a| at[a] = place[a]);
            let region = self.region_at(mesh, &at);
            let (start, len) = (region.start(d), region.extent(d));
            let (start, len) = start.zip(len).expect("no dims are flattened");
            if len > 0 {
                ranges.push(start..start + len);
            }
        }
        ranges.sort_unstable_by_key(|r| r.start);
        ranges.dedup_by(|next, last| {
            let joins = last.end == next.start;
            if joins {
                last.end = next.end;
            }
            joins
        });
        ranges
    }

    /// [`ReductionTree::forest`], from boxes of any kind.
    fn forest_of_blocks(&self, mesh: &Mesh, coords: &[usize]) -> Option<Vec<TreeNode>> {
        let blocks = self.blocks(mesh, coords);
        let blocks: Vec<&Block> = blocks.iter().collect();
        let mut nodes = Vec::new();
        largest(TreeNode::root(&self.extents), &blocks, self.leaf, &mut nodes).then_some(nodes)
    }

    /// The boxes of terms that the rank at `coords` has added up: its own, and those of the ranks along `done`.
    fn blocks(&self, mesh: &Mesh, coords: &[usize]) -> Vec<Block> {
        let mut at = Dims::from_slice(coords);
        let mut blocks = Vec::new();
        for place in self.positions(mesh, &self.done) {
            self.done.iter().for_each(|&a| at[a] = place[a]);
            blocks.extend(self.region_at(mesh, &at).boxes);
        }
        blocks
    }

    /// The coordinates that differ from the origin along `axes` only.
    fn positions(&self, mesh: &Mesh, axes: &[usize]) -> Vec<Dims> {
        let mut all = vec![Dims::from_elem(0, mesh.ndim())];
        for &a in axes {
            let step = |c: &Dims| {
                (0..mesh.axis_len(a))
                    .map(|i| {
                        let mut c = c.clone();
                        c[a] = i;
                        c
                    })
                    .collect::<Vec<_>>()
            };
            all = all.iter().flat_map(step).collect();
        }
        all
    }
}

/// Indices of one dim: ranges, ascending, with gaps between them.
type Ranges = SmallVec<[Range<usize>; 2]>;

fn is_whole(held: &Ranges, extent: usize) -> bool {
    matches!(&held[..], [all] if *all == (0..extent))
}

/// Appends the largest ranges at or below `at`, of one dim's part of the tree, that lie inside `held`; false where they cut a
/// leaf.
fn cover(at: Range<usize>, held: &[Range<usize>], leaf: Option<Leaf>, out: &mut Vec<Range<usize>>) -> bool {
    let near = held.partition_point(|r| r.end <= at.start)..held.partition_point(|r| r.start < at.end);
    let held = &held[near];
    let common = |r: &Range<usize>| r.end.min(at.end) - r.start.max(at.start);
    let len: usize = held.iter().map(common).sum();
    if len == 0 {
        return true;
    }
    if len == at.len() {
        out.push(at);
        return true;
    }
    let Some(left) = left_of(at.len(), leaf) else { return false };
    let mid = at.start + left;
    cover(at.start..mid, held, leaf, out) && cover(mid..at.end, held, leaf, out)
}

/// How many of `n` indices, at least 2, go to the left; none of a leaf that cannot be cut.
fn left_of(n: usize, leaf: Option<Leaf>) -> Option<usize> {
    leaf.map_or(Some(SplitRule::Halves.left_of(n)), |leaf| leaf.left_of(SplitRule::Halves, n))
}

/// Appends the largest nodes at or below `node` that lie inside the blocks; false where they cut a leaf.
fn largest(node: TreeNode, blocks: &[&Block], leaf: Leaf, out: &mut Vec<TreeNode>) -> bool {
    let near: Vec<&Block> = blocks.iter().copied().filter(|b| node.overlap(b) > 0).collect();
    let held: usize = near.iter().map(|b| node.overlap(b)).sum();
    if held == 0 {
        return true;
    }
    if held == node.numel() {
        out.push(node);
        return true;
    }
    let Some((a, b)) = node.halves(leaf) else { return false };
    largest(a, &near, leaf, out) && largest(b, &near, leaf, out)
}

#[cfg(test)]
mod tests {
    use super::super::Spec;
    use super::super::short::*;
    use super::*;
    use crate::tensor::DType;

    fn forests(
        extents: &[usize],
        leaf: Leaf,
        mesh: &str,
        layout: Layout,
    ) -> Vec<Option<Vec<(usize, usize)>>> {
        let mesh = Mesh::parse(mesh, 0).unwrap();
        let tree = ReductionTree::new(extents.into(), leaf, layout);
        let flat = |n: &TreeNode| {
            let strides = Shape::from(extents).strides();
            (n.start.iter().zip(&strides).map(|(i, s)| i * s).sum(), n.numel())
        };
        let of = |r: usize| tree.finished_nodes(&mesh, &mesh.coords_of(r).unwrap());
        mesh.ranks().map(|r| of(r).map(|nodes| nodes.iter().map(flat).collect())).collect()
    }

    #[test]
    fn even_power_of_two_cuts_are_single_nodes() {
        for leaf in [Leaf::Pairs, Leaf::Chain] {
            let four = forests(&[512], leaf, "tp=4", Layout::new([shard(0)]));
            assert_eq!(four, [0, 128, 256, 384].map(|s| Some(vec![(s, 128)])));
            let rows = forests(&[12, 64], leaf, "dp=2", Layout::new([shard(0)]));
            assert_eq!(rows, [0, 384].map(|s| Some(vec![(s, 384)])));
        }
    }

    #[test]
    fn other_cuts_are_short_forests_and_chains_are_not_cut() {
        let thirds = forests(&[12, 2], Leaf::Chain, "dp=3", Layout::new([shard(0)]));
        let want = [vec![(0, 6), (6, 2)], vec![(8, 2), (10, 2), (12, 4)], vec![(16, 2), (18, 6)]];
        assert_eq!(thirds, want.map(Some));
        assert_eq!(forests(&[64], Leaf::Chain, "tp=3", Layout::new([shard(0)])), [None, None, None]);
        let pairs = forests(&[24], Leaf::Pairs, "tp=3", Layout::new([shard(0)]));
        assert_eq!(pairs, [Some(vec![(0, 8)]), Some(vec![(8, 8)]), Some(vec![(16, 8)])]);
        let five = forests(&[3], Leaf::Pairs, "tp=5", Layout::new([shard(0)]));
        assert_eq!(five[2..], [Some(vec![(2, 1)]), Some(vec![]), Some(vec![])]);
        // The inner dim cut: half of each row.
        let inner = forests(&[3, 64], Leaf::Chain, "tp=2", Layout::new([shard(1)]));
        assert_eq!(inner[1], Some(vec![(32, 32), (96, 32), (160, 32)]));
    }

    /// Dim by dim as by the tree's definition, on every rank, before and after adding along axes.
    #[test]
    fn forests_follow_from_each_dims_ranges() {
        let layouts: [Layout; 8] = [
            Layout::new([shard(0), shard(1), R]),
            Layout::new([shard(1), shard(0), shard(1)]),
            Layout::new([shard(0), shard(0), shard(2)]),
            Layout::new([shard(2), shard(2), shard(0)]).with_order(&[1, 0, 2]).unwrap(),
            Layout::new([ragged(1, &[1, 0, 2]), shard(1), R]),
            Layout::new([ragged(1, &[0, 3, 0]), R, shard(2)]),
            Layout::new([R, R, shard(2)]),
            Layout::new([R, R, R]),
        ];
        let (mut several, mut refused) = (0, 0);
        for text in ["a=3,b=2,c=2", "a=3,b=4,c=1", "a=3,b=5,c=3", "a=3,b=1,c=7"] {
            let mesh = Mesh::parse(text, 0).unwrap();
            for extents in [[6, 8, 1], [3, 5, 7], [1, 1, 40], [12, 1, 96], [9, 2, 64], [0, 4, 4], [3, 0, 1]] {
                for (layout, leaf) in layouts.iter().flat_map(|l| [(l, Leaf::Pairs), (l, Leaf::Chain)]) {
                    for done in [&[][..], &[0], &[1], &[2], &[0, 2], &[1, 2]] {
                        let mut tree = ReductionTree::new(extents.into(), leaf, layout.clone());
                        if Spec::new(&mesh, DType::U8, tree.extents.clone(), tree.layout.clone()).is_err() {
                            continue;
                        }
                        tree.done =
                            done.iter().copied().filter(|&a| !layout.axis(a).is_replicate()).collect();
                        let mut most = Some(0);
                        for r in mesh.ranks() {
                            let coords = mesh.coords_of(r).unwrap();
                            let want = tree.forest_of_blocks(&mesh, &coords);
                            let got = tree.finished_nodes(&mesh, &coords);
                            assert_eq!(got, want, "{text} {layout} {extents:?} {leaf:?} {done:?} rank {r}");
                            most = most.zip(want).map(|(most, nodes)| nodes.len().max(most));
                        }
                        assert_eq!(
                            tree.most_nodes(&mesh),
                            most,
                            "{text} {layout} {extents:?} {leaf:?} {done:?}"
                        );
                        several += usize::from(most > Some(1));
                        refused += usize::from(most.is_none());
                    }
                }
            }
        }
        assert!(several > 100 && refused > 100, "{several}, {refused}");
    }

    /// Adds by steps along one axis after the other, for every mesh and every order of axes, and compares with one rank.
    #[test]
    fn steps_give_the_tree_of_one_rank() {
        fn text_of(node: &TreeNode, leaf: Leaf, text: &dyn Fn(&TreeNode) -> String) -> String {
            match node.halves(leaf) {
                None => text(node),
                Some((a, b)) => format!("({}+{})", text_of(&a, leaf, text), text_of(&b, leaf, text)),
            }
        }
        let name = |n: &TreeNode| format!("{:?}{:?}", n.start, n.len);
        let layouts: [Layout; 5] = [
            Layout::new([shard(0), shard(1)]),
            Layout::new([shard(1), shard(0)]),
            Layout::new([shard(0), shard(0)]),
            Layout::new([shard(0), shard(0)]).with_order(&[1, 0]).unwrap(),
            Layout::new([ragged(2, &[1, 0, 2]), R]),
        ];
        for (text, layout) in
            ["a=2,b=3", "a=3,b=2", "a=3,b=4"].into_iter().flat_map(|m| layouts.iter().map(move |l| (m, l)))
        {
            let mesh = Mesh::parse(text, 0).unwrap();
            for extents in [[6, 8], [5, 3], [1, 9], [12, 40], [3, 0]] {
                let tree = ReductionTree::new(extents.into(), Leaf::Pairs, layout.clone());
                let ragged = layout.ragged_axis().is_some();
                if ragged && (mesh.axis_len(0) != 3 || extents[0] * extents[1] % 3 != 0) {
                    continue;
                }
                let want = text_of(&TreeNode::root(&extents), Leaf::Pairs, &name);
                for order in [vec![vec![0], vec![1]], vec![vec![1], vec![0]], vec![vec![0, 1]]] {
                    let (mut tree, mut open) = (tree.clone(), true);
                    let coords = |r| mesh.coords_of(r).unwrap();
                    let mut held: Vec<Vec<String>> = mesh
                        .ranks()
                        .map(|r| {
                            tree.finished_nodes(&mesh, &coords(r))
                                .unwrap()
                                .iter()
                                .map(|n| text_of(n, Leaf::Pairs, &name))
                                .collect()
                        })
                        .collect();
                    for axes in order {
                        if !open {
                            continue;
                        }
                        let added = |r: usize| {
                            let members: Vec<Dims> = mesh
                                .ranks()
                                .map(coords)
                                .filter(|c| (0..2).all(|a| axes.contains(&a) || c[a] == coords(r)[a]))
                                .collect();
                            let mut stack: Vec<String> = vec![];
                            for step in tree.order(&mesh, &coords(r), &members, &axes).steps() {
                                match *step {
                                    FoldStep::Push { operand: member, node } => {
                                        stack.push(held[mesh.position_of(&members[member])][node].clone())
                                    }
                                    FoldStep::Empty => stack.push("0".into()),
                                    FoldStep::Join => {
                                        let right = stack.pop().unwrap();
                                        let left = stack.pop().unwrap();
                                        stack.push(format!("({left}+{right})"));
                                    }
                                }
                            }
                            stack
                        };
                        held = mesh.ranks().map(added).collect();
                        match tree.after(&axes) {
                            Some(after) => tree = after,
                            None => open = false,
                        }
                    }
                    let want = vec![if extents.contains(&0) { "0".into() } else { want.clone() }];
                    assert!(held.iter().all(|h| *h == want), "{text} {layout} {extents:?}");
                }
            }
        }
    }
}
