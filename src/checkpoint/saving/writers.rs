//! The plan of a save: the writer of each box of each tensor.
//!
//! Every element is written once, by a rank that stores it. Replicas share their elements: the tensors are taken in turn,
//! those with the fewest holders first and larger ones before smaller ones, and each box is cut so that its holders' loads
//! come as close to one another as the box allows ("worst fit" of Wan et al., *ByteCheckpoint*, NSDI 2025, with cuts).

use rustc_hash::FxHashMap;

use crate::placement::{IndexBox, Region, Spec};
use crate::tensor::{Dims, sort_by, sort_by_key};

/// A box of a tensor that one rank writes.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::checkpoint) struct WrittenBox {
    /// The tensor's number.
    pub tensor: usize,
    /// The writer's position in the mesh, row-major.
    pub writer: usize,
    pub start: Dims,
    pub len: Dims,
}

/// Boxes with fewer bytes are not cut: every piece costs an entry in the index.
const UNCUT_BYTES: u64 = 64 << 10;

/// Plans who writes what. A function of metadata that all ranks share, so nothing is communicated. The boxes of a tensor
/// stand together, and tensors in their order.
pub(in crate::checkpoint) fn plan_writers(specs: &[Spec]) -> Vec<WrittenBox> {
    let ranks = specs.first().map_or(0, |spec| spec.mesh.rank_len());
    let mut boxes: Vec<(u64, usize, IndexBox, Vec<usize>)> = Vec::new();
    for (tensor, spec) in specs.iter().enumerate() {
        for (region, holders) in holders(spec) {
            let bytes =
                |of: &IndexBox| of.len.iter().product::<usize>() as u64 * spec.dtype.size_bytes() as u64;
            boxes.extend(region.boxes.iter().map(|of| (bytes(of), tensor, of.clone(), holders.clone())));
        }
    }
    // A stable sort, so that equal boxes keep the order of tensors.
    sort_by_key(&mut boxes, |(bytes, _, _, holders)| (holders.len(), std::cmp::Reverse(*bytes)));
    let mut loads = vec![0; ranks];
    let mut plan = Vec::new();
    for (bytes, tensor, of, holders) in boxes {
        for (writer, start, len) in cut(&of, bytes, &holders, &mut loads) {
            plan.push(WrittenBox { tensor, writer, start, len });
        }
    }
    sort_by(&mut plan, |a, b| (a.tensor, &a.start).cmp(&(b.tensor, &b.start)));
    plan
}

/// Returns the distinct regions of a tensor, each with the positions of the ranks that store it.
fn holders(spec: &Spec) -> Vec<(Region, Vec<usize>)> {
    let mut found: Vec<(Region, Vec<usize>)> = Vec::new();
    let mut numbers: FxHashMap<Region, usize> = FxHashMap::default();
    for (position, rank) in spec.mesh.ranks().enumerate() {
        let region = spec.region_at(&spec.mesh.coords_of(rank).expect("a rank of the mesh"));
        let number = *numbers.entry(region.clone()).or_insert_with(|| {
            found.push((region, Vec::new()));
            found.len() - 1
        });
        found[number].1.push(position);
    }
    found
}

