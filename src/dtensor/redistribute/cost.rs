//! What a step costs: the one place that weighs bytes against calls, by the network.

use std::ops::Add;

use crate::comm::{self, Network, Peers, RankGrid};
use crate::placement::Mesh;

/// The cost of steps, added up; less is better. Among equals in time fewer calls win, then fewer steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PlanCost {
    pub time: comm::Cost,
    pub calls: u32,
    pub steps: u32,
}

/// What a step's cost depends on.
pub(super) struct StepTraffic<'a> {
    pub mesh: &'a Mesh,
    /// The axes along which ranks talk.
    pub axes: &'a [usize],
    /// What the rank receives that receives most.
    pub received_bytes: u64,
}

/// What calls and bytes are worth.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostModel<'a>(pub &'a Network);

impl CostModel<'_> {
    pub fn cost(&self, step: &StepTraffic) -> PlanCost {
        let calls = communicates(step.mesh, step.axes);
        let time = peers(self.0, step.mesh, step.axes).cost(1, step.received_bytes);
        PlanCost { time, calls: calls.into(), steps: 1 }
    }

    /// True where one way may bring bytes by a slow link that another brings by a fast one.
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

/// The distance of the ranks along `axes` from each other.
pub(in crate::dtensor) fn peers(network: &Network, mesh: &Mesh, axes: &[usize]) -> Peers {
    match mesh.strides() {
        Some((base, all)) => network.peers(&RankGrid { base, axes: &all }, axes),
        None => network.far_peers(axes.iter().map(|&a| mesh.axis_len(a)).product()),
    }
}

/// True where the ranks along `axes` are more than one.
pub(super) fn communicates(mesh: &Mesh, axes: &[usize]) -> bool {
    axes.iter().any(|&a| mesh.axis_len(a) > 1)
}

/// Where a byte takes a picosecond, and a call as many as these.
#[cfg(test)]
pub(super) fn bytes_and_calls(call_bytes: u64) -> Network {
    Network::uniform(call_bytes as f64 * 1e-12, 1e12).expect("these are sound")
}
