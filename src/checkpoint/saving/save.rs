//! Saving: each rank writes its pieces, and no rank holds more of a tensor than its shard.

use std::path::Path;
use std::time::Duration;

use super::save_job::{Commit, SaveJob, SaveNews, expect_free};
use super::writers::{WrittenBox, plan_writers};
use crate::checkpoint::format::index::{Index, SavedTensor, key_of};
use crate::checkpoint::format::piece_file::PieceSource;
use crate::checkpoint::format::run_id::{Run, RunId};
use crate::checkpoint::format::runs::refuse_others;
use crate::checkpoint::state_tree::StateTree;
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::{Error, Result};
use crate::files::{UnfinishedFolder, draw_number, parent};
use crate::placement::{Region, Spec};
use crate::tensor::{Device, Shape, Tensor};

const VERB: &str = "save";
/// The work that ranks announce while they write files, so that other ranks wait.
pub(in crate::checkpoint) const BUSY: &str = "saving a checkpoint";
/// The time that the first rank waits for other ranks' files after its own is written, unless told otherwise.
pub(in crate::checkpoint) const PATIENCE: Duration = Duration::from_secs(30 * 60);

/// Saves `state` as the new folder `dir`. All ranks of the mesh call this together, with the same names and values.
///
/// Every element is written once, by a rank that stores it; replicas share the work, so that the most loaded rank
/// writes hardly more than the mean. The folder appears, whole, when all ranks have written and flushed their files; if
/// the program ends before, it does not appear. Ranks meet in a folder beside `dir`, so all ranks reach one file system.
///
/// Communicates the reductions of `Partial` tensors, and some bytes per rank. To save without waiting, and to number
/// checkpoints, see [`CheckpointFolder`](crate::checkpoint::CheckpointFolder).
///
/// ```
/// use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// let dir = std::env::temp_dir().join(format!("isoshard-save-{}", std::process::id()));
/// let to = dir.join("initial");
/// spmd(2, move |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let mut state = StateTree::new();
///     state.insert("x", DTensor::zeros(&mesh, DType::F32, [4, 3], "(S0)")?)?;
///     checkpoint::save(&mesh, &to, &state)
/// })?;
/// assert_eq!(Checkpoint::open(dir.join("initial"))?.names().collect::<Vec<_>>(), ["x"]);
/// # std::fs::remove_dir_all(dir).unwrap();
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a folder that exists, ranks with different names or values, and tensors of another mesh. Returns the same error
/// on every rank if a rank cannot write; nothing is left behind then. If only the last flush of the folder above fails,
/// the error says so and the checkpoint is there.
pub fn save(mesh: &DeviceMesh, dir: impl AsRef<Path>, state: &StateTree) -> Result<()> {
    let order = SaveOrder { patience: PATIENCE, run: Run::Of(None), replaces: false, family: None };
    let mut job = start(mesh, dir.as_ref(), state, &order)?;
    write(mesh, &mut job)?;
    let busy = mesh.rank().busy(BUSY);
    let committed = job.commit(&SaveNews::of_written());
    drop(busy);
    mesh.agree(VERB, committed.map(|()| Vec::new())).map(drop)
}

/// Writes this rank's part of a save, and returns when all ranks have written theirs or have failed, so that the first
/// rank does not wait for a report later.
pub(in crate::checkpoint) fn write(mesh: &DeviceMesh, job: &mut SaveJob) -> Result<()> {
    let busy = mesh.rank().busy(BUSY);
    let written = job.write();
    drop(busy);
    let all = mesh.agree(VERB, written.map(|()| Vec::new()));
    if all.is_err() {
        job.abandon();
    }
    all.map(drop)
}

/// The conditions of a save.
pub(in crate::checkpoint) struct SaveOrder {
    /// The time that the first rank waits for other ranks' files.
    pub patience: Duration,
    pub run: Run,
    /// `true` if the save may take the place of an older checkpoint.
    pub replaces: bool,
    /// The start of the names whose remains are removed before, beside those of the saved name.
    pub family: Option<&'static str>,
}

