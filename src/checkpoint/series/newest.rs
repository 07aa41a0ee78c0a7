//! The newest checkpoint of a folder, and the newest one that is whole.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::folder::{CheckpointFolder, is_first};
use crate::checkpoint::format::runs::newest_of;
use crate::checkpoint::format::steps::STEP;
use crate::checkpoint::loading::checkpoint::Checkpoint;
use crate::dtensor::DeviceMesh;
use crate::error::{Error, Result};
use crate::files::remove_remains;

const VERB: &str = "checkpoint";
/// The end of the name of a damaged checkpoint that was set aside.
const DAMAGED: &str = ".damaged";

/// The test by which [`CheckpointFolder::newest_whole`] takes a checkpoint for whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WholeCheck {
    /// The index has its checksum, and each file has the length that the index says: the test that opening a checkpoint
    /// makes. It reads the index alone. Changed bytes within a file are found when they are loaded.
    Lengths,
    /// All bytes have their checksums, too ([`Checkpoint::verify`]). The ranks share the reading.
    Checksums,
}

/// The outcome of opening a checkpoint, the same on all ranks.
enum Opening {
    Whole(Checkpoint),
    Damaged(Error),
}

impl CheckpointFolder {
    /// Opens the newest checkpoint of the run; returns `None` if there is none. A folder that has not saved yet takes over
    /// the run whose checkpoints are there: this is how a program resumes. Communicates some bytes per rank, so that all
    /// ranks open the same one: they compare the indexes' checksums.
    ///
    /// ```
    /// use isoshard::{checkpoint::CheckpointFolder, comm::spmd, dtensor::DeviceMesh};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     assert!(CheckpointFolder::new("no/such/folder").newest(&mesh)?.is_none());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a checkpoint that is damaged ([`WholeCheck::Lengths`]) or has lost its index, and names it and the newest one before it that is not,
    /// which [`CheckpointFolder::newest_whole`] takes. Refuses ranks that see different checkpoints, and names them. Refuses
    /// to choose among checkpoints of several runs: see [`CheckpointFolder::continue_run`].
    pub fn newest(&mut self, mesh: &DeviceMesh) -> Result<Option<(u64, Checkpoint)>> {
        let Some(step) = self.newest_below(mesh, None)? else { return Ok(None) };
        let damage = match open_on_ranks(mesh, &self.dir_of(step), WholeCheck::Lengths)? {
            Opening::Whole(checkpoint) => {
                self.continue_run(&checkpoint);
                return Ok(Some((step, checkpoint)));
            }
            Opening::Damaged(error) => error,
        };
        let given = format!("step {step} with this error: {damage}");
        let (mut below, mut remedy) = (step, "no older one is whole".to_string());
        while let Some(step) = self.newest_below(mesh, Some(below))? {
            if let Opening::Whole(_) = open_on_ranks(mesh, &self.dir_of(step), WholeCheck::Lengths)? {
                remedy = format!(
                    "take step {step}, whose index and lengths of files are right, with CheckpointFolder::newest_whole"
                );
                break;
            }
            below = step;
        }
        Err(Error::invalid(VERB, "the newest checkpoint is damaged", given, remedy))
    }

