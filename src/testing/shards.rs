//! Whole tensors cut into the shards of a layout, and put together, without the library's redistribution.
//!
//! ```
//! use isoshard::placement::{Mesh, Spec};
//! use isoshard::testing::{shards, values};
//! use isoshard::tensor::DType;
//!
//! let spec = Spec::parse("f32[5, 2]@(dp:S0)", &Mesh::parse("dp=2", 0)?)?;
//! let whole = values::small_ints(DType::F32, &spec.shape, 1);
//! let mut parts: Vec<_> = (0..2).map(|rank| shards::part_of(&whole, &spec, &[rank], 0)).collect();
//! assert_eq!(parts[1].shape()[..], [2, 2]);
//! assert_eq!(shards::difference(&whole, &spec, &parts, 0.0), None);
//! parts.swap(0, 1);
//! assert!(shards::difference(&whole, &spec, &parts, 0.0).unwrap().starts_with("rank 0 has f32[2, 2]"));
//! # Ok::<(), isoshard::Error>(())
//! ```

use super::values::{agree, first_difference, mix, tensor};
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::Result;
use crate::placement::{Placement, Region, Spec};
use crate::tensor::{DType, Element, ReduceOp, Shape, Tensor};

/// A function that splits a value of a `Partial` tensor: given the operation, the value, a salt, the share's number and
/// the number of shares, it returns the share.
pub(crate) type Share = fn(ReduceOp, f64, u64, usize, usize) -> f64;

/// Returns the part of `whole` that the rank at `coords` holds under `spec`.
///
/// Partial sums are small integers that add up to the value. For a maximum one rank, which differs from element to
/// element, holds the value, and the other ranks hold lower ones. `salt` selects among such splits.
///
/// ```
/// use isoshard::{placement::{Mesh, Spec}, tensor::Tensor, testing::shards::part_of};
/// let whole = Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?;
/// let spec = Spec::parse("f32[3]@(dp:S0)", &Mesh::parse("dp=2", 0)?)?;
/// assert_eq!(part_of(&whole, &spec, &[1], 0).to_f64_vec(), [3.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub fn part_of(whole: &Tensor, spec: &Spec, coords: &[usize], salt: u64) -> Tensor {
    part_by(share, whole, spec, coords, salt)
}

/// Works like [`part_of`], with another split of partial values.
pub(crate) fn part_by(share: Share, whole: &Tensor, spec: &Spec, coords: &[usize], salt: u64) -> Tensor {
    let (mut parts, mut mine, mut op) = (1, 0, None);
    for (a, placement) in spec.layout.placements().iter().enumerate() {
        if let Placement::Partial(o) = placement {
            (parts, mine, op) =
                (parts * spec.mesh.axis_len(a), mine * spec.mesh.axis_len(a) + coords[a], Some(*o));
        }
    }
    let region = spec.region_at(coords);
    let Some(op) = op else { return elements_of(whole, &region) };
    let (values, mut local) = (whole.to_f64_vec(), vec![0.0; region.local.numel()]);
    region.runs(&spec.shape, |global, at, len| {
        for k in 0..len {
            let e = global as usize + k;
            local[at + k] = share(op, values[e], e as u64 ^ salt << 32, mine, parts);
        }
    });
    tensor(whole.dtype(), &local, &region.local)
}

/// Returns the elements of a region in storage order.
pub(super) fn elements_of(whole: &Tensor, region: &Region) -> Tensor {
    fn copied<T: Element>(whole: &Tensor, region: &Region) -> Tensor {
        let values = whole.to_vec::<T>().expect("its dtype");
        let mut local = vec![T::from_f64(0.0); region.local.numel()];
        region.runs(whole.shape(), |global, at, len| {
            local[at..][..len].copy_from_slice(&values[global as usize..][..len])
        });
        Tensor::from_vec(local, region.local.clone()).expect("as many values as elements")
    }
    match whole.dtype() {
        DType::F32 => copied::<f32>(whole, region),
        DType::F64 => copied::<f64>(whole, region),
        DType::F16 => copied::<half::f16>(whole, region),
        DType::BF16 => copied::<half::bf16>(whole, region),
        DType::I64 => copied::<i64>(whole, region),
        DType::I32 => copied::<i32>(whole, region),
        DType::U8 => copied::<u8>(whole, region),
        DType::Bool => copied::<bool>(whole, region),
    }
}

