//! The modelled time of moving an operand, by the mesh's [`Network`](crate::comm::Network).
//!
//! The time is that of the rank that receives or sends most, counted on the windows of all ranks (of some along each
//! axis on meshes of more than 64), from metadata that all ranks share. Chunks may be uneven, empty or ragged, splits
//! nested, and a partial sum may have several nodes. A move is one exchange, a reduction that sends each rank the
//! partial values of what it will hold, or an all-reduce next to an exchange. The planner of redistributions may find
//! a cheaper path over fast and slow links. A slice communicates nothing: it costs almost nothing, but more than not
//! moving.

use crate::comm::{Cost, Peers};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::redistribute::{RankDifferences, RankSamples, communicating_axes, peers};
use crate::placement::{Layout, Mesh, Placement, ShardBounds};
use crate::tensor::{Dims, short_list};

/// The time of a move, and the bytes that the rank that receives most receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::dtensor) struct MoveCost {
    pub time: Cost,
    pub bytes: u64,
}

/// The largest mesh on which the elements that a rank sends are counted receiver by receiver if splits are nested.
const COUNTED: usize = 64;

impl DeviceMesh {
    /// Returns the distance of the ranks along axis `a` from each other.
    pub(in crate::dtensor) fn axis_peers(&self, a: usize) -> &Peers {
        &self.0.peers.get_or_init(|| {
            let all = 0..self.mesh().ndim();
            all.map(|a| peers(self.rank().network(), self.mesh(), &[a])).collect()
        })[a]
    }
}

/// Returns the coordinates of the rank that holds most: the first along each axis, or that with the most units of the
/// first ragged shard of `layouts`.
pub(in crate::dtensor) fn largest_rank<'a>(layouts: impl Iterator<Item = &'a Layout> + Clone) -> Dims {
    let ndim = layouts.clone().next().map_or(0, Layout::ndim);
    let along = |a| {
        let units = layouts.clone().find_map(|layout| layout.axis(a).ragged_units());
        units.map_or(0, |units| {
            (0..units.len()).max_by_key(|&i| (units[i], std::cmp::Reverse(i))).unwrap_or(0)
        })
    };
    (0..ndim).map(along).collect()
}

/// Returns the coordinates of the rank that holds least: the last along each axis, or that with the fewest units of the
/// first ragged shard of `layouts`.
pub(in crate::dtensor) fn smallest_rank<'a>(
    layouts: impl Iterator<Item = &'a Layout> + Clone,
    mesh: &Mesh,
) -> Dims {
    let along = |a| {
        let units = layouts.clone().find_map(|layout| layout.axis(a).ragged_units());
        units.map_or(mesh.axis_len(a) - 1, |units| (0..units.len()).min_by_key(|&i| units[i]).unwrap_or(0))
    };
    (0..mesh.ndim()).map(along).collect()
}

/// Returns the cost of moving an operand to `to`; infinite for a new `Partial`, which the dispatcher never creates on
/// its own.
pub(in crate::dtensor) fn of_move(
    mesh: &DeviceMesh,
    f: &TensorMeta,
    to: &Layout,
    ranks: &RankSamples,
) -> MoveCost {
    let from = f.layout();
    if from == to {
        return MoveCost::default();
    }
    let all = || 0..from.ndim();
    let opens = |a: usize| to.axis(a).is_partial() && to.axis(a) != from.axis(a);
    if all().any(opens) {
        return MoveCost { time: Cost::INFINITE, bytes: u64::MAX };
    }
    let folds = |a: &usize| from.axis(*a).is_partial() && to.axis(*a) != from.axis(*a);
    let folded: Dims = short_list(all().filter(folds).filter(|&a| mesh.mesh().axis_len(a) > 1));
    let traffic = OperandTraffic { mesh, f, ranks };
    let cost = if folded.is_empty() {
        traffic.exchange(from, to)
    } else {
        let fold = traffic.fold(from, to, &folded);
        let whole = folded.iter().fold(from.clone(), |l, &a| l.set(a, Placement::Replicate));
        // The other splits change before an all-reduce if that leaves less to reduce, else after it.
        let cut = folded.iter().all(|&a| to.axis(a).is_replicate()).then_some(to);
        let [before, after] = [cut.unwrap_or(&whole), &whole].map(|mid| {
            let sum = traffic.all_reduce(mid, &folded);
            let rest = traffic.exchange(&whole, if std::ptr::eq(mid, to) { mid } else { to });
            MoveCost { time: sum.time + rest.time, bytes: sum.bytes.saturating_add(rest.bytes) }
        });
        fold.min(before).min(after)
    };
    MoveCost { time: Cost::LEAST + cost.time, bytes: cost.bytes }
}

