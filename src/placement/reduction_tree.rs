//! The reduction tree of a partial sum, and the nodes of it that each rank has finished.
//!
//! In exact mode a `Partial` sum comes from an operator whose summed dims are sharded: each rank holds a box of the
//! summed indices. The tree over these indices (see [`TreeNode`]) does not depend on the mesh. A rank adds up the
//! largest nodes that lie inside its box: one node if the shard boundaries fall on nodes, a few if they fall between,
//! none for an empty box. Each rank stores one tensor per finished node. Joining these in the tree's order gives the
//! bits that a single rank computes.

use std::ops::Range;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::shard_bounds::ShardBounds;
use super::tree_node::{TreeNode, depth_in, left_of};
use super::{IndexBox, Layout, Mesh, Region, SumGroups};
use crate::tensor::{DType, Dims, FoldOrder, FoldStep, Leaf, Shape, sort_by_key};

/// The reduction tree of a partial sum: which indices are summed, and which part of the tree each rank has finished.
///
/// With twelve rows on three ranks, as 0..4, 4..8 and 8..12, rank 0 finishes rows 0..3 and row 3.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ReductionTree {
    /// The extents of the summed dims, outermost first.
    pub(crate) extents: Shape,
    /// The form of the leaves of the tree.
    pub(crate) leaf: Leaf,
    /// The layout that shards the summed dims over the mesh axes.
    pub(crate) layout: Layout,
    /// The axes along which the partial sums have been added up already, ascending.
    pub(crate) done: SmallVec<[usize; 2]>,
    /// The parts whose sums are rounded before they are joined, if there are any. Boundaries of shards may not split
    /// them.
    pub(crate) groups: Option<SumGroups>,
}

impl ReductionTree {
    /// Creates the tree of a sum that has been reduced over no axis yet.
    pub(crate) fn new(extents: Shape, leaf: Leaf, layout: Layout) -> ReductionTree {
        ReductionTree { extents, leaf, layout, done: SmallVec::new(), groups: None }
    }

    /// Returns the same tree, whose parts are rounded.
    pub(crate) fn with_groups(self, groups: SumGroups) -> ReductionTree {
        ReductionTree { groups: Some(groups), ..self }
    }

    /// Returns the dtype in which ranks store and send nodes of a sum of `dtype`: that of its groups, otherwise f32
    /// for f16 and bf16, so that the sum is rounded once.
    pub(crate) fn stored_dtype(&self, dtype: DType) -> DType {
        match (&self.groups, dtype) {
            (Some(groups), _) if groups.rounds(dtype) && !groups.is_kept() => groups.wire(),
            (_, DType::F16 | DType::BF16) => DType::F32,
            _ => dtype,
        }
    }

