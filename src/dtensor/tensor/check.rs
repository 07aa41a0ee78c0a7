//! Checks over all ranks: that replicas are equal, and that values are finite.

use super::dtensor::{DTensor, refuse_partial};
use crate::comm::Group;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::rank_reports::gather_words;
use crate::error::{Divergence, Error, NotFinite, Result};
use crate::tensor::{DType, Device, Dims, ReduceOp, Shape, Tensor};

/// The number of hashes compared per round while the first difference is located, and of elements in the last round.
const HASHES_LEN: usize = 256;

/// Checks that the replicas of named tensors of one mesh have equal bits, by comparing 128-bit hashes over the ranks
/// that hold them. A difference in one element always changes the hash. NaNs with other bits and zeros of another
/// sign count as different.
///
/// Per tensor, each rank sends 16 bytes to the ranks that share its mesh axes with
/// [`Placement::Replicate`](crate::placement::Placement::Replicate), and one number to all ranks. If tensors differ,
/// a few hundred bytes more locate the first difference.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, check_replicas}, placement::Layout, tensor::{DType, Tensor}};
/// let said = spmd(3, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
///     let held = if rank.rank() == 1 { [1.0f32, 2.0, -0.0] } else { [1.0, 2.0, 0.0] };
///     let x = DTensor::from_local(&mesh, Tensor::from_slice(&held, [3])?, [3], Layout::replicated(1))?;
///     Ok(check_replicas(&[("bias", &x)]).unwrap_err().to_string())
/// })?;
/// assert_eq!(said[0], "check_replicas: replicas differ; got bias f32[3]@(dp:R) at rank(s) [1], first at index [2]: \
///     0x80000000 at rank 1, 0x00000000 at rank 0; restore the tensor from rank 0 or a checkpoint");
/// assert_eq!([&said[1], &said[2]], [&said[0]; 2]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns [`Error::Diverged`], equal on all ranks: the first tensor that differs, the ranks whose elements are not
/// those of the most replicas, and the first global index. Refuses tensors of several meshes, and `Partial` ones,
/// which have no values of their own. Returns an error if communication fails.
pub fn check_replicas(tensors: &[(&str, &DTensor)]) -> Result<()> {
    let Some(mesh) = mesh_of("check_replicas", tensors)? else { return Ok(()) };
    let groups = tensors.iter().map(|(_, x)| replicas(x)).collect::<Result<Vec<Option<Group>>>>()?;
    let hashes = tensors.iter().map(|(_, x)| Ok(hash(&bytes(x)?))).collect::<Result<Vec<[i64; 2]>>>()?;
    // The tensors of one group share one all-gather.
    let mut all_hashes: Vec<Vec<[i64; 2]>> = vec![vec![]; tensors.len()];
    let mut done = vec![false; tensors.len()];
    for number in 0..tensors.len() {
        let Some(group) = groups[number].as_ref().filter(|_| !done[number]) else { continue };
        let same = |k: &usize| groups[*k].as_ref().is_some_and(|g| g.ranks() == group.ranks());
        let alike: Vec<usize> = (number..tensors.len()).filter(same).collect();
        let mine = alike.iter().flat_map(|&k| hashes[k]).collect();
        let gathered = gather_words(group, mesh.device(), mine)?;
        for (i, &k) in alike.iter().enumerate() {
            done[k] = true;
            all_hashes[k] = gathered.iter().map(|words| [words[2 * i], words[2 * i + 1]]).collect();
        }
    }
    let differs = |hashes: &Vec<[i64; 2]>| hashes.windows(2).any(|pair| pair[0] != pair[1]);
    let first = all_hashes.iter().position(differs).unwrap_or(tensors.len());
    let world = mesh.all_ranks()?;
    let first = first_of_all(&mesh, &world, first)?;
    let Some(&(name, x)) = tensors.get(first) else { return Ok(()) };
    let found = match &groups[first] {
        Some(group) if differs(&all_hashes[first]) => {
            Some(first_difference(&mesh, group, x, &all_hashes[first])?)
        }
        _ => None,
    };
    Err(Error::Diverged(Box::new(share_difference(&mesh, &world, (name, x), found)?)))
}

