//! The plan of a save: which rank writes which box of which tensor.

use crate::placement::{IndexBox, Region, Spec};
use crate::tensor::Dims;

/// A box of a tensor that one rank writes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct WrittenPiece {
    /// The tensor's number.
    pub tensor: usize,
    /// The writer, as a rank of the mesh, row-major.
    pub writer: usize,
    pub start: Dims,
    pub len: Dims,
}

/// Plans who writes what: every element once, by a rank that stores it. Replicas share their elements: a box is cut
/// along its longest dim into one part per replica, and each part goes to the replica with the fewest bytes so far, the
/// largest part first (worst fit). A function of metadata that all ranks share, so nothing is communicated.
pub(super) fn plan_writers(specs: &[Spec]) -> Vec<WrittenPiece> {
    let ranks = specs.first().map_or(0, |spec| spec.mesh.rank_len());
    let mut parts: Vec<(u64, WrittenPiece, Vec<usize>)> = Vec::new();
    for (tensor, spec) in specs.iter().enumerate() {
        for (region, holders) in regions(spec) {
            for of in &region.boxes {
                for (start, len) in cut(of, holders.len()) {
                    let bytes = len.iter().product::<usize>() as u64 * spec.dtype.size_bytes() as u64;
                    let piece = WrittenPiece { tensor, writer: 0, start, len };
                    parts.push((bytes, piece, holders.clone()));
                }
            }
        }
    }
    // A stable sort, so that equal parts keep the order of tensors.
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|&at| (parts[at].2.len(), std::cmp::Reverse(parts[at].0)));
    let mut loads = vec![0; ranks];
    for at in order {
        let (bytes, piece, holders) = &mut parts[at];
        piece.writer = holders.iter().copied().min_by_key(|&rank| loads[rank]).expect("some rank stores it");
        loads[piece.writer] += *bytes;
    }
    parts.into_iter().map(|(_, piece, _)| piece).collect()
}

/// Returns the distinct regions of a tensor, each with the ranks that store it.
fn regions(spec: &Spec) -> Vec<(Region, Vec<usize>)> {
    let mut found: Vec<(Region, Vec<usize>)> = Vec::new();
    for (rank, name) in spec.mesh.ranks().enumerate() {
        let region = spec.region_at(&spec.mesh.coords_of(name).expect("a rank of the mesh"));
        match found.iter_mut().find(|(known, _)| *known == region) {
            Some((_, holders)) => holders.push(rank),
            None => found.push((region, vec![rank])),
        }
    }
    found
}

/// Cuts a box along its longest dim into at most `n` parts of nearly equal size.
fn cut(of: &IndexBox, n: usize) -> Vec<(Dims, Dims)> {
    let longest = (0..of.len.len()).max_by_key(|&d| (of.len[d], std::cmp::Reverse(d)));
    let Some(dim) = longest.filter(|_| n > 1) else { return vec![(of.start.clone(), of.len.clone())] };
    let extent = of.len[dim];
    let bounds = (0..=n).map(|i| extent * i / n).collect::<Vec<_>>();
    let part = |ends: &[usize]| {
        let (mut start, mut len) = (of.start.clone(), of.len.clone());
        (start[dim], len[dim]) = (of.start[dim] + ends[0], ends[1] - ends[0]);
        (start, len)
    };
    bounds.windows(2).filter(|ends| ends[0] < ends[1]).map(part).collect()
}