    /// Returns the axes whose partial sums have not been added up yet, ascending.
    pub(crate) fn open_axes(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layout.ndim()).filter(|a| !self.layout.axis(*a).is_replicate() && !self.done.contains(a))
    }

    /// Returns the tree after adding up along `axes`, or `None` if nothing is left to add.
    pub(crate) fn after(&self, axes: &[usize]) -> Option<ReductionTree> {
        let mut new = self.clone();
        new.done.extend(axes.iter().copied().filter(|a| !self.layout.axis(*a).is_replicate()));
        new.done.sort_unstable();
        new.done.dedup();
        let open = new.open_axes().next().is_some();
        open.then_some(new)
    }

    /// Returns the nodes that the rank at `coords` stores, in the tree's order, or `None` if the boundary of its box
    /// splits a leaf that cannot be split.
    pub(crate) fn finished_nodes(&self, mesh: &Mesh, coords: &[usize]) -> Option<Vec<TreeNode>> {
        let nodes = self.largest_nodes(mesh, coords)?;
        Some(match self.groups.is_some_and(|groups| groups.is_kept()) {
            true => nodes.iter().flat_map(|node| self.parts_of(node)).collect(),
            false => nodes,
        })
    }

    /// Returns the largest nodes that the rank at `coords` has finished, or `None` as above.
    fn largest_nodes(&self, mesh: &Mesh, coords: &[usize]) -> Option<Vec<TreeNode>> {
        if self.is_flattened() {
            return self.finished_nodes_of_boxes(mesh, coords);
        }
        let held = self.held(mesh, coords);
        if held.iter().any(|h| h.is_empty()) {
            return Some(Vec::new());
        }
        let Some(cut) = self.innermost_cut(&held) else { return Some(vec![TreeNode::root(&self.extents)]) };
        let ranges = self.largest_ranges(cut, &held[cut])?;
        let mut nodes = vec![TreeNode::root(&self.extents)];
        for (d, held) in held[..cut].iter().enumerate() {
            let each = |node: &TreeNode| {
                held.iter().cloned().flatten().map(|i| node.with(d, i..i + 1)).collect::<Vec<_>>()
            };
            nodes = nodes.iter().flat_map(each).collect();
        }
        Some(nodes.iter().flat_map(|node| ranges.iter().map(|r| node.with(cut, r.clone()))).collect())
    }

    /// Returns the number of nodes that the rank at `coords` stores, or `None` as [`ReductionTree::finished_nodes`].
    pub(crate) fn nodes_len(&self, mesh: &Mesh, coords: &[usize]) -> Option<usize> {
        if self.is_flattened() || self.groups.is_some_and(|groups| groups.is_kept()) {
            return self.finished_nodes(mesh, coords).map(|nodes| nodes.len());
        }
        let held = self.held(mesh, coords);
        if held.iter().any(|h| h.is_empty()) {
            return Some(0);
        }
        let Some(cut) = self.innermost_cut(&held) else { return Some(1) };
        let outer = held[..cut].iter().map(|held| held.iter().map(Range::len).sum::<usize>());
        Some(outer.product::<usize>() * self.largest_ranges(cut, &held[cut])?.len())
    }

    /// Returns the indices of each dim that the rank at `coords` has added up. No dims are flattened.
    fn held(&self, mesh: &Mesh, coords: &[usize]) -> SmallVec<[Ranges; 4]> {
        (0..self.extents.len()).map(|d| self.held_ranges(mesh, coords, d)).collect()
    }

    /// Returns the last dim that is not held as a whole. A node has one index of each dim before it, and all of the dims
    /// after it.
    fn innermost_cut(&self, held: &[Ranges]) -> Option<usize> {
        (0..held.len()).rev().find(|&d| !is_whole(&held[d], self.extents[d]))
    }

    /// Returns the ranges of dim `cut` that the nodes have, or `None` if one would split a leaf.
    fn largest_ranges(&self, cut: usize, held: &Ranges) -> Option<Vec<Range<usize>>> {
        let mut ranges = Vec::new();
        append_largest_ranges(0..self.extents[cut], held, self.leaf_of(cut), &mut ranges).then_some(ranges)
    }

    /// Returns the largest number of nodes that a rank stores, or `None` if a rank's box does not consist of nodes, or
    /// of parts if there are groups.
    ///
    /// The count goes dim by dim, since each axis splits one dim: its cost does not grow with the product of axes
    /// that split different dims.
    pub(crate) fn most_nodes(&self, mesh: &Mesh) -> Option<usize> {
        let open: Vec<usize> = self.open_axes().collect();
        if self.is_flattened() {
            let mut positions = self.positions(mesh, &open).into_iter();
            return positions.try_fold(0, |most, c| {
                let nodes = self.finished_nodes_of_boxes(mesh, &c)?;
                let splits = nodes.iter().any(|node| self.depth_of(node) > self.deepest());
                (!splits).then(|| nodes.len().max(most))
            });
        }
        if self.extents.contains(&0) {
            return Some(0);
        }
        let held = |d: usize| {
            let axes: Vec<usize> =
                open.iter().copied().filter(|&a| self.layout.axis(a).split_dims().contains(&d)).collect();
            let all = self.positions(mesh, &axes).into_iter().map(|c| self.held_ranges(mesh, &c, d));
            all.filter(|held| !held.is_empty()).collect::<Vec<Ranges>>()
        };
        let mut dims = (0..self.extents.len()).map(|d| (d, held(d))).rev();
        // If a rank holds all of a dim, the other ranks along the axes that split this dim hold none of it.
        let Some((cut, held)) = dims.find(|(d, held)| !held.iter().all(|h| is_whole(h, self.extents[*d])))
        else {
            return Some(1);
        };
        // A node has a single index of each dim before `cut`; the deepest of a dim is as deep as all halvings go.
        let outer: usize =
            self.extents[..cut].iter().map(|n| n.next_power_of_two().trailing_zeros() as usize).sum();
        let (extent, leaf) = (0..self.extents[cut], self.leaf_of(cut));
        let (mut most, mut ranges) = (0, Vec::new());
        for held in &held {
            ranges.clear();
            if !append_largest_ranges(extent.clone(), held, leaf, &mut ranges) {
                return None;
            }
            if self.groups.is_some()
                && ranges.iter().any(|r| outer + depth_in(extent.clone(), r, leaf) > self.deepest())
            {
                return None;
            }
            most = most.max(ranges.len());
        }
        let indices = |held: &Ranges| held.iter().map(Range::len).sum::<usize>();
        Some(dims.fold(most, |n, (_, held)| n * held.iter().map(indices).max().unwrap_or(0)))
    }

    /// Returns the order in which the nodes of `members` are joined: `members` are the ranks that differ from
    /// `coords` along `axes` only. The result is the nodes of the union of their boxes.
    ///
    /// # Panics
    /// Panics if a rank's box does not consist of nodes: see [`ReductionTree::most_nodes`].
    pub(crate) fn fold_order(
        &self,
        mesh: &Mesh,
        coords: &[usize],
        members: &[Dims],
        axes: &[usize],
    ) -> FoldOrder {
        let mut held = FxHashMap::default();
        let mut nodes_len = Vec::with_capacity(members.len());
        for (member, coords) in members.iter().enumerate() {
            let nodes = self.finished_nodes(mesh, coords).expect("fits");
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

    /// Appends the steps that compute `node` from the nodes that members hold.
    pub(super) fn emit(
        &self,
        node: TreeNode,
        held: &FxHashMap<TreeNode, FoldStep>,
        steps: &mut Vec<FoldStep>,
    ) {
        if let Some(&push) = held.get(&node) {
            return steps.push(push);
        }
        let (a, b) = node.halves(self.leaf).expect("some member holds each leaf");
        self.emit(a, held, steps);
        self.emit(b, held, steps);
        steps.push(FoldStep::Join);
    }

    /// Returns true if an axis splits several dims as one, so that a rank's region may not be a box.
    pub(super) fn is_flattened(&self) -> bool {
        self.layout.placements().iter().any(|p| p.split_dims().len() > 1)
    }

    /// Returns the form of the leaves of dim `d`; only the innermost dim has leaves.
    pub(super) fn leaf_of(&self, d: usize) -> Option<Leaf> {
        (d + 1 == self.extents.len()).then_some(self.leaf)
    }

    /// Returns the indices that the layout gives the rank at `coords`.
    fn region_at(&self, mesh: &Mesh, coords: &[usize]) -> Region {
        ShardBounds::at(mesh, &self.layout, &self.extents, coords).region()
    }

    /// Returns the indices of dim `d` that the rank at `coords` and the ranks along `done` hold together.
    fn held_ranges(&self, mesh: &Mesh, coords: &[usize], d: usize) -> Ranges {
        let done: SmallVec<[usize; 2]> =
            self.done.iter().copied().filter(|&a| self.layout.axis(a).split_dims().contains(&d)).collect();
        let mut member = Dims::from_slice(coords);
        let mut ranges = Ranges::new();
        for place in self.positions(mesh, &done) {
            done.iter().for_each(|&a| member[a] = place[a]);
            let held = ShardBounds::at(mesh, &self.layout, &self.extents, &member);
            if !held.range(d).is_empty() {
                ranges.push(held.range(d));
            }
        }
        sort_by_key(&mut ranges, |r| r.start);
        ranges.dedup_by(|next, last| {
            let joins = last.end == next.start;
            if joins {
                last.end = next.end;
            }
            joins
        });
        ranges
    }

    /// Computes [`ReductionTree::finished_nodes`] from boxes of any kind.
    fn finished_nodes_of_boxes(&self, mesh: &Mesh, coords: &[usize]) -> Option<Vec<TreeNode>> {
        let boxes = self.boxes(mesh, coords);
        let boxes: Vec<&IndexBox> = boxes.iter().collect();
        let mut nodes = Vec::new();
        append_largest_nodes(TreeNode::root(&self.extents), &boxes, self.leaf, &mut nodes).then_some(nodes)
    }

    /// Returns the boxes of summed indices that the rank at `coords` has added up: its own, and those of the ranks
    /// along `done`.
    fn boxes(&self, mesh: &Mesh, coords: &[usize]) -> Vec<IndexBox> {
        let mut member = Dims::from_slice(coords);
        let mut boxes = Vec::new();
        for place in self.positions(mesh, &self.done) {
            self.done.iter().for_each(|&a| member[a] = place[a]);
            boxes.extend(self.region_at(mesh, &member).boxes);
        }
        boxes
    }

    /// Returns the coordinates that differ from the origin along `axes` only.
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

/// Ranges of indices of one dim, ascending, with gaps between them.
type Ranges = SmallVec<[Range<usize>; 2]>;

/// Returns true if `held` is the whole dim.
fn is_whole(held: &Ranges, extent: usize) -> bool {
    matches!(&held[..], [all] if *all == (0..extent))
}

/// Appends the largest ranges at or below `range`, in one dim's part of the tree, that lie inside `held`; returns false
/// if they split a leaf.
fn append_largest_ranges(
    range: Range<usize>,
    held: &[Range<usize>],
    leaf: Option<Leaf>,
    out: &mut Vec<Range<usize>>,
) -> bool {
    let near = held.partition_point(|r| r.end <= range.start)..held.partition_point(|r| r.start < range.end);
    let held = &held[near];
    let common = |r: &Range<usize>| r.end.min(range.end) - r.start.max(range.start);
    let len: usize = held.iter().map(common).sum();
    if len == 0 {
        return true;
    }
    if len == range.len() {
        out.push(range);
        return true;
    }
    let Some(left) = left_of(range.len(), leaf) else { return false };
    let mid = range.start + left;
    append_largest_ranges(range.start..mid, held, leaf, out)
        && append_largest_ranges(mid..range.end, held, leaf, out)
}

/// Appends the largest nodes at or below `node` that lie inside the boxes; returns false if they split a leaf.
fn append_largest_nodes(node: TreeNode, boxes: &[&IndexBox], leaf: Leaf, out: &mut Vec<TreeNode>) -> bool {
    let near: Vec<&IndexBox> = boxes.iter().copied().filter(|b| node.overlap(b) > 0).collect();
    let held: usize = near.iter().map(|b| node.overlap(b)).sum();
    if held == 0 {
        return true;
    }
    if held == node.numel() {
        out.push(node);
        return true;
    }
    let Some((a, b)) = node.halves(leaf) else { return false };
    append_largest_nodes(a, &near, leaf, out) && append_largest_nodes(b, &near, leaf, out)
}

#[cfg(test)]
mod tests {
    use super::super::Spec;
    use super::super::short::*;
    use super::*;
    use crate::tensor::DType;

    fn nodes_of_ranks(
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
        let nodes_of = |r: usize| tree.finished_nodes(&mesh, &mesh.coords_of(r).unwrap());
        mesh.ranks().map(|r| nodes_of(r).map(|nodes| nodes.iter().map(flat).collect())).collect()
    }

    #[test]
    fn even_power_of_two_cuts_are_single_nodes() {
        for leaf in [Leaf::Pairs, Leaf::Chain] {
            let four = nodes_of_ranks(&[512], leaf, "tp=4", Layout::new([shard(0)]));
            assert_eq!(four, [0, 128, 256, 384].map(|s| Some(vec![(s, 128)])));
            let rows = nodes_of_ranks(&[12, 64], leaf, "dp=2", Layout::new([shard(0)]));
            assert_eq!(rows, [0, 384].map(|s| Some(vec![(s, 384)])));
        }
    }

    #[test]
    fn other_cuts_are_short_forests_and_chains_are_not_cut() {
        let thirds = nodes_of_ranks(&[12, 2], Leaf::Chain, "dp=3", Layout::new([shard(0)]));
        let want = [vec![(0, 6), (6, 2)], vec![(8, 2), (10, 2), (12, 4)], vec![(16, 2), (18, 6)]];
        assert_eq!(thirds, want.map(Some));
        assert_eq!(nodes_of_ranks(&[64], Leaf::Chain, "tp=3", Layout::new([shard(0)])), [None, None, None]);
        let pairs = nodes_of_ranks(&[24], Leaf::Pairs, "tp=3", Layout::new([shard(0)]));
        assert_eq!(pairs, [Some(vec![(0, 8)]), Some(vec![(8, 8)]), Some(vec![(16, 8)])]);
        let five = nodes_of_ranks(&[3], Leaf::Pairs, "tp=5", Layout::new([shard(0)]));
        assert_eq!(five[2..], [Some(vec![(2, 1)]), Some(vec![]), Some(vec![])]);
        // The inner dim is sharded: each rank has half of each row.
        let inner = nodes_of_ranks(&[3, 64], Leaf::Chain, "tp=2", Layout::new([shard(1)]));
        assert_eq!(inner[1], Some(vec![(32, 32), (96, 32), (160, 32)]));
    }

    /// The dim-by-dim algorithm gives the nodes of the definition, on every rank, before and after adding along axes.
    #[test]
    fn nodes_follow_from_each_dims_ranges() {
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
                    let groups = [None, SumGroups::new(4).ok(), SumGroups::new(16).ok()];
                    for (done, groups) in [&[][..], &[0], &[1], &[2], &[0, 2], &[1, 2]]
                        .into_iter()
                        .flat_map(|done| groups.map(|groups| (done, groups)))
                    {
                        let mut tree = ReductionTree::new(extents.into(), leaf, layout.clone());
                        tree.groups = groups;
                        if Spec::new(&mesh, DType::U8, tree.extents.clone(), tree.layout.clone()).is_err() {
                            continue;
                        }
                        tree.done =
                            done.iter().copied().filter(|&a| !layout.axis(a).is_replicate()).collect();
                        let mut most = Some(0);
                        for r in mesh.ranks() {
                            let coords = mesh.coords_of(r).unwrap();
                            let want = tree.finished_nodes_of_boxes(&mesh, &coords);
                            let got = tree.finished_nodes(&mesh, &coords);
                            assert_eq!(got, want, "{text} {layout} {extents:?} {leaf:?} {done:?} rank {r}");
                            let whole = |n: &TreeNode| tree.depth_of(n) <= tree.deepest();
                            let want = want.filter(|nodes| nodes.iter().all(whole));
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

    /// Adds up along one axis after the other, in every order of axes, and compares with a single rank.
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
                            for step in tree.fold_order(&mesh, &coords(r), &members, &axes).steps() {
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
