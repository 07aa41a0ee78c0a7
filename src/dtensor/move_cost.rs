//! The modelled time of moving operands, by the mesh's [`Network`](crate::comm::Network): the cost by which rows are
//! chosen.
//!
//! Costs along one axis are estimated from metadata that all ranks share, as for equal chunks. As in the planner of
//! redistributions, an all-reduce brings twice the bytes of a reduce-scatter, and each call has one latency. A slice
//! communicates nothing: it costs almost nothing, but more than not moving.

use super::device_mesh::DeviceMesh;
use super::redistribute::{Redistribution, peers};
use super::tensor_meta::TensorMeta;
use crate::comm::{Cost, Peers};
use crate::placement::{Layout, Placement};

impl DeviceMesh {
    /// Returns the distance of the ranks along axis `a` from each other.
    pub(super) fn axis_peers(&self, a: usize) -> &Peers {
        &self.0.peers.get_or_init(|| {
            let all = 0..self.mesh().ndim();
            all.map(|a| peers(self.rank().network(), self.mesh(), &[a])).collect()
        })[a]
    }
}

/// Returns the time of changing an operand's placement on axis `a` to `to`, the other axes held; infinite for a new
/// `Partial`, which the dispatcher never creates on its own.
pub(super) fn along_axis(mesh: &DeviceMesh, f: &TensorMeta, a: usize, to: &Placement) -> Cost {
    let from = f.layout().axis(a);
    if from == to {
        return Cost::default();
    }
    let peers = mesh.axis_peers(a);
    let n = peers.len();
    // The ranks along this axis together hold one of the `parts` into which the other axes split the tensor.
    let parts = split_factor(mesh, f.layout(), (0..f.layout().ndim()).filter(|&b| b != a));
    let bytes = |times: usize, ranks: usize| share(held_bytes(mesh, f) * times * (n - 1), ranks * parts);
    let all_reduce = || peers.cost(1, bytes(2, n));
    let all_gather = || peers.cost(1, bytes(1, n));
    let reduce_scatter = all_gather;
    let all_to_all = || peers.cost(1, bytes(1, n * n));
    let talk = match to {
        Placement::Partial(_) => Cost::INFINITE,
        Placement::Replicate => match from {
            Placement::Replicate => Cost::default(),
            Placement::Partial(_) => all_reduce(),
            Placement::Shard(_) | Placement::RaggedShard { .. } => all_gather(),
        },
        Placement::Shard(_) | Placement::RaggedShard { .. } => match from {
            Placement::Replicate => Cost::default(),
            Placement::Partial(_) => reduce_scatter(),
            Placement::Shard(_) | Placement::RaggedShard { .. } => all_to_all(),
        },
    };
    Cost::LEAST + talk
}

/// Returns the time of moving an operand to another layout, its order of axes included.
pub(super) fn between_layouts(mesh: &DeviceMesh, from: &TensorMeta, to: &TensorMeta) -> Cost {
    if from == to {
        return Cost::default();
    }
    let planned = Redistribution::over(mesh.rank().network(), from.spec(), to.spec());
    planned.map_or(Cost::INFINITE, |p| Cost::LEAST + p.cost())
}

/// Returns the bytes of the whole tensor, times the largest number of nodes per rank of a partial sum.
fn held_bytes(mesh: &DeviceMesh, f: &TensorMeta) -> usize {
    let nodes = f.spec().tree.as_ref().map_or(1, |t| mesh.most_nodes(t).expect("what is held fits"));
    f.meta().len_bytes() * nodes
}

/// Returns the number of parts into which these axes split the tensor.
fn split_factor(mesh: &DeviceMesh, layout: &Layout, axes: impl Iterator<Item = usize>) -> usize {
    let cut = |&a: &usize| match layout.axis(a) {
        Placement::Shard(_) | Placement::RaggedShard { .. } => true,
        Placement::Replicate | Placement::Partial(_) => false,
    };
    axes.filter(cut).map(|a| mesh.mesh().axis_len(a)).product()
}

/// Returns one of `parts` equal shares, rounded up.
fn share(bytes: usize, parts: usize) -> u64 {
    bytes.div_ceil(parts) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Level, Network, Spmd};
    use crate::dtensor::DTensor;
    use crate::error::Result;
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
                let axis = (0..2).map(|a| along_axis(&mesh, &f, a, layout.axis(a))).sum::<Cost>();
                let to = mesh.meta(DType::F32, f.shape(), &layout)?;
                Ok([axis, between_layouts(&mesh, &f, &to)].map(|c| (c.seconds() * 1e9).round()))
            };
            // Nanoseconds, axis by axis and by the cheapest plan: 2 MB over the fast link and over the slow one. Replicas
            // next to each other each bring one half over the slow link. With the axes in another order, two of four ranks
            // lack their quarter, and two thirds of it count as coming over the slow link.
            let moves = [
                ("(R, S0)", "(R, R)", [3_000.0; 2]),
                ("(S0, R)", "(R, R)", [2_010_000.0, 1_013_000.0]),
                ("(S0, R)", "(S1, R)", [1_010_000.0, 512_000.0]),
                ("(S0, S1)", "(S0, R)", [2_000.0; 2]),
                ("(R, R)", "(S0, S1)", [0.0; 2]),
                ("(S0, S0)", "(S0^1, S0^0)", [0.0, 677_000.0]),
            ];
            let costs: Vec<[f64; 2]> =
                moves.iter().map(|(from, to, _)| cost(from, to)).collect::<Result<_>>()?;
            assert_eq!(costs, moves.map(|(_, _, both)| both));
            // An all-reduce of 4 MB brings twice one half, in one call.
            let f = mesh.meta(DType::F32, &[1000, 1000].into(), &"(P(sum), R)".parse()?)?;
            assert_eq!(
                (along_axis(&mesh, &f, 0, &Placement::Replicate).seconds() * 1e9).round(),
                4_010_000.0
            );
            assert_eq!(
                along_axis(&mesh, &f, 1, &Placement::Partial(crate::tensor::ReduceOp::Sum)),
                Cost::INFINITE
            );
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
            let laid =
                |n: usize, layout: &str| DTensor::zeros(&mesh, DType::F32, [64, 64, n], layout.parse()?);
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
            let zeros = |layout: &str| DTensor::zeros(&mesh, DType::F32, [8, 3], layout.parse()?);
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