    /// Opens the newest checkpoint of the run that is whole by `check`; returns `None` if the run has no checkpoints at
    /// all.
    ///
    /// Newer ones, which are damaged, are set aside: the first rank renames them to `step-000000000030.damaged`, so that the
    /// run saves their steps anew. No file is removed. Communicates some bytes per rank and checkpoint.
    ///
    /// ```
    /// use isoshard::checkpoint::{CheckpointFolder, StateTree, WholeCheck};
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh};
    /// let root = std::env::temp_dir().join(format!("isoshard-whole-{}", std::process::id()));
    /// # let also = root.clone();
    /// spmd(1, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut folder = CheckpointFolder::new(&root);
    ///     folder.save(&mesh, 20, &StateTree::new())?;
    ///     folder.save(&mesh, 30, &StateTree::new())?;
    ///     std::fs::write(folder.dir_of(30).join("checkpoint.json"), "{}").unwrap();
    ///     let refused = folder.newest(&mesh).unwrap_err().to_string();
    ///     assert!(refused.contains("the newest checkpoint is damaged; got step 30"), "{refused}");
    ///     assert!(refused.contains("take step 20"), "{refused}");
    ///
    ///     let (step, _) = folder.newest_whole(&mesh, WholeCheck::Checksums)?.expect("there is one");
    ///     assert_eq!((step, folder.steps()?), (20, vec![20]));
    ///     folder.save(&mesh, 30, &StateTree::new())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a folder with damaged checkpoints only, and ranks that see different checkpoints, or files that only
    /// some ranks see. Returns an error if a file cannot be read for another reason than damage, such as a missing
    /// permission, or if a checkpoint cannot be renamed.
    pub fn newest_whole(
        &mut self,
        mesh: &DeviceMesh,
        check: WholeCheck,
    ) -> Result<Option<(u64, Checkpoint)>> {
        let mut damaged: Vec<(u64, Error)> = Vec::new();
        while let Some(step) = self.newest_below(mesh, damaged.last().map(|(step, _)| *step))? {
            match open_on_ranks(mesh, &self.dir_of(step), check)? {
                Opening::Damaged(error) => damaged.push((step, error)),
                Opening::Whole(checkpoint) => {
                    self.set_aside(mesh, &damaged)?;
                    self.continue_run(&checkpoint);
                    return Ok(Some((step, checkpoint)));
                }
            }
        }
        let Some((step, error)) = damaged.first() else { return Ok(None) };
        let given =
            format!("{} damaged ones, the newest, step {step}, with this error: {error}", damaged.len());
        Err(Error::invalid(
            VERB,
            "a checkpoint of the folder is whole",
            given,
            "start anew in another folder",
        ))
    }

    /// Returns the newest step of the run that the first rank sees, of those below a step.
    fn newest_below(&self, mesh: &DeviceMesh, step: Option<u64>) -> Result<Option<u64>> {
        let newest = match is_first(mesh) {
            true => {
                // A program that died while it replaced a checkpoint may have left the old one under another name.
                let is_step = |name: &str| name.starts_with(STEP);
                let _ = remove_remains(&self.root, &is_step, SystemTime::UNIX_EPOCH);
                newest_of(&self.root, self.run, step)
            }
            false => Ok(None),
        };
        let words = newest.map(|newest| {
            vec![i64::from(newest.is_some()), newest.map_or(0, |(step, _)| step).cast_signed()]
        });
        let of_first = mesh.agree(VERB, words)?.swap_remove(0);
        Ok((of_first[0] == 1).then_some(of_first[1].cast_unsigned()))
    }

    /// Renames damaged checkpoints, on the first rank.
    fn set_aside(&self, mesh: &DeviceMesh, damaged: &[(u64, Error)]) -> Result<()> {
        if damaged.is_empty() {
            return Ok(());
        }
        let rename = |(step, _): &(u64, Error)| {
            let dir = self.dir_of(*step);
            match fs::rename(&dir, free_name(&dir)) {
                // Another program has removed it.
                Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::io(VERB, &dir, e)),
                _ => Ok(()),
            }
        };
        let renamed = if is_first(mesh) { damaged.iter().try_for_each(rename) } else { Ok(()) };
        mesh.agree(VERB, renamed.map(|()| Vec::new())).map(drop)
    }
}

/// Opens a checkpoint on all ranks, which all find the same.
fn open_on_ranks(mesh: &DeviceMesh, dir: &Path, check: WholeCheck) -> Result<Opening> {
    let opened = Checkpoint::open(dir);
    let is_damaged = |e: Option<&Error>| vec![i64::from(e.is_some_and(is_damage))];
    let all = mesh.agree(VERB, Ok(is_damaged(opened.as_ref().err())))?;
    let everywhere = all.iter().all(|words| words[0] == 1);
    // A file that is damaged on some ranks only is another file.
    let opened = mesh.expect_same_on_ranks(VERB, opened, |checkpoint| [checkpoint.opened_alike()]);
    let checkpoint = match opened {
        Err(error) if everywhere && !matches!(error, Error::Comm(_)) => return Ok(Opening::Damaged(error)),
        opened => opened?,
    };
    if check == WholeCheck::Lengths {
        return Ok(Opening::Whole(checkpoint));
    }
    let busy = mesh.rank().busy("verifying a checkpoint");
    let position = mesh.mesh().position_of(mesh.mesh().coords());
    let verified = checkpoint.verify_share(position, mesh.mesh().rank_len());
    drop(busy);
    let cannot = verified.as_ref().err().is_some_and(|e| !is_damage(e));
    let all = mesh.agree(VERB, Ok(vec![i64::from(cannot)]))?;
    let is_damage = all.iter().all(|words| words[0] == 0);
    match mesh.expect_same_on_ranks(VERB, verified, |()| []) {
        Ok(()) => Ok(Opening::Whole(checkpoint)),
        Err(error) if is_damage && !matches!(error, Error::Comm(_)) => Ok(Opening::Damaged(error)),
        Err(error) => Err(error),
    }
}

/// Returns true if an error of reading says that files are not those that were saved, and not that they cannot be read now.
fn is_damage(error: &Error) -> bool {
    match error.downcast_ref::<io::Error>().map(io::Error::kind) {
        Some(ErrorKind::NotFound | ErrorKind::UnexpectedEof | ErrorKind::InvalidInput) => true,
        Some(_) => false,
        None => matches!(error, Error::Invalid(_)),
    }
}

/// Returns a name for a damaged checkpoint that is free.
fn free_name(dir: &Path) -> PathBuf {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let numbered = |number: u32| match number {
        0 => dir.with_file_name(format!("{name}{DAMAGED}")),
        _ => dir.with_file_name(format!("{name}{DAMAGED}.{number}")),
    };
    (0..).map(numbered).find(|path| !path.exists()).expect("fewer names than numbers are taken")
}