/// Checks that named tensors of one mesh have no infinite element and no NaN. Integer tensors always pass.
///
/// Reads every element and sends 24 bytes to each rank: call it every few steps of training, not after each operator.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, check_finite}, tensor::Tensor};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, f32::NAN, 4.0], [4])?, "(S0)")?;
///     let said = check_finite(&[("x", &x)], 7).unwrap_err().to_string(); // equal on both ranks
///     assert!(said.contains("f32[4]@(dp:S0)") && said.contains("[2]"), "{said}");
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns [`Error::NotFinite`], equal on all ranks: the first tensor with such an element, the ranks that hold one,
/// and the first global index at the first of these ranks. Refuses tensors of several meshes, and `Partial` ones.
/// Returns an error if communication fails.
pub fn check_finite(tensors: &[(&str, &DTensor)], step: u64) -> Result<()> {
    let Some(mesh) = mesh_of("check_finite", tensors)? else { return Ok(()) };
    let mut mine = vec![i64::MAX, 0, 0];
    for (number, (_, x)) in tensors.iter().enumerate() {
        if let Some((local, value)) = first_not_finite(x)? {
            mine = vec![number as i64, global(x, local) as i64, value.to_bits() as i64];
            break;
        }
    }
    let world = mesh.all_ranks()?;
    let gathered = gather_words(&world, mesh.device(), mine)?;
    let first = gathered.iter().map(|words| words[0]).min().unwrap_or(i64::MAX);
    let Some(&(name, x)) = usize::try_from(first).ok().and_then(|number| tensors.get(number)) else {
        return Ok(());
    };
    let holders: Vec<usize> = (0..gathered.len()).filter(|&i| gathered[i][0] == first).collect();
    let words = &gathered[holders[0]];
    Err(Error::NotFinite(Box::new(NotFinite {
        name: name.into(),
        tensor: x.spec().to_string(),
        step,
        ranks: holders.iter().map(|&i| world.ranks()[i]).collect(),
        index: index(x.shape(), words[1] as usize),
        value: f64::from_bits(words[2] as u64),
    })))
}

/// The first difference between replicas, as all their holders know it.
struct FirstDifference {
    /// Members whose bits differ from the reference's.
    odd: Vec<usize>,
    reference: usize,
    /// A member that differs at the index.
    rank: usize,
    /// The global index, row-major.
    index: usize,
    bits: u64,
    reference_bits: u64,
}

/// Returns the mesh that the tensors share, or `None` if there is nothing to check.
fn mesh_of(verb: &str, tensors: &[(&str, &DTensor)]) -> Result<Option<DeviceMesh>> {
    let Some((_, first)) = tensors.first() else { return Ok(None) };
    for (name, x) in tensors {
        refuse_partial(verb, x.tensor_meta()).map_err(|e| e.at(name))?;
        if !x.mesh().same(first.mesh()) {
            let [here, there] = x.mesh().told_apart(first.mesh());
            let given = format!("{name} on {here}, {} on {there}", tensors[0].0);
            return Err(Error::invalid(
                verb,
                "the tensors are on different meshes",
                given,
                "check them apart",
            ));
        }
    }
    // A dry run has no elements to compare.
    Ok((first.mesh().device() != Device::Meta).then(|| first.mesh().clone()))
}

/// Returns the group of the ranks that hold what this rank holds of a tensor, or `None` if it is alone.
fn replicas(x: &DTensor) -> Result<Option<Group>> {
    let axes = axes_of(x.mesh(), |a| x.layout().axis(a).is_replicate());
    let group = x.mesh().group(&axes)?;
    Ok((group.len() > 1).then_some(group))
}

fn axes_of(mesh: &DeviceMesh, wanted: impl Fn(usize) -> bool) -> Vec<usize> {
    (0..mesh.mesh().ndim()).filter(|&a| wanted(a)).collect()
}

/// Returns the smallest `mine` of all ranks.
fn first_of_all(mesh: &DeviceMesh, world: &Group, mine: usize) -> Result<usize> {
    let mine = Tensor::scalar(mine as i64).to_device(mesh.device())?;
    let first = world.all_reduce(&mine, ReduceOp::Min)?.to_device(Device::Cpu)?;
    Ok(first.to_vec::<i64>()?[0] as usize)
}

/// Finds the first element in which a replica differs from the most frequent one.
fn first_difference(
    mesh: &DeviceMesh,
    group: &Group,
    x: &DTensor,
    hashes: &[[i64; 2]],
) -> Result<FirstDifference> {
    let count = |h: &[i64; 2]| hashes.iter().filter(|other| *other == h).count();
    let most = hashes.iter().map(count).max().unwrap_or(0);
    let reference = hashes.iter().position(|h| count(h) == most).expect("there are replicas");
    let odd = (0..hashes.len()).filter(|&i| hashes[i] != hashes[reference]).collect();
    let (bytes, each) = (bytes(x)?, x.dtype().size_bytes());
    let (mut start, mut end) = (0, bytes.len() / each);
    while end - start > HASHES_LEN {
        let step = (end - start).div_ceil(HASHES_LEN);
        let chunk = |i: usize| (start + i * step).min(end) * each..(start + (i + 1) * step).min(end) * each;
        let mine = (0..HASHES_LEN).flat_map(|i| hash(&bytes[chunk(i)])).collect();
        let gathered = gather_words(group, mesh.device(), mine)?;
        let differing = first_odd(&gathered, reference).unwrap_or(0) / 2;
        (start, end) = ((start + differing * step).min(end), (start + (differing + 1) * step).min(end));
    }
    let word = |i: usize| {
        let mut word = [0; 8];
        word[..each].copy_from_slice(&bytes[i * each..(i + 1) * each]);
        u64::from_le_bytes(word) as i64
    };
    let gathered = gather_words(group, mesh.device(), (start..end).map(word).collect())?;
    let element = first_odd(&gathered, reference).unwrap_or(0);
    let differs = |words: &Vec<i64>| words[element] != gathered[reference][element];
    let rank = gathered.iter().position(differs).unwrap_or(reference);
    let bits = |rank: usize| gathered[rank].get(element).map_or(0, |&word| word as u64);
    let (bits, reference_bits) = (bits(rank), bits(reference));
    Ok(FirstDifference { odd, reference, rank, index: global(x, start + element), bits, reference_bits })
}

