//! Reduction trees of different extents whose nodes ranks hold and join alike.

use super::{Layout, ReductionTree, SumGroups};
use crate::tensor::Leaf;

/// All that decides the nodes of ranks.
#[derive(PartialEq)]
struct TreeCut<'a> {
    /// The extents down to the last dim that is sharded.
    extents: &'a [usize],
    /// The form of that dim's leaves.
    leaf: Option<Leaf>,
    layout: &'a Layout,
    done: &'a [usize],
    groups: Option<SumGroups>,
}

impl ReductionTree {
    /// Returns true if every rank holds as many nodes of this tree as of `other`, and joins them in an equal order: the trees
    /// are equal down to the last dim that is sharded, as those of a weight's gradient and of a norm's are.
    pub(crate) fn folds_as(&self, other: &ReductionTree) -> bool {
        self == other || self.cut().is_some_and(|cut| other.cut() == Some(cut))
    }

    /// Returns what decides the nodes of ranks; `None` if the tree is flattened, or ranks hold parts of its groups that may lie
    /// below the last dim that is sharded.
    fn cut(&self) -> Option<TreeCut<'_>> {
        if self.is_flattened() || self.extents.contains(&0) {
            return None;
        }
        let placements = self.layout.placements();
        let last = placements.iter().flat_map(|placement| placement.split_dims()).max()?;
        let (extents, leaf) = (&self.extents[..=last], self.leaf_of(last));
        let halved = &extents[..last + usize::from(leaf != Some(Leaf::Chain))];
        let depth = halved.iter().map(|extent| extent.ilog2() as usize).sum::<usize>();
        let fits = |groups: SumGroups| !groups.is_kept() || groups.depth() <= depth;
        let groups = self.groups;
        groups.is_none_or(fits).then_some(TreeCut {
            extents,
            leaf,
            layout: &self.layout,
            done: &self.done,
            groups,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Mesh;
    use crate::tensor::{Dims, Shape};

    /// All trees of up to three small dims on two axes: those that are said to fold alike have equal orders for every group of
    /// ranks.
    #[test]
    fn trees_that_fold_alike_have_equal_orders() {
        let mesh = Mesh::parse("a=2,b=3", 0).unwrap();
        let mut trees = Vec::new();
        let extents: [&[usize]; 8] = [&[6], &[7], &[12], &[6, 1], &[6, 5], &[7, 4], &[5, 6], &[6, 5, 2]];
        for extents in extents {
            for layout in ["(S0, S0)", "(S0, R)", "(R, S0)", "(S1, S0)", "(S0, S1)", "(S1, S1)"] {
                let layout: Layout = layout.parse().unwrap();
                let dims =
                    layout.placements().iter().flat_map(|p| p.split_dims()).max().expect("one is sharded");
                if dims >= extents.len() {
                    continue;
                }
                for leaf in [Leaf::Pairs, Leaf::Chain] {
                    let tree = ReductionTree::new(Shape::from(extents), leaf, layout.clone());
                    let parts = [2, 4, 16].map(|parts| SumGroups::new(parts).unwrap());
                    let groups = parts.into_iter().flat_map(|groups| [groups, groups.kept()]);
                    let grouped = groups.map(|groups| tree.clone().with_groups(groups));
                    let all = [tree.clone()].into_iter().chain(grouped);
                    trees.extend(all.filter(|tree| tree.most_nodes(&mesh).is_some()));
                }
            }
        }
        let (mut alike, mut others) = (0, 0);
        for (i, a) in trees.iter().enumerate() {
            for b in &trees[..i] {
                if !a.folds_as(b) {
                    others += 1;
                    continue;
                }
                alike += 1;
                for axes in [&[0][..], &[1], &[0, 1]] {
                    for coords in [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]] {
                        let is_member = |member: &&[usize; 2]| {
                            (0..2).all(|k| axes.contains(&k) || member[k] == coords[k])
                        };
                        let all = [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]];
                        let members: Vec<Dims> =
                            all.iter().filter(is_member).map(|member| Dims::from_slice(member)).collect();
                        if axes.iter().any(|axis| a.layout.axis(*axis).is_replicate()) {
                            continue;
                        }
                        let order = |tree: &ReductionTree| tree.fold_order(&mesh, &coords, &members, axes);
                        assert_eq!(order(a), order(b), "{a:?} and {b:?} along {axes:?} at {coords:?}");
                    }
                }
            }
        }
        assert!(alike > 20 && others > 100, "{alike} pairs fold alike, {others} do not");
    }
}