/// The traffic of one operand's moves.
struct OperandTraffic<'a> {
    mesh: &'a DeviceMesh,
    f: &'a TensorMeta,
    ranks: &'a RankSamples,
}

impl OperandTraffic<'_> {
    /// An exchange in which each rank receives the elements that it lacks.
    fn exchange(&self, from: &Layout, to: &Layout) -> MoveCost {
        if from == to {
            return MoveCost::default();
        }
        let axes = communicating_axes(from, to, self.f.shape().len());
        // A rank sends each element to all ranks along `axes` that `to` does not cut. Along an axis that only `to` cuts, some
        // ranks need the element and others do not.
        let cuts = |a: usize| !to.axis(a).split_dims().is_empty();
        let len = |a: usize| self.mesh.mesh().axis_len(a);
        let copies: usize = axes.iter().filter(|&&a| !cuts(a)).map(|&a| len(a)).product();
        let parts = (0..to.ndim()).any(|a| cuts(a) && to.axis(a) != from.axis(a) && !axes.contains(&a));
        let group = parts.then(|| axes.iter().fold(to.clone(), |l, &a| l.set(a, Placement::Replicate)));
        let nested = axes.iter().any(|&a| {
            (0..to.ndim()).any(|b| b != a && [from, to].iter().any(|l| l.axis(a).meets(to.axis(b))))
        });
        let mut most = 0;
        self.windows(from, to, |coords, [have, want], both| {
            let sent = || match &group {
                _ if axes.is_empty() => both,
                _ if nested && self.mesh.mesh().rank_len() <= COUNTED => {
                    let mesh = self.mesh.mesh();
                    have.common_numel_along(mesh, to, self.f.shape(), coords, &axes).unwrap_or_else(|| {
                        let mut sum = 0usize;
                        let to_rank = |at: &[usize]| {
                            sum = sum.saturating_add(self.bounds(to, at).common_numel(have));
                        };
                        self.ranks.visit(coords.into(), |a| axes.contains(&a), to_rank);
                        sum
                    })
                }
                Some(group) => self.bounds(group, coords).common_numel(have).saturating_mul(copies),
                None => have.numel().saturating_mul(copies),
            };
            let sent = sent().saturating_sub(both);
            most = most.max(want.numel() - both).max(sent);
        });
        self.cost(&axes, most.saturating_mul(self.nodes()))
    }

    /// A reduction over `axes` in which each rank receives the partial values of the elements that it will hold.
    fn fold(&self, from: &Layout, to: &Layout, axes: &[usize]) -> MoveCost {
        let members: usize = axes.iter().map(|&a| self.mesh.mesh().axis_len(a)).product();
        let mut all = communicating_axes(from, to, self.f.shape().len());
        all.extend_from_slice(axes);
        all.sort_unstable();
        all.dedup();
        let mut most = 0;
        self.windows(from, to, |_, [_, want], both| {
            most = most.max(members.saturating_mul(want.numel()).saturating_sub(both));
        });
        self.cost(&all, most.saturating_mul(self.nodes()))
    }

    /// A ring all-reduce over `axes` of what a rank holds under `mid`: all partial values of one share of the elements,
    /// then the sums of the other shares.
    fn all_reduce(&self, mid: &Layout, axes: &[usize]) -> MoveCost {
        let members: usize = axes.iter().map(|&a| self.mesh.mesh().axis_len(a)).product();
        let whole = self.bounds(mid, &largest_rank([mid].into_iter())).numel();
        let share = whole.div_ceil(members);
        let partials = (members - 1).saturating_mul(share).saturating_mul(self.nodes());
        self.cost(axes, partials.saturating_add(whole - share))
    }

    /// Calls `f` with the coordinates of a rank, its windows before and after, and the number of elements in both, for
    /// the ranks that may differ.
    fn windows(&self, from: &Layout, to: &Layout, mut f: impl FnMut(&[usize], [&ShardBounds; 2], usize)) {
        let same_order = from.order() == to.order();
        let changes = |a: usize| from.axis(a) != to.axis(a);
        let touches = |a: usize, b: usize| {
            [from, to].into_iter().any(|x| [from, to].into_iter().any(|y| x.axis(a).meets(y.axis(b))))
        };
        let differ = RankDifferences::new(self.mesh.mesh(), self.f.shape(), from, to).axes;
        let moves =
            |a: usize| !same_order || changes(a) || (0..from.ndim()).any(|b| changes(b) && touches(a, b));
        let varied = |a: usize| differ.contains(&a) && moves(a);
        self.ranks.visit(largest_rank([from].into_iter()), varied, |coords| {
            let (have, want) = (self.bounds(from, coords), self.bounds(to, coords));
            f(coords, [&have, &want], have.common_numel(&want));
        });
    }

    fn bounds(&self, layout: &Layout, coords: &[usize]) -> ShardBounds {
        ShardBounds::at(self.mesh.mesh(), layout, self.f.shape(), coords)
    }

    /// The largest number of nodes of a partial sum that a rank stores.
    fn nodes(&self) -> usize {
        let tree = self.f.spec().tree.as_ref();
        tree.map_or(1, |t| self.mesh.most_nodes(t).expect("what is held fits"))
    }

    fn cost(&self, axes: &[usize], elements: usize) -> MoveCost {
        let bytes = elements.saturating_mul(self.f.spec().stored_dtype().size_bytes()) as u64;
        let time = match axes {
            [] => Cost::default(),
            &[a] => self.mesh.axis_peers(a).cost(1, bytes),
            axes => peers(self.mesh.rank().network(), self.mesh.mesh(), axes).cost(1, bytes),
        };
        MoveCost { time, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Level, Network, Spmd};
    use crate::dtensor::{DTensor, Redistribution};
    use crate::error::{Error, Result};
    use crate::tensor::DType;

    #[test]
    fn costs_depend_on_links_and_nesting() {
        let level = |ranks, latency_s, bytes_per_s| Level { ranks, latency_s, bytes_per_s };
        let network = Network::new([level(2, 1e-6, 1e12), level(4, 1e-5, 1e9)]).unwrap();
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("outer", 2), ("inner", 2)])?;
            let cost = |from: &str, to: &str| -> Result<[f64; 2]> {
                let layout: Layout = to.parse()?;
                let f = mesh.meta(DType::F32, &[1000, 1000].into(), &from.parse()?)?;
                let ranks = RankSamples::new(mesh.mesh(), [f.layout()].into_iter());
                let to = mesh.meta(DType::F32, f.shape(), &layout)?;
                let planned = Redistribution::over(mesh.rank().network(), f.spec(), to.spec())?.cost();
                Ok([of_move(&mesh, &f, &layout, &ranks).time, planned].map(|c| (c.seconds() * 1e9).round()))
            };
            // Nanoseconds, in one exchange and by the cheapest plan: 2 MB over the fast link and over the slow one. Replicas
            // next to each other each bring one half over the slow link. With the axes in another order, two of four ranks
            // lack their quarter, and two thirds of it count as coming over the slow link.
            let moves = [
                ("(R, S0)", "(R, R)", [3_000.0; 2]),
                ("(S0, R)", "(R, R)", [2_010_000.0, 1_013_000.0]),
                ("(S0, R)", "(S1, R)", [1_010_000.0, 512_000.0]),
                ("(S0, S1)", "(S0, R)", [2_000.0; 2]),
                ("(R, R)", "(S0, S1)", [0.0; 2]),
                ("(S0, S0)", "(S0^1, S0^0)", [677_000.0; 2]),
            ];
            let costs: Vec<[f64; 2]> =
                moves.iter().map(|(from, to, _)| cost(from, to)).collect::<Result<_>>()?;
            assert_eq!(costs, moves.map(|(_, _, both)| both));
            // An all-reduce of 4 MB brings twice one half, in one call.
            let f = mesh.meta(DType::F32, &[1000, 1000].into(), &"(P(sum), R)".parse()?)?;
            let ranks = RankSamples::new(mesh.mesh(), [f.layout()].into_iter());
            let to = |layout: &str| Ok::<_, Error>(of_move(&mesh, &f, &layout.parse()?, &ranks).time);
            assert_eq!((to("(R, R)")?.seconds() * 1e9).round(), 4_010_000.0);
            assert_eq!(to("(P(sum), P(sum))")?, Cost::INFINITE);
            Ok(())
        };
        Spmd::new(4).network(network).run(run).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Two small operands or one larger one: by bytes the two move; by time they move only if a call is cheap.
    #[test]
    fn rows_follow_the_links() {
        let level = |ranks, latency_s| Level { ranks, latency_s, bytes_per_s: 1e9 };
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("outer", 2), ("inner", 2)])?;
            let laid = |n: usize, layout: &str| DTensor::zeros(&mesh, DType::F32, [64, 64, n], layout);
            let cat = |small: &str, large: &str| -> Result<String> {
                let small = laid(1, small)?;
                Ok(DTensor::cat(&[&small, &small, &laid(3, large)?], 2)?.layout().to_string())
            };
            Ok([cat("(S0, R)", "(S1, R)")?, cat("(R, S0)", "(R, S1)")?])
        };
        let network = Network::new([level(2, 1e-6), level(4, 1e-5)]).unwrap();
        let said = Spmd::new(4).network(network).run(run).unwrap_or_else(|e| panic!("{e}"));
        assert!(said.iter().all(|s| *s == ["(S0, R)", "(R, S1)"]), "{said:?}");
        let bytes = Network::uniform(0.0, 1e9).unwrap();
        let said = Spmd::new(4).network(bytes).run(run).unwrap_or_else(|e| panic!("{e}"));
        assert!(said.iter().all(|s| *s == ["(S1, R)", "(R, S1)"]), "{said:?}");
    }

    #[test]
    fn the_order_that_moves_less_is_taken() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2), ("b", 2)])?;
            let zeros = |layout: &str| DTensor::zeros(&mesh, DType::F32, [8, 3], layout);
            let (nested, natural) = (zeros("(S0^1, S0^0)")?, zeros("(S0, S0)")?);
            let one = |ins: &[&DTensor]| -> Result<String> { Ok(DTensor::cat(ins, 1)?.layout().to_string()) };
            assert_eq!(
                one(&[&nested, &natural])?,
                "(S0^1, S0^0)",
                "one of both moves; the order that is not the mesh order stays"
            );
            assert_eq!(one(&[&nested, &natural, &natural])?, "(S0, S0)", "two would have moved");
            assert_eq!(one(&[&natural, &nested, &nested])?, "(S0^1, S0^0)");
            Ok(())
        };
        Spmd::new(4).run(run).unwrap_or_else(|e| panic!("{e}"));
    }
}