/// Plans a save, makes the folder in which it is written, and returns this rank's work, which shares the tensors'
/// memory. On a device, copies the pieces that this rank writes to the CPU's memory. If a rank cannot, no rank can.
pub(in crate::checkpoint) fn start(
    mesh: &DeviceMesh,
    dir: &Path,
    state: &StateTree,
    order: &SaveOrder,
) -> Result<SaveJob> {
    if mesh.device() == Device::Meta {
        return Err(Error::unsupported(VERB, "tensors on meta have no values", "a dry run", ""));
    }
    let mut index = Index::new(state.values().clone());
    for (name, x) in state.tensors() {
        let (dtype, shape) = (x.dtype().name().to_string(), x.shape().to_vec());
        index.tensors.insert(name.into(), SavedTensor { dtype, shape, pieces: Vec::new() });
    }
    let position = mesh.mesh().position_of(mesh.mesh().coords());
    let (number, run) = agreed_numbers(mesh, dir, state, &index, order)?;
    index.run = run;
    let reduced = |x: &DTensor| match x.layout().has_partial() {
        true => x.redistribute(x.layout().reduced()),
        false => Ok(x.clone()),
    };
    let tensors: Vec<DTensor> = state.tensors().map(|(_, x)| reduced(x)).collect::<Result<_>>()?;
    let is_first = matches!(order.run, Run::New(_));
    let make = || {
        if position != 0 {
            return Ok(None);
        }
        expect_free(dir, order.replaces)?;
        if is_first {
            refuse_others(parent(dir), order.run.id())?;
        }
        let folder = UnfinishedFolder::create(dir, number, order.family);
        folder.map(Some).map_err(|e| Error::io(VERB, dir, e))
    };
    let (mut folder, made) = match make() {
        Ok(folder) => (folder, Ok(Vec::new())),
        Err(e) => (None, Err(e)),
    };
    mesh.agree(VERB, made)?;
    let aside = UnfinishedFolder::path_of(dir, number).map_err(|e| Error::io(VERB, dir, e))?;
    let (ranks, patience, replaces) = (mesh.mesh().ranks().collect(), order.patience, order.replaces);
    let commit = folder.take().map(|folder| Commit { index, ranks, patience, folder, replaces, is_first });
    let mut job = SaveJob { dir: dir.to_path_buf(), aside, position, run, pieces: Vec::new(), commit };

    let names: Vec<&str> = state.tensors().map(|(name, _)| name).collect();
    let pieces = own_pieces(position, &names, &tensors).map(|pieces| job.pieces = pieces);
    let all = mesh.agree(VERB, pieces.map(|()| Vec::new()));
    if all.is_err() {
        job.abandon();
    }
    all.map(|_| job)
}

/// Returns the pieces that the rank at a position of the mesh writes.
fn own_pieces(position: usize, names: &[&str], tensors: &[DTensor]) -> Result<Vec<PieceSource>> {
    let specs: Vec<Spec> = tensors.iter().map(|x| x.spec().clone()).collect();
    let (mut pieces, mut previous, mut number) = (Vec::new(), None, 0);
    for of in plan_writers(&specs) {
        number = if previous == Some(of.tensor) { number + 1 } else { 0 };
        previous = Some(of.tensor);
        if of.writer != position {
            continue;
        }
        let (x, name) = (&tensors[of.tensor], names[of.tensor]);
        let whole = of.len[..] == x.shape()[..];
        let (shard, region) = memory_of(x, &of)?;
        pieces.push(PieceSource {
            tensor: name.into(),
            key: key_of(name, whole, number),
            start: of.start,
            shape: Shape::from(of.len),
            shard,
            region,
        });
    }
    Ok(pieces)
}

/// Returns memory of the CPU that has a box of this rank's shard, and the indices that it stores: the shard itself, or a
/// copy of as little of a device's shard as is contiguous.
fn memory_of(x: &DTensor, of: &WrittenBox) -> Result<(Tensor, Region)> {
    let region = x.tensor_meta().window().region.clone();
    if x.local().device() == Device::Cpu {
        return Ok((x.local().contiguous()?, region));
    }
    let wanted = Region::of_box(of.start.clone(), Shape::from(&of.len[..]));
    let mut runs = Vec::new();
    for overlap in wanted.intersect(&region) {
        overlap.runs(|_, at, len| runs.push((at, len)));
    }
    let local = x.local().contiguous()?;
    match runs[..] {
        [(at, len)] => {
            let flat = local.reshape([local.numel()])?.narrow(0, at, len)?;
            Ok((flat.to_device(Device::Cpu)?.contiguous()?.reshape(wanted.local.clone())?, wanted))
        }
        _ => Ok((local.to_device(Device::Cpu)?, region)),
    }
}

/// Compares the ranks' paths, names, specs, values and runs, and returns a number for this save and the run's identity,
/// which all ranks share. A run that has none draws it.
fn agreed_numbers(
    mesh: &DeviceMesh,
    dir: &Path,
    state: &StateTree,
    index: &Index,
    order: &SaveOrder,
) -> Result<(u64, Option<RunId>)> {
    let mine = || {
        let same = |x: &DTensor| x.mesh().mesh() == mesh.mesh();
        if let Some((name, x)) = state.tensors().find(|(_, x)| !same(x)) {
            let given = format!("{name} on {} for {}", x.mesh().mesh(), mesh.mesh());
            return Err(Error::invalid(VERB, "all tensors are on the mesh that saves them", given, ""));
        }
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(dir.as_os_str().as_encoded_bytes());
        state.tensors().for_each(|(name, x)| hasher.update(format!("{name} {}\n", x.spec()).as_bytes()));
        hasher.update(&serde_json::to_vec(index).map_err(Error::other)?);
        hasher.update(format!("{:?} {}", order.run, order.replaces).as_bytes());
        let run = match order.run {
            Run::New(None) => Some(RunId(draw_number()?)),
            known => known.id(),
        };
        let (has_run, run) = (i64::from(run.is_some()), run.map_or(0, |run| run.0 as i64));
        Ok(vec![i64::from(hasher.finalize()), draw_number()? as i64, has_run, run])
    };
    let all = mesh.agree(VERB, mine())?;
    if let Some(at) = all.iter().position(|words| words[0] != all[0][0]) {
        let ranks: Vec<usize> = mesh.mesh().ranks().collect();
        let given = format!("other ones on rank {} than on rank {}", ranks[at], ranks[0]);
        let rule = "all ranks save the same names, specs and values of one run to the same folder";
        return Err(Error::invalid(VERB, rule, given, ""));
    }
    let run = (all[0][2] == 1).then_some(RunId(all[0][3] as u64));
    Ok((all[0][1] as u64, run))
}
