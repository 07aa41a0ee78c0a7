//! Whole tensors cut into the shards of a layout, and put together, without the library's redistribution.
//!
//! ```
//! use isoshard::placement::{Mesh, Spec};
//! use isoshard::testing::{shards, values};
//! use isoshard::tensor::DType;
//!
//! let spec = Spec::parse("f32[5, 2]@(dp:S0)", &Mesh::parse("dp=2", 0)?)?;
//! let whole = values::small_ints(DType::F32, &spec.shape, 1);
//! let mut parts = shards::parts_of(&whole, &spec, 0);
//! assert_eq!(parts[1].shape()[..], [2, 2]);
//! assert_eq!(shards::difference(&whole, &spec, &parts, 0.0), None);
//! parts.swap(0, 1);
//! assert!(shards::difference(&whole, &spec, &parts, 0.0).unwrap().starts_with("rank 0 has f32[2, 2]"));
//! # Ok::<(), isoshard::Error>(())
//! ```

use super::values::{agree, mix, tensor};
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::Result;
use crate::placement::{Placement, Spec};
use crate::tensor::{ReduceOp, Tensor};

/// A function that splits a value of a `Partial` tensor: given op, value, salt, the share's number and the number of
/// shares.
pub type Share = fn(ReduceOp, f64, u64, usize, usize) -> f64;

/// Returns the part of `whole` that the rank at `coords` holds under `spec`.
///
/// Partial sums are small integers that add up to the value. For a maximum one rank, which differs from element to
/// element, holds the value, and the other ranks hold lower ones.
pub fn part_of(whole: &Tensor, spec: &Spec, coords: &[usize], salt: u64) -> Tensor {
    part_by(share, whole, spec, coords, salt)
}

/// Works like [`part_of`], with another split of partial values.
pub fn part_by(share: Share, whole: &Tensor, spec: &Spec, coords: &[usize], salt: u64) -> Tensor {
    let values = whole.to_f64_vec();
    let (mut parts, mut mine, mut op) = (1, 0, None);
    for (a, placement) in spec.layout.placements().iter().enumerate() {
        if let Placement::Partial(o) = placement {
            (parts, mine, op) =
                (parts * spec.mesh.axis_len(a), mine * spec.mesh.axis_len(a) + coords[a], Some(*o));
        }
    }
    let region = spec.region_at(coords);
    let mut local = vec![0.0; region.local.numel()];
    region.runs(&spec.shape, |global, at, len| {
        for k in 0..len {
            let e = global as usize + k;
            local[at + k] = match op {
                None => values[e],
                Some(op) => share(op, values[e], e as u64 ^ salt << 32, mine, parts),
            };
        }
    });
    tensor(whole.dtype(), &local, &region.local)
}

/// Returns share `i` of `n` of a value that is reduced by `op`.
fn share(op: ReduceOp, value: f64, salt: u64, i: usize, n: usize) -> f64 {
    let noise = |i: usize| mix(salt.wrapping_mul(31).wrapping_add(i as u64));
    let small = |i: usize| (noise(i) % 7) as f64 - 3.0;
    let owner = (noise(n) % n as u64) as usize;
    match op {
        ReduceOp::Sum if i == owner => value - (0..n).filter(|&j| j != owner).map(small).sum::<f64>(),
        ReduceOp::Sum => small(i),
        _ if i == owner => value,
        ReduceOp::Max => value - (noise(i) % 4) as f64,
        ReduceOp::Min => value + (noise(i) % 4) as f64,
    }
}

/// Splits a value so that one rank holds all of a sum's term and the other ranks -0, which changes no bit of any sum.
pub fn owned(op: ReduceOp, value: f64, salt: u64, i: usize, n: usize) -> f64 {
    let owner = (mix(salt.wrapping_mul(31).wrapping_add(n as u64)) % n as u64) as usize;
    match op {
        ReduceOp::Sum if i == owner => value,
        ReduceOp::Sum => -0.0,
        _ => share(op, value, salt, i, n),
    }
}

/// Describes the first difference between the parts that ranks computed and the whole; `None` if there is none.
pub fn difference(whole: &Tensor, spec: &Spec, parts: &[Tensor], bound: f64) -> Option<String> {
    let values = whole.to_f64_vec();
    let mesh = &spec.mesh;
    let partial: Vec<usize> =
        (0..mesh.ndim()).filter(|&a| matches!(spec.layout.axis(a), Placement::Partial(_))).collect();
    let op = partial.first().map(|&a| match spec.layout.axis(a) {
        Placement::Partial(op) => *op,
        _ => unreachable!("filtered above"),
    });
    for rank in mesh.ranks() {
        let coords = mesh.coords_of(rank).expect("a rank of the mesh");
        let region = spec.region_at(&coords);
        if *parts[rank].shape() != region.local {
            return Some(format!("rank {rank} has {} instead of {}", parts[rank].notation(), region.local));
        }
        let mut local = parts[rank].contiguous().expect("it is in memory");
        if let Some(op) = op {
            if partial.iter().any(|&a| coords[a] != 0) {
                continue;
            }
            let peers: Vec<usize> =
                mesh.seen_from(rank).expect("in the mesh").slice(&partial).ranks().collect();
            for peer in peers.into_iter().filter(|&p| p != rank) {
                if parts[peer].shape() != parts[rank].shape() || op.fold(&mut local, &parts[peer]).is_err() {
                    return Some(format!(
                        "rank {peer} has {} instead of {}",
                        parts[peer].notation(),
                        region.local
                    ));
                }
            }
        }
        let local = local.to_f64_vec();
        let mut found = None;
        region.runs(&spec.shape, |global, at, len| {
            let fits = |want: f64, got: f64| {
                agree(want, got, bound) || (op == Some(ReduceOp::Sum) && !want.is_finite() && got.is_nan())
            };
            let bad = (0..len).find(|k| !fits(values[global as usize + k], local[at + k]));
            if let Some(k) = bad.filter(|_| found.is_none()) {
                let e = global as usize + k;
                found = Some(format!("rank {rank}, element {e}: {} instead of {}", local[at + k], values[e]));
            }
        });
        if found.is_some() {
            return found;
        }
    }
    None
}

/// Returns the parts of all ranks.
pub fn parts_of(whole: &Tensor, spec: &Spec, salt: u64) -> Vec<Tensor> {
    let coords = spec.mesh.ranks().map(|r| spec.mesh.coords_of(r).expect("a rank of the mesh"));
    coords.map(|c| part_of(whole, spec, &c, salt)).collect()
}

/// Returns `whole` in the layout of `spec`, from parts that were cut without the engine.
pub fn spread(mesh: &DeviceMesh, whole: &Tensor, spec: &Spec, salt: u64) -> Result<DTensor> {
    spread_by(share, mesh, whole, spec, salt)
}

/// Works like [`spread`], with another split of partial values.
pub fn spread_by(share: Share, mesh: &DeviceMesh, whole: &Tensor, spec: &Spec, salt: u64) -> Result<DTensor> {
    let spec = Spec::new(mesh.mesh(), whole.dtype(), whole.shape().clone(), spec.layout.clone())?;
    let part = part_by(share, whole, &spec, mesh.mesh().coords(), salt);
    DTensor::from_local(mesh, part, whole.shape().clone(), spec.layout)
}
