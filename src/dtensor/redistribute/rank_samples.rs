//! The sample of ranks at which the elements of moves are counted, and those of them that may differ.

use smallvec::SmallVec;

use super::states::sampled_along;
use crate::placement::{Layout, Mesh, Placement};
use crate::tensor::{Dims, short_list};

/// The coordinates along each axis at which windows are compared.
pub(in crate::dtensor) struct RankSamples(SmallVec<[Dims; 4]>);

impl RankSamples {
    /// Samples the ranks for moves between layouts whose ragged shards are those of `layouts`.
    pub fn new<'a>(mesh: &Mesh, layouts: impl Iterator<Item = &'a Layout> + Clone) -> RankSamples {
        RankSamples((0..mesh.ndim()).map(|a| sampled_along(mesh, a, layouts.clone())).collect())
    }

    /// Calls `f` at the sampled coordinates along the axes in `varied`; along the others at those of `coords`.
    pub fn visit(&self, mut coords: Dims, varied: impl Fn(usize) -> bool, mut f: impl FnMut(&[usize])) {
        let along = &self.0;
        let varied: Dims = short_list((0..coords.len()).filter(|&a| along[a].len() > 1 && varied(a)));
        if varied.is_empty() {
            return f(&coords);
        }
        let mut at = Dims::from_elem(0, varied.len());
        varied.iter().for_each(|&a| coords[a] = along[a][0]);
        loop {
            f(&coords);
            let Some(k) = (0..varied.len()).rev().find(|&k| at[k] + 1 < along[varied[k]].len()) else {
                return;
            };
            at[k] += 1;
            at[k + 1..].fill(0);
            for (i, &a) in varied.iter().enumerate().skip(k) {
                coords[a] = along[a][at[i]];
            }
        }
    }
}

/// The ways in which ranks differ in a move between two layouts, in the number of elements that they hold before, hold
/// after, or hold before and after.
pub(in crate::dtensor) struct RankDifferences {
    /// The axes along which ranks differ. Along the other axes the first rank has the most of each.
    pub axes: Dims,
    /// True if all ranks hold equally many elements after the move, but for the other axes, and one of the first and last
    /// ranks holds none of them before.
    pub apart: bool,
}

impl RankDifferences {
    /// Returns the differences in a move of a tensor with these extents.
    ///
    /// Along a dim that both layouts cut alike, the numbers have a common factor, which is largest on the first rank. Along
    /// a dim that is cut into equal parts by one layout, and by the other too or into parts of these, all ranks are alike.
    /// If two layouts part ways after some equal cuts, ranks differ along the later axes only: then a rank that is first
    /// along one layout's next axis and last along the other's holds different indices before and after.
    pub fn new(mesh: &Mesh, shape: &[usize], from: &Layout, to: &Layout) -> RankDifferences {
        let cuts = |layout| LayoutCuts::new(mesh, shape, layout);
        RankDifferences::between((from, &cuts(from)), (to, &cuts(to)))
    }

    /// Returns the differences in a move between two layouts of one tensor with these cuts.
    pub fn between(
        (from, old): (&Layout, &LayoutCuts),
        (to, new): (&Layout, &LayoutCuts),
    ) -> RankDifferences {
        let (mut axes, mut even, mut apart) = (Dims::new(), true, false);
        for (old, new) in old.0.iter().zip(&new.0) {
            if old.axes.is_empty() && new.axes.is_empty() {
                continue;
            }
            let alike = |(a, b): &(&usize, &usize)| a == b && from.axis(**a) == to.axis(**a);
            let same = old.axes.iter().zip(&new.axes).take_while(alike).count();
            let is_plain = old.is_plain && new.is_plain;
            if is_plain && old.axes.len() == same && new.axes.len() == same {
                continue;
            }
            if !is_plain || !old.divides || !new.divides {
                even = false;
                axes.extend_from_slice(&old.axes);
                axes.extend_from_slice(&new.axes);
            } else if old.axes.len() > same && new.axes.len() > same {
                apart |= old.axes[same] != new.axes[same];
                axes.extend_from_slice(&old.axes[same..]);
                axes.extend_from_slice(&new.axes[same..]);
            }
        }
        RankDifferences { axes, apart: apart && even }
    }
}

/// The cuts that a layout makes in each dim of a tensor.
pub(in crate::dtensor) struct LayoutCuts(SmallVec<[DimCuts; 4]>);

