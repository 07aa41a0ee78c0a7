//! Saving: each rank writes its pieces, and no rank holds more of a tensor than its shard.

use std::path::Path;
use std::time::Duration;

use super::index::{Index, SavedTensor};
use super::piece_file::PieceSource;
use super::save_job::{Commit, SaveJob, aside, make_aside};
use super::state_tree::StateTree;
use super::writers::plan_writers;
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::{Error, Result};
use crate::placement::Spec;
use crate::tensor::{Device, Shape};

const VERB: &str = "save";
/// The work that ranks announce while they write files, so that other ranks wait.
pub(super) const BUSY: &str = "saving a checkpoint";
/// The time that the first rank waits for other ranks' files after its own is written, unless told otherwise.
pub(super) const PATIENCE: Duration = Duration::from_secs(30 * 60);

/// Saves `state` as the new folder `dir`. All ranks of the mesh call this together, with the same names and values.
///
/// Every element is written once, by a rank that stores it; replicas share the work, so that the most loaded rank
/// writes hardly more than the mean. The folder appears, whole, when all ranks have written and flushed their files; if
/// the program ends before, it does not appear. Ranks meet in a folder beside `dir`, so all ranks reach one file system.
///
/// Communicates the reductions of `Partial` tensors, and some bytes per rank. To save without waiting, and to number
/// checkpoints, see [`CheckpointFolder`](super::CheckpointFolder).
///
/// ```
/// use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// let dir = std::env::temp_dir().join(format!("isoshard-save-{}", std::process::id()));
/// let to = dir.join("initial");
/// spmd(2, move |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let mut state = StateTree::new();
///     state.insert("x", DTensor::zeros(&mesh, DType::F32, [4, 3], "(S0)".parse()?)?)?;
///     checkpoint::save(&mesh, &to, &state)
/// })?;
/// assert_eq!(Checkpoint::open(dir.join("initial"))?.names().collect::<Vec<_>>(), ["x"]);
/// # std::fs::remove_dir_all(dir).unwrap();
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a folder that exists, and ranks with different names or values. Returns the same error on every rank if a
/// rank cannot write; nothing is left behind then.
pub fn save(mesh: &DeviceMesh, dir: impl AsRef<Path>, state: &StateTree) -> Result<()> {
    let job = start(mesh, dir.as_ref(), state, PATIENCE)?;
    let busy = mesh.rank().busy(BUSY);
    let done = job.run();
    drop(busy);
    mesh.agree(VERB, done.map(|()| Vec::new())).map(drop)
}

/// Plans a save, makes the folder in which it is written, and returns this rank's work, which shares the tensors'
/// memory. On a device, copies the rank's shards to the CPU's memory.
pub(super) fn start(mesh: &DeviceMesh, dir: &Path, state: &StateTree, patience: Duration) -> Result<SaveJob> {
    if mesh.device() == Device::Meta {
        return Err(Error::unsupported(VERB, "tensors on meta have no values", "a dry run", ""));
    }
    let reduced = |x: &DTensor| match x.layout().has_partial() {
        true => x.redistribute(x.layout().reduced()),
        false => Ok(x.clone()),
    };
    let tensors: Vec<DTensor> = state.tensors().map(|(_, x)| reduced(x)).collect::<Result<_>>()?;
    let mut index = Index::new(state.values().clone());
    for (name, x) in state.tensors() {
        let (dtype, shape) = (x.dtype().name().to_string(), x.shape().to_vec());
        index.tensors.insert(name.into(), SavedTensor { dtype, shape, pieces: Vec::new() });
    }
    let position = mesh.mesh().position_of(mesh.mesh().coords());
    let number = agreed_number(mesh, dir, state, &index)?;
    let aside = aside(dir, number)?;
    mesh.agree(VERB, if position == 0 { make_aside(dir, &aside) } else { Ok(()) }.map(|()| Vec::new()))?;

    let specs: Vec<Spec> = tensors.iter().map(|x| x.spec().clone()).collect();
    let names: Vec<&str> = state.tensors().map(|(name, _)| name).collect();
    let mut shards = vec![None; tensors.len()];
    let mut pieces = Vec::new();
    let mut previous = None;
    let mut piece_number = 0;
    for of in plan_writers(&specs) {
        piece_number = if previous == Some(of.tensor) { piece_number + 1 } else { 0 };
        previous = Some(of.tensor);
        if of.writer != position {
            continue;
        }
        let x = &tensors[of.tensor];
        let shard = match &mut shards[of.tensor] {
            Some(shard) => shard,
            None => shards[of.tensor].insert(x.local().to_device(Device::Cpu)?.contiguous()?),
        };
        let whole = of.len[..] == x.shape()[..];
        let name = names[of.tensor];
        pieces.push(PieceSource {
            tensor: name.into(),
            key: if whole { name.into() } else { format!("{name}#{piece_number}") },
            start: of.start,
            shape: Shape::from(of.len),
            shard: shard.clone(),
            region: x.tensor_meta().window().region.clone(),
        });
    }
    let commit = (position == 0).then(|| Commit { index, ranks: mesh.mesh().ranks().collect(), patience });
    Ok(SaveJob { dir: dir.to_path_buf(), aside, position, pieces, commit })
}

/// Compares the ranks' paths, names, specs and values, and returns a number for this save that all ranks share.
fn agreed_number(mesh: &DeviceMesh, dir: &Path, state: &StateTree, index: &Index) -> Result<u64> {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(dir.as_os_str().as_encoded_bytes());
    state.tensors().for_each(|(name, x)| hasher.update(format!("{name} {}\n", x.spec()).as_bytes()));
    hasher.update(&serde_json::to_vec(index).map_err(Error::other)?);
    let drawn = getrandom::u64().map_err(|e| Error::other(e.to_string()))?;
    let all = mesh.agree(VERB, Ok(vec![i64::from(hasher.finalize()), drawn as i64]))?;
    if let Some(at) = all.iter().position(|words| words[0] != all[0][0]) {
        let ranks: Vec<usize> = mesh.mesh().ranks().collect();
        let given = format!("other ones on rank {} than on rank {}", ranks[at], ranks[0]);
        let rule = "all ranks save the same names, specs and values to the same folder";
        return Err(Error::invalid(VERB, rule, given, ""));
    }
    Ok(all[0][1] as u64)
}