/// Returns the first position at which a member differs from the reference.
fn first_odd(words: &[Vec<i64>], reference: usize) -> Option<usize> {
    (0..words[reference].len()).find(|&i| words.iter().any(|own| own[i] != words[reference][i]))
}

/// Tells all ranks of the mesh the first difference found, by rank, and all members that differ.
fn share_difference(
    mesh: &DeviceMesh,
    world: &Group,
    (name, x): (&str, &DTensor),
    found: Option<FirstDifference>,
) -> Result<Divergence> {
    let group = replicas(x)?;
    let mut mine = vec![0; 6];
    if let (Some(found), Some(group)) = (found, &group) {
        let is_odd = found.odd.contains(&group.index());
        let [rank, reference] = [found.rank, found.reference].map(|i| group.ranks()[i] as i64);
        let bits = [found.bits as i64, found.reference_bits as i64];
        mine = vec![1 + i64::from(is_odd), rank, reference, found.index as i64, bits[0], bits[1]];
    }
    let gathered = gather_words(world, mesh.device(), mine)?;
    let odd = (0..gathered.len()).filter(|&i| gathered[i][0] == 2).map(|i| world.ranks()[i]);
    let first = gathered.iter().find(|words| words[0] > 0).expect("some rank found a difference");
    Ok(Divergence {
        name: name.into(),
        tensor: x.spec().to_string(),
        ranks: odd.collect(),
        rank: first[1] as usize,
        reference: first[2] as usize,
        index: index(x.shape(), first[3] as usize),
        bits: first[4] as u64,
        reference_bits: first[5] as u64,
        element_bytes: x.dtype().size_bytes(),
    })
}

fn bytes(x: &DTensor) -> Result<Vec<u8>> {
    Ok(x.local().to_device(Device::Cpu)?.contiguous()?.as_bytes()?.to_vec())
}

/// Returns two hashes of 64 bits. Each step is a bijection of the state for every word, and of the word for every
/// state, so that inputs of one length that differ in one word always have different hashes.
fn hash(bytes: &[u8]) -> [i64; 2] {
    let step = |h: u64, word: u64, by: u64| (h.rotate_left(27) ^ word).wrapping_mul(by);
    let (mut a, mut b) = (bytes.len() as u64, 0x9e37_79b9_7f4a_7c15);
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let word = u64::from_le_bytes(word);
        a = step(a, word, 0x9fb2_1c65_1e98_df25);
        b = step(b, word.rotate_left(32), 0xd6e8_feb8_6659_fd93);
    }
    [(a ^ (a >> 29)) as i64, (b ^ (b >> 31)) as i64]
}

/// Returns the local offset and the value of the first stored element that is not finite.
fn first_not_finite(x: &DTensor) -> Result<Option<(usize, f64)>> {
    if x.dtype().expect_float("check_finite").is_err() {
        return Ok(None);
    }
    let local = x.local().to_device(Device::Cpu)?.contiguous()?;
    let found = |at: Option<usize>, value: &dyn Fn(usize) -> f64| at.map(|at| (at, value(at)));
    Ok(match x.dtype() {
        DType::F32 => {
            let values = local.as_slice::<f32>()?;
            found(values.iter().position(|v| !v.is_finite()), &|at| f64::from(values[at]))
        }
        DType::F64 => {
            let values = local.as_slice::<f64>()?;
            found(values.iter().position(|v| !v.is_finite()), &|at| values[at])
        }
        _ => {
            let values = local.to_f64_vec();
            found(values.iter().position(|v| !v.is_finite()), &|at| values[at])
        }
    })
}

/// Returns the global row-major index of the element at local offset `local`.
fn global(x: &DTensor, local: usize) -> usize {
    let mut global = 0;
    x.tensor_meta().spec().region().runs(x.shape(), |first, at, len| {
        if (at..at + len).contains(&local) {
            global = first as usize + local - at;
        }
    });
    global
}

/// Returns the index of the element at a row-major position.
fn index(shape: &Shape, linear: usize) -> Vec<usize> {
    let strides: Dims = shape.strides();
    strides
        .iter()
        .zip(shape.iter())
        .map(|(&stride, &extent)| linear / stride.max(1) % extent.max(1))
        .collect()
}