/// The cuts of one dim.
struct DimCuts {
    /// The axes of several ranks that cut the dim, the outermost first.
    axes: Dims,
    /// True if each of them gives its ranks equal parts of a dim that divides.
    is_plain: bool,
    /// True if the extent divides by the number of parts.
    divides: bool,
}

impl LayoutCuts {
    pub fn new(mesh: &Mesh, shape: &[usize], layout: &Layout) -> LayoutCuts {
        let of = |(d, n): (usize, &usize)| {
            let axes: Dims = short_list(layout.splitters(d).filter(|&a| mesh.axis_len(a) > 1));
            DimCuts {
                is_plain: axes.iter().all(|&a| is_even(layout.axis(a))),
                divides: n.is_multiple_of(axes.iter().map(|&a| mesh.axis_len(a)).product()),
                axes,
            }
        };
        LayoutCuts(shape.iter().enumerate().map(of).collect())
    }
}

/// Returns true if a placement gives ranks equal parts of each dim that it cuts, if these divide by the number of ranks.
fn is_even(placement: &Placement) -> bool {
    match placement {
        Placement::Replicate | Placement::Shard(_) | Placement::Partial(_) => true,
        Placement::RaggedShard { dims, units } => *dims == 1 && units.iter().all(|n| *n == units[0]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::short::*;
    use crate::placement::{ShardBounds, Spec};
    use crate::tensor::{DType, Shape};

    /// Returns the most that a visited rank lacks of the values of so many ranks, and the most that one holds after.
    fn most(spec: &Spec, to: &Layout, members: usize, varied: impl Fn(usize) -> bool) -> [usize; 2] {
        let samples = RankSamples::new(&spec.mesh, [&spec.layout, to].into_iter());
        let bounds = |layout: &Layout, at: &[usize]| ShardBounds::at(&spec.mesh, layout, &spec.shape, at);
        let mut most = [0; 2];
        samples.visit(Dims::from_elem(0, spec.mesh.ndim()), varied, |at| {
            let (have, want) = (bounds(&spec.layout, at), bounds(to, at));
            let lacks = members * want.numel() - have.common_numel(&want);
            most = [most[0].max(lacks), most[1].max(want.numel())];
        });
        most
    }

    #[test]
    fn ranks_that_differ_have_the_most_of_all() {
        let mut counts = [0; 2];
        for (mesh, orders) in [
            ("a=2,b=3", &[&[0, 1][..], &[1, 0]][..]),
            ("a=16,b=8", &[&[0, 1], &[1, 0]]),
            ("a=2,b=1,c=4", &[&[0, 1, 2], &[2, 1, 0]]),
        ] {
            let mesh = Mesh::parse(mesh, 0).unwrap();
            let cuts = |a: usize| {
                let (n, mut some) = (mesh.axis_len(a), vec![0; mesh.axis_len(a)]);
                some[n - 1] = 4;
                [R, shard(0), shard(1), ragged(1, &vec![1; n]), ragged(1, &some), ragged(2, &vec![1; n])]
            };
            let mut all: Vec<Vec<Placement>> = vec![vec![]];
            for a in 0..mesh.ndim() {
                all = all.iter().flat_map(|p| cuts(a).map(|cut| [&p[..], &[cut]].concat())).collect();
            }
            for shape in [[96, 64], [7, 10], [64, 0]] {
                let fits = |(p, order): (&Vec<Placement>, &&[usize])| {
                    let layout = Layout::new(p.iter().cloned()).with_order(order).unwrap();
                    Spec::new(&mesh, DType::F32, shape, layout).ok()
                };
                let pairs = all.iter().flat_map(|p| orders.iter().map(move |order| (p, order)));
                let specs: Vec<Spec> = pairs.filter_map(fits).collect();
                for (i, from) in specs.iter().enumerate() {
                    for to in specs.iter().skip(i % 3).step_by(3) {
                        let (to, members) = (&to.layout, 1 + i % 2);
                        let ranks = RankDifferences::new(&mesh, &Shape::from(shape), &from.layout, to);
                        let found = most(from, to, members, |_| true);
                        let few = most(from, to, members, |a| ranks.axes.contains(&a));
                        assert_eq!(few, found, "{from} to {to}");
                        assert!(!ranks.apart || found[0] == members * found[1], "{from} to {to}");
                        counts = [counts[0] + 1, counts[1] + usize::from(ranks.apart)];
                    }
                }
            }
        }
        assert!(counts[0] > 10_000 && counts[1] > 500, "{counts:?}");
    }
}