/// Returns the global row-major index of the element at a place of a region's storage.
pub(super) fn global_index(region: &Region, shape: &Shape, place: usize) -> usize {
    let mut found = place;
    region.runs(shape, |global, at, len| {
        if (at..at + len).contains(&place) {
            found = global as usize + place - at;
        }
    });
    found
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

/// Splits a value so that one rank holds all of it and the other ranks -0, which changes no bit of any sum.
///
/// ```
/// use isoshard::{tensor::ReduceOp, testing::shards::owned};
/// let shares: Vec<f64> = (0..3).map(|i| owned(ReduceOp::Sum, 0.1, 7, i, 3)).collect();
/// assert_eq!(shares.iter().filter(|share| **share == 0.1).count(), 1);
/// assert_eq!(shares.iter().sum::<f64>(), 0.1);
/// ```
pub fn owned(op: ReduceOp, value: f64, salt: u64, i: usize, n: usize) -> f64 {
    let owner = (mix(salt.wrapping_mul(31).wrapping_add(n as u64)) % n as u64) as usize;
    match op {
        ReduceOp::Sum if i == owner => value,
        ReduceOp::Sum => -0.0,
        _ => share(op, value, salt, i, n),
    }
}

/// Splits a value so that its shares add up to it without rounding, in any order: twice the value on one rank, its
/// negative on the next one, and -0 on the others. A zero, a huge or an infinite value, and NaN, are on one rank.
pub(crate) fn exact_shares(op: ReduceOp, value: f64, salt: u64, i: usize, n: usize) -> f64 {
    // Twice the value must be finite in every dtype.
    if op != ReduceOp::Sum || n == 1 || value == 0.0 || value.is_nan() || value.abs() > 1e4 {
        return owned(op, value, salt, i, n);
    }
    let owner = (mix(salt.wrapping_mul(31).wrapping_add(n as u64)) % n as u64) as usize;
    match (i + n - owner) % n {
        0 => 2.0 * value,
        1 => -value,
        _ => -0.0,
    }
}

/// Describes the first difference between the parts that ranks computed, one per rank, and the whole; `None` if there is
/// none. Elements may differ by `bound`. Partial values are reduced first.
///
/// ```
/// use isoshard::{placement::{Mesh, Spec}, tensor::Tensor, testing::shards::difference};
/// let whole = Tensor::from_vec(vec![5.0f32], [1])?;
/// let spec = Spec::parse("f32[1]@(dp:P(max))", &Mesh::parse("dp=2", 0)?)?;
/// let parts = [2.0f32, 4.0].map(|x| Tensor::full(isoshard::tensor::DType::F32, [1], f64::from(x)));
/// assert_eq!(difference(&whole, &spec, &parts, 0.5).unwrap(), "rank 0, element 0: 4 instead of 5");
/// assert_eq!(difference(&whole, &spec, &parts, 1.0), None);
/// # Ok::<(), isoshard::Error>(())
/// ```
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
        if op.is_none() && local.dtype() == DType::I64 && whole.dtype() == DType::I64 {
            match first_difference(&local, &elements_of(whole, &region)) {
                None => continue,
                Some((place, values)) => {
                    let e = global_index(&region, &spec.shape, place);
                    return Some(format!("rank {rank}, element {e}: {values}"));
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

/// Returns the parts of all ranks, as [`part_of`] cuts them.
pub(crate) fn parts_of(whole: &Tensor, spec: &Spec, salt: u64) -> Vec<Tensor> {
    let coords = spec.mesh.ranks().map(|r| spec.mesh.coords_of(r).expect("a rank of the mesh"));
    coords.map(|c| part_of(whole, spec, &c, salt)).collect()
}

/// Returns `whole` in the layout of `spec` on this mesh, from parts that [`part_of`] cuts. Communicates nothing.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::DeviceMesh, placement::Spec, tensor::Tensor, testing::shards::spread};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let whole = Tensor::from_vec(vec![1.0f32, -2.0], [2])?;
///     let x = spread(&mesh, &whole, &Spec::parse("f32[2]@(dp:P(sum))", mesh.mesh())?, 3)?;
///     assert_eq!(x.full_tensor()?.to_f64_vec(), [1.0, -2.0]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns an error if the mesh has other axes than the spec's, or if the device has no memory left.
pub fn spread(mesh: &DeviceMesh, whole: &Tensor, spec: &Spec, salt: u64) -> Result<DTensor> {
    spread_by(share, mesh, whole, spec, salt)
}

/// Works like [`spread`], with another split of partial values.
///
/// ```
/// use isoshard::testing::shards::{owned, spread_by};
/// use isoshard::{comm::spmd, dtensor::DeviceMesh, placement::Spec, tensor::Tensor};
/// let bits = spmd(3, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
///     let spec = Spec::parse("f32[1]@(dp:P(sum))", mesh.mesh())?;
///     let x = spread_by(owned, &mesh, &Tensor::from_vec(vec![0.1f32], [1])?, &spec, 5)?;
///     Ok(x.full_tensor()?.to_vec::<f32>()?[0].to_bits())
/// })?;
/// assert_eq!(bits, [0.1f32.to_bits(); 3]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns the errors of [`spread`].
pub fn spread_by(share: Share, mesh: &DeviceMesh, whole: &Tensor, spec: &Spec, salt: u64) -> Result<DTensor> {
    let spec = Spec::new(mesh.mesh(), whole.dtype(), whole.shape().clone(), spec.layout.clone())?;
    let part = part_by(share, whole, &spec, mesh.mesh().coords(), salt);
    DTensor::from_local(mesh, part, whole.shape().clone(), spec.layout)
}
