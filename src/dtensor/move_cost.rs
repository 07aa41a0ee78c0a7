//! What moves cost, by the mesh's [`Network`](crate::comm::Network): what operators' rows are chosen by.
//!
//! Along one axis they are estimated, from facts that all ranks share, as of equal chunks: an all-reduce brings twice what a
//! reduce-scatter brings, and every call has one latency, as in the planner of redistributions. What needs nobody, a slice,
//! is nearly free: not as good as staying.

use super::device_mesh::DeviceMesh;
use super::redistribute::{Redistribution, peers};
use super::tensor_meta::TensorMeta;
use crate::comm::{Cost, Peers};
use crate::placement::{Layout, Placement};

impl DeviceMesh {
    /// How near the ranks along axis `a` are to each other.
    pub(super) fn axis_peers(&self, a: usize) -> &Peers {
        &self.0.peers.get_or_init(|| {
            let all = 0..self.mesh().ndim();
            all.map(|a| peers(self.rank().network(), self.mesh(), &[a])).collect()
        })[a]
    }
}

/// The time of changing an operand's placement on axis `a` to `to`, the other axes held; infinite for what is never done
/// silently: opening a partial.
pub(super) fn along_axis(mesh: &DeviceMesh, f: &TensorMeta, a: usize, to: &Placement) -> Cost {
    let from = f.layout().axis(a);
    if from == to {
        return Cost::default();
    }
    let peers = mesh.axis_peers(a);
    let n = peers.len();
    // What the ranks along this axis hold together, in as many parts as the other axes cut.
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

/// The time of moving an operand to where it lies otherwise, the order of its cuts included.
pub(super) fn between_layouts(mesh: &DeviceMesh, from: &TensorMeta, to: &TensorMeta) -> Cost {
    if from == to {
        return Cost::default();
    }
    let planned = Redistribution::over(mesh.rank().network(), from.spec(), to.spec());
    planned.map_or(Cost::INFINITE, |p| Cost::LEAST + p.cost())
}

/// Bytes of the whole; a sum in parts takes as much for each node that a rank has finished.
fn held_bytes(mesh: &DeviceMesh, f: &TensorMeta) -> usize {
    let nodes = f.spec().tree.as_ref().map_or(1, |t| mesh.most_nodes(t).expect("what is held fits"));
    f.meta().len_bytes() * nodes
}

/// In how many parts these axes cut.
fn split_factor(mesh: &DeviceMesh, layout: &Layout, axes: impl Iterator<Item = usize>) -> usize {
    let cut = |&a: &usize| match layout.axis(a) {
        Placement::Shard(_) | Placement::RaggedShard { .. } => true,
        Placement::Replicate | Placement::Partial(_) => false,
    };
    axes.filter(cut).map(|a| mesh.mesh().axis_len(a)).product()
}

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
    fn links_and_nesting_have_their_price() {
        let level = |ranks, latency_s, bytes_per_s| Level { ranks, latency_s, bytes_per_s };
        let network = Network::new([level(2, 1e-6, 1e12), level(4, 1e-5, 1e9)]).unwrap();
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("outer", 2), ("inner", 2)])?;
            let price = |from: &str, to: &str| -> Result<[f64; 2]> {
                let layout: Layout = to.parse()?;
                let f = mesh.meta(DType::F32, &[1000, 1000].into(), &from.parse()?)?;
                let axis = (0..2).map(|a| along_axis(&mesh, &f, a, layout.axis(a))).sum::<Cost>();
                let to = mesh.meta(DType::F32, f.shape(), &layout)?;
                Ok([axis, between_layouts(&mesh, &f, &to)].map(|c| (c.seconds() * 1e9).round()))
            };
            // Nanoseconds, axis by axis and by the cheapest way: 2 MB by the fast link and by the slow one. Of replicas by the
            // fast link each brings its half over the slow one. In another order two of four ranks lack their quarter, two thirds
            // of which count as coming by the slow link.
            let moves = [
                ("(R, S0)", "(R, R)", [3_000.0; 2]),
                ("(S0, R)", "(R, R)", [2_010_000.0, 1_013_000.0]),
                ("(S0, R)", "(S1, R)", [1_010_000.0, 512_000.0]),
                ("(S0, S1)", "(S0, R)", [2_000.0; 2]),
                ("(R, R)", "(S0, S1)", [0.0; 2]),
                ("(S0, S0)", "(S0^1, S0^0)", [0.0, 677_000.0]),
            ];
            let priced: Vec<[f64; 2]> =
                moves.iter().map(|(from, to, _)| price(from, to)).collect::<Result<_>>()?;
            assert_eq!(priced, moves.map(|(_, _, both)| both));
            // An all-reduce of 4 MB brings twice half of them, by one call.
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

    /// Two small operands or one larger: by bytes the two move, by time where a call costs little.
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
                "one moves, whichever: the order of its own stays"
            );
            assert_eq!(one(&[&nested, &natural, &natural])?, "(S0, S0)", "two would have moved");
            assert_eq!(one(&[&natural, &nested, &nested])?, "(S0^1, S0^0)");
            Ok(())
        };
        Spmd::new(4).run(run).unwrap_or_else(|e| panic!("{e}"));
    }
}
