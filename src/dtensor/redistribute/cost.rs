//! What a step costs: the one place that weighs bytes against calls.

use std::ops::Add;

use crate::placement::Mesh;

/// What a call takes before its first byte comes, as bytes that would have come in that time.
const CALL_BYTES: u64 = 16 << 10;

/// The cost of steps, added up; less is better. Among equals in weight fewer calls win, then fewer steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cost {
    pub weight: u64,
    pub calls: u32,
    pub steps: u32,
}

/// What a step's cost depends on.
pub(super) struct StepFacts<'a> {
    pub mesh: &'a Mesh,
    /// The axes along which ranks talk.
    pub axes: &'a [usize],
    /// What the rank receives that receives most.
    pub received_bytes: u64,
}

/// What calls and bytes are worth.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prices {
    pub call_bytes: u64,
}

impl Default for Prices {
    fn default() -> Prices {
        Prices { call_bytes: CALL_BYTES }
    }
}

impl Prices {
    pub fn cost(&self, step: &StepFacts) -> Cost {
        let calls = u32::from(talks(step.mesh, step.axes));
        let weight = step.received_bytes.saturating_add(self.call_bytes * u64::from(calls));
        Cost { weight, calls, steps: 1 }
    }
}

impl Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost {
            weight: self.weight.saturating_add(other.weight),
            calls: self.calls + other.calls,
            steps: self.steps + other.steps,
        }
    }
}

/// True where the ranks along `axes` are more than one.
pub(super) fn talks(mesh: &Mesh, axes: &[usize]) -> bool {
    axes.iter().any(|&a| mesh.axis_len(a) > 1)
}