/// Cuts a box along one dim into a part per holder, at most, and adds the parts to the holders' `loads`: the holders with
/// the least load are filled up to a common level.
fn cut(of: &IndexBox, bytes: u64, holders: &[usize], loads: &mut [u64]) -> Vec<(usize, Dims, Dims)> {
    let mut order = holders.to_vec();
    sort_by_key(&mut order, |&holder| (loads[holder], holder));
    if order.len() == 1 || bytes < UNCUT_BYTES {
        loads[order[0]] += bytes;
        return vec![(order[0], of.start.clone(), of.len.clone())];
    }
    // The outermost dim that has enough indices to be cut finely, because its parts are contiguous; else the longest.
    let fine = (0..of.len.len()).find(|&d| of.len[d] >= 64 * order.len());
    let longest = (0..of.len.len()).max_by_key(|&d| (of.len[d], std::cmp::Reverse(d)));
    let dim = fine.or(longest).expect("a box of several elements has dims");
    let extent = of.len[dim];
    let each = bytes / extent as u64;
    // The level up to which the least loaded holders are filled.
    let mut level = 0;
    for filled in 1..=order.len() {
        let total: u64 = order[..filled].iter().map(|&holder| loads[holder]).sum();
        level = (total + bytes).div_ceil(filled as u64);
        if order.get(filled).is_none_or(|&next| loads[next] >= level) {
            break;
        }
    }
    let mut parts = Vec::new();
    let mut at = 0;
    for (number, &holder) in order.iter().enumerate() {
        let room = level.saturating_sub(loads[holder]);
        let last = number + 1 == order.len();
        let count =
            if last { extent - at } else { ((room + each / 2) / each.max(1)) as usize }.min(extent - at);
        if count > 0 {
            let (mut start, mut len) = (of.start.clone(), of.len.clone());
            (start[dim], len[dim]) = (of.start[dim] + at, count);
            loads[holder] += count as u64 * each;
            parts.push((holder, start, len));
            at += count;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Mesh;

    fn loads(mesh: &str, tensors: &[&str]) -> Vec<u64> {
        let mesh = Mesh::parse(mesh, 0).unwrap();
        let specs: Vec<Spec> = tensors.iter().map(|text| Spec::parse(text, &mesh).unwrap()).collect();
        let plan = plan_writers(&specs);
        let mut loads = vec![0; mesh.rank_len()];
        for piece in &plan {
            let size = specs[piece.tensor].dtype.size_bytes() as u64;
            loads[piece.writer] += piece.len.iter().product::<usize>() as u64 * size;
        }
        // Every element once.
        for (tensor, spec) in specs.iter().enumerate() {
            let boxes: Vec<&WrittenBox> = plan.iter().filter(|piece| piece.tensor == tensor).collect();
            let numel: usize = boxes.iter().map(|piece| piece.len.iter().product::<usize>()).sum();
            assert_eq!(numel, spec.shape.numel());
            for (i, a) in boxes.iter().enumerate() {
                let apart = |b: &&WrittenBox| {
                    (0..a.start.len())
                        .any(|d| a.start[d] + a.len[d] <= b.start[d] || b.start[d] + b.len[d] <= a.start[d])
                };
                assert!(boxes[i + 1..].iter().all(apart));
            }
        }
        loads
    }

    fn imbalance(loads: &[u64]) -> f64 {
        let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
        *loads.iter().max().unwrap() as f64 / mean
    }

    #[test]
    fn the_most_loaded_writer_has_at_most_a_twentieth_more_than_the_mean() {
        let cases: [(&str, &[&str]); 6] = [
            ("dp=4", &["f32[1000, 512]@(dp:R)", "f32[512]@(dp:R)", "f32[3, 700001]@(dp:R)"]),
            ("fsdp=3", &["f32[1000, 512]@(fsdp:RS(0..1; 334,333,333))", "f32[77, 400]@(fsdp:R)"]),
            ("dp=2,tp=2", &["bf16[2048, 512]@(dp:R, tp:S0)", "f32[2000, 512]@(dp:R, tp:S1)"]),
            // One rank stores a tensor alone; replicas of another tensor make up for it.
            ("fsdp=4", &["f32[100, 1000]@(fsdp:RS(0..1; 100,0,0,0))", "f32[800, 1000]@(fsdp:R)"]),
            ("tp=5", &["f32[20000, 16]@(tp:S0)", "f32[1001, 333]@(tp:R)"]),
            ("dp=3,fsdp=2", &["f32[999, 512]@(dp:R, fsdp:RS(0..1; 500,499))"]),
        ];
        for (mesh, tensors) in cases {
            let loads = loads(mesh, tensors);
            assert!(imbalance(&loads) <= 1.05, "{mesh}: {loads:?}");
        }
    }

    #[test]
    fn scalars_and_empty_tensors_have_one_writer_or_none() {
        assert_eq!(loads("dp=2", &["f32[]@(dp:R)"]), [4, 0]);
        assert_eq!(loads("dp=2", &["f32[0, 3]@(dp:S0)"]), [0, 0]);
        assert_eq!(loads("dp=2", &["f32[1]@(dp:S0)", "f32[]@(dp:R)", "f32[]@(dp:R)"]), [8, 4]);
    }
}
