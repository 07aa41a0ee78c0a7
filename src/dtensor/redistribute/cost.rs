//! The cost of one step of a redistribution, by the network model: the one place that weighs bytes against calls.

use std::ops::Add;

use crate::comm::{self, Network, Peers, RankGrid};
use crate::placement::Mesh;

/// The cost of steps, added up; less is better. Among equal times fewer calls win, then fewer steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PlanCost {
    pub time: comm::Cost,
    pub calls: u32,
    pub steps: u32,
}

/// The communication of one step, from which its cost follows.
pub(super) struct StepTraffic<'a> {
    pub mesh: &'a Mesh,
    /// The axes along which ranks communicate.
    pub axes: &'a [usize],
    /// The bytes of the rank that receives most.
    pub received_bytes: u64,
}

/// The cost of calls and bytes on a network.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostModel<'a>(pub &'a Network);

impl CostModel<'_> {
    pub fn cost(&self, step: &StepTraffic) -> PlanCost {
        let calls = communicates(step.mesh, step.axes);
        let time = peers(self.0, step.mesh, step.axes).cost(1, step.received_bytes);
        PlanCost { time, calls: calls.into(), steps: 1 }
    }

    /// Returns true if the network has links of several speeds, so that one plan may use slower links than another.
    pub fn has_levels(&self) -> bool {
        self.0.levels().len() > 1
    }
}

impl Add for PlanCost {
    type Output = PlanCost;

    fn add(self, other: PlanCost) -> PlanCost {
        PlanCost {
            time: self.time + other.time,
            calls: self.calls + other.calls,
            steps: self.steps + other.steps,
        }
    }
}

/// Returns the distance of the ranks along `axes` from each other.
pub(in crate::dtensor) fn peers(network: &Network, mesh: &Mesh, axes: &[usize]) -> Peers {
    match mesh.strides() {
        Some((base, all)) => network.peers(&RankGrid { base, axes: &all }, axes),
        None => network.far_peers(axes.iter().map(|&a| mesh.axis_len(a)).product()),
    }
}

/// Returns true if the ranks along `axes` are more than one.
pub(super) fn communicates(mesh: &Mesh, axes: &[usize]) -> bool {
    axes.iter().any(|&a| mesh.axis_len(a) > 1)
}

/// Returns a network on which a byte takes a picosecond, and a call as long as `call_bytes` bytes.
#[cfg(test)]
pub(super) fn bytes_and_calls(call_bytes: u64) -> Network {
    Network::uniform(call_bytes as f64 * 1e-12, 1e12).expect("these are sound")
}
