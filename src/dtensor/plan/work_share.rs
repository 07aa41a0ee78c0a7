//! A rank's share of a call's work, as a part of the elements that the call's sharding gives it.

use crate::placement::{Layout, Mesh, Placement, ShardBounds};
use crate::tensor::{Dims, Shape};

/// Returns the part of a call's elements that the rank at `coords` has, between 0 and 1. An axis that cuts several of the tensors cuts
/// the same indices of each, so it counts once, with the tensor that the most axes cut. Tensors without elements say
/// nothing.
pub(in crate::dtensor) fn part_of_elements(
    mesh: &Mesh,
    tensors: &[(&Shape, &Layout)],
    coords: &[usize],
) -> f64 {
    let is_cut = |layout: &Layout, a: usize| match layout.axis(a) {
        Placement::Shard(_) | Placement::RaggedShard { .. } => true,
        Placement::Replicate | Placement::Partial(_) => false,
    };
    let mut axes: Dims = (0..mesh.ndim()).collect();
    let mut part = 1.0;
    loop {
        let cuts = |(_, layout): &&(&Shape, &Layout)| axes.iter().filter(|a| is_cut(layout, **a)).count();
        let full = tensors.iter().filter(|(shape, _)| !shape.contains(&0));
        let Some((shape, layout)) = full.max_by_key(cuts).filter(|x| cuts(x) > 0) else { return part };
        let (counted, others): (Dims, Dims) = axes.iter().copied().partition(|&a| is_cut(layout, a));
        let len = |layout: &Layout| ShardBounds::at(mesh, layout, shape, coords).numel();
        // Without other axes the tensor is cut as a whole.
        let uncut = match (0..mesh.ndim()).any(|a| is_cut(layout, a) && !counted.contains(&a)) {
            false => shape.numel(),
            true => len(&counted.iter().fold((*layout).clone(), |l, &a| l.set(a, Placement::Replicate))),
        };
        part *= if uncut == 0 { 0.0 } else { len(layout) as f64 / uncut as f64 };
        axes = others;
    }
}
