//! The path of a partial sum that shares its calls with the other gradients of a unit of FSDP.
//!
//! Alone, a parameter of a unit may lie on few ranks, and the rank that receives most decides. Together the parts of a
//! unit are equally long, so the bytes of all ranks count: the sum is folded along the axes that shard it, which no plan
//! does with fewer bytes, and then all-reduced along the axes that do not.

use super::cost::{CostModel, PlanCost, StepTraffic};
use super::rank_samples::RankSamples;
use super::search::{Hop, leaving_partials, partial_as};
use crate::placement::{Layout, Spec};
use crate::tensor::Dims;

/// Returns the path and its cost for a rank with a mean share of the elements. `None` if the target is not a ragged shard,
/// if other axes change too, or if the bits or the number of nodes forbid it.
pub(super) fn unit_hops(src: &Spec, target: &Layout, costs: CostModel<'_>) -> Option<(Vec<Hop>, PlanCost)> {
    target.ragged_axis()?;
    let leaving = leaving_partials(&src.layout, target);
    let others_stay =
        (0..target.ndim()).all(|a| leaving.contains(&a) || src.layout.axis(a) == target.axis(a));
    if !others_stay || leaving.iter().any(|&a| src.mesh.axis_len(a) == 1) {
        return None;
    }
    let (whole, cut): (Dims, Dims) = leaving.iter().copied().partition(|&a| target.axis(a).is_replicate());
    let open = src.open_axes();
    let in_tree = leaving.iter().all(|a| open.contains(a));
    if cut.is_empty() || !in_tree && leaving.iter().any(|a| open.contains(a)) {
        return None;
    }
    // Without a tree, the last axes are folded first.
    if !in_tree && whole.iter().max() > cut.iter().min() {
        return None;
    }
    let between = src.with_layout(partial_as(&src.layout, &whole, target)).ok()?;
    let len = |axes: &[usize]| axes.iter().map(|&a| src.mesh.axis_len(a) as u64).product::<u64>();
    let (shards, replicas) = (len(&cut), len(&whole));
    let samples = RankSamples::new(&src.mesh, [&src.layout, target].into_iter());
    let nodes = |spec: &Spec| {
        let (mut most, open) = (1, spec.open_axes());
        let first = Dims::from_elem(0, spec.mesh.ndim());
        samples.visit(first, |a| open.contains(&a), |at| most = most.max(spec.nodes_len_at(at) as u64));
        most
    };
    // Bytes of a mean rank, in parts of the tensor over the number of ranks.
    let (before, after) = (nodes(src), nodes(&between));
    let fold = (shards - 1) * replicas * before;
    let all_reduce = (replicas - 1) * (after + 1);
    if replicas > 1 && fold + all_reduce > (shards * replicas - 1) * (before + 1) {
        return None;
    }
    let part_bytes = (src.local_shape().numel() as u64).div_ceil(shards * replicas);
    let part_bytes = part_bytes.saturating_mul(src.stored_dtype().size_bytes() as u64);
    let cost = |axes: &[usize], parts: u64| {
        let received_bytes = part_bytes.saturating_mul(parts);
        costs.cost(&StepTraffic { mesh: &src.mesh, axes, received_bytes })
    };
    let mut sum = cost(&cut, fold);
    let mut hops = vec![Hop::Fold(cut, between.layout)];
    if !whole.is_empty() {
        sum = sum + cost(&whole, all_reduce);
        hops.push(Hop::AllReduce(whole));
    }
    Some((hops, sum))
}
