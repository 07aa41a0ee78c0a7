//! The gradients that a derivative is asked for.

use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::reduction::Reduction;
use crate::placement::SumGroups;

/// The operands whose gradients are wanted, and the groups of those that lead to leaves.
pub(in crate::dtensor) struct GradientNeeds<'a> {
    /// Per operand, true if its gradient is wanted.
    pub needed: &'a [bool],
    /// The operands that lead to leaves, as a bit set, and the groups of their gradients, if these are not those of other
    /// sums.
    pub leaves: Option<(u64, SumGroups)>,
}

impl GradientNeeds<'_> {
    /// Runs `f`, which computes the gradient of operand `i`, in the groups of that gradient.
    pub fn in_groups<T>(&self, mesh: &DeviceMesh, i: usize, f: impl FnOnce() -> T) -> T {
        match self.leaves.filter(|(of, _)| i < 64 && of >> i & 1 == 1) {
            Some((_, groups)) => mesh.with_only_reduction(Reduction::Grouped(groups), f),
            None => f(),
        }
    }
}
