//! A folder of a run's numbered checkpoints: saves that do not stop the program, the newest one, and the last ones kept.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::background_save::BackgroundSave;
use super::removal::Removal;
use crate::checkpoint::format::run_id::Run;
use crate::checkpoint::format::runs::refuse_others;
use crate::checkpoint::format::steps::{STEP, step_name, steps_in};
use crate::checkpoint::loading::checkpoint::Checkpoint;
use crate::checkpoint::saving::save::{BUSY, PATIENCE, SaveOrder, start, write};
use crate::checkpoint::saving::save_job::{SaveJob, SaveNews};
use crate::checkpoint::state_tree::StateTree;
use crate::dtensor::DeviceMesh;
use crate::error::{Error, Result};

const VERB: &str = "save";

/// The answer to a save that is asked for while another one is being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhileSaving {
    /// Waits until the other one is written.
    #[default]
    Wait,
    /// Refuses the new one; the other one goes on.
    Refuse,
}

/// A folder of checkpoints with the names `step-000000000012`, to which one run saves.
///
/// A run draws an identity at its first save, which its checkpoints hold. [`CheckpointFolder::newest`] gives it back, so
/// that a program which goes on from a checkpoint saves as the same run. A run that does not go on from the checkpoints of
/// a folder cannot save there: [`CheckpointFolder::begin`] refuses the folder at once, the first save otherwise.
///
/// [`CheckpointFolder::save_async`] returns at once: the tensors' memory is shared, not copied, and the next step that
/// updates a parameter in place writes to new memory instead. Until the files are written, the saved tensors therefore
/// take their memory twice. On a CUDA device the shards are first copied to the CPU's memory.
///
/// ```
/// use isoshard::{checkpoint::{CheckpointFolder, StateTree}, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// let root = std::env::temp_dir().join(format!("isoshard-folder-{}", std::process::id()));
/// # let also = root.clone();
/// spmd(2, move |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let mut folder = CheckpointFolder::new(&root).keep(2);
///     for step in [10, 20, 30] {
///         let mut state = StateTree::new();
///         state.insert("x", DTensor::full(&mesh, DType::F32, [4], "(S0)", step as f64)?)?;
///         folder.save_async(&mesh, step, &state)?;
///         // Training goes on here.
///     }
///     folder.wait(&mesh)?;
///     assert_eq!(folder.steps()?, [20, 30]);
///     let (step, newest) = folder.newest(&mesh)?.expect("there are two");
///     assert_eq!((step, newest.tensor(&mesh, "x", "(R)")?.local().to_vec::<f32>()?), (30, vec![30.0; 4]));
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(also).unwrap();
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Debug)]
pub struct CheckpointFolder {
    pub(in crate::checkpoint) root: PathBuf,
    keep: Option<usize>,
    patience: Duration,
    while_saving: WhileSaving,
    replaces: bool,
    pub(in crate::checkpoint) run: Run,
    writing: Option<BackgroundSave>,
}

impl CheckpointFolder {
    /// Names a folder, which the first save makes. It keeps all checkpoints, and waits at most 30 minutes for a slow rank.
    ///
    /// A program that may go on from checkpoints calls [`CheckpointFolder::newest`] next. One that does not should use
    /// [`CheckpointFolder::begin`] instead, because the first save refuses a folder with checkpoints of another run.
    ///
    /// ```
    /// use isoshard::checkpoint::CheckpointFolder;
    /// assert!(CheckpointFolder::new("no/such/folder").steps()?.is_empty());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn new(root: impl AsRef<Path>) -> CheckpointFolder {
        CheckpointFolder {
            root: root.as_ref().to_path_buf(),
            keep: None,
            patience: PATIENCE,
            while_saving: WhileSaving::default(),
            replaces: false,
            run: Run::New(None),
            writing: None,
        }
    }

    /// Names a folder for a new run, as [`CheckpointFolder::new`] does, and refuses one that has checkpoints, before the
    /// run has cost anything. Communicates some bytes per rank.
    ///
    /// ```
    /// use isoshard::{checkpoint::{CheckpointFolder, StateTree}, comm::spmd, dtensor::DeviceMesh};
    /// let root = std::env::temp_dir().join(format!("isoshard-begin-{}", std::process::id()));
    /// # let also = root.clone();
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     CheckpointFolder::begin(&mesh, &root)?.save(&mesh, 7, &StateTree::new())?;
    ///     let refused = CheckpointFolder::begin(&mesh, &root).unwrap_err().to_string();
    ///     assert!(refused.contains("the folder has checkpoints of another run"), "{refused}");
    ///     let mut folder = CheckpointFolder::new(&root);
    ///     assert_eq!(folder.newest(&mesh)?.expect("saved").0, 7); // goes on as the same run
    ///     folder.save(&mesh, 8, &StateTree::new())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a folder that has checkpoints, on every rank.
    pub fn begin(mesh: &DeviceMesh, root: impl AsRef<Path>) -> Result<CheckpointFolder> {
        let folder = CheckpointFolder::new(root);
        // The first rank's view counts: another rank may see a folder later.
        let unused = match is_first(mesh) {
            true => refuse_others(&folder.root, None),
            false => Ok(()),
        };
        mesh.agree(VERB, unused.map(|()| Vec::new()))?;
        Ok(folder)
    }

    /// Removes older checkpoints of the run after each save, so that its last `n` remain; at least the one just saved.
    ///
    /// ```
    /// use isoshard::{checkpoint::{CheckpointFolder, StateTree}, comm::spmd, dtensor::DeviceMesh};
    /// let root = std::env::temp_dir().join(format!("isoshard-keep-{}", std::process::id()));
    /// # let also = root.clone();
    /// spmd(1, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut folder = CheckpointFolder::new(&root).keep(1);
    ///     folder.save(&mesh, 1, &StateTree::new())?;
    ///     folder.save(&mesh, 2, &StateTree::new())?;
    ///     assert_eq!(folder.steps()?, [2]);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn keep(mut self, n: usize) -> CheckpointFolder {
        self.keep = Some(n.max(1));
        self
    }

    /// Sets the longest time that a save waits for a rank's part after the first rank's own is written. The error then
    /// names the ranks that are missing.
    ///
    /// ```
    /// use isoshard::checkpoint::CheckpointFolder;
    /// use std::time::Duration;
    /// let folder = CheckpointFolder::new("checkpoints").patience(Duration::from_secs(3600));
    /// assert!(format!("{folder:?}").contains("patience: 3600s"));
    /// ```
    pub fn patience(mut self, patience: Duration) -> CheckpointFolder {
        self.patience = patience;
        self
    }

    /// Lets a save of a step that exists take its place. Otherwise it is refused. Until the new checkpoint is whole, the
    /// old one stays.
    ///
    /// ```
    /// use isoshard::{checkpoint::{CheckpointFolder, StateTree}, comm::spmd, dtensor::DeviceMesh};
    /// let root = std::env::temp_dir().join(format!("isoshard-replace-{}", std::process::id()));
    /// # let also = root.clone();
    /// spmd(1, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut folder = CheckpointFolder::new(&root).replace_steps();
    ///     for loss in [2.5, 2.25] {
    ///         let mut state = StateTree::new();
    ///         state.insert_value("loss", loss)?;
    ///         folder.save(&mesh, 7, &state)?;
    ///     }
    ///     let (_, saved) = folder.newest(&mesh)?.expect("saved");
    ///     assert_eq!(saved.value("loss").expect("saved"), 2.25);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn replace_steps(mut self) -> CheckpointFolder {
        self.replaces = true;
        self
    }

    /// Saves from now on as the run that saved `checkpoint`: for a program that goes on from another checkpoint than the
    /// newest, or saves to another folder than before. A checkpoint of an earlier version, or one of
    /// [`save`](crate::checkpoint::save()), has no identity; all of these count as one run.
    ///
    /// ```
    /// use isoshard::{checkpoint::{Checkpoint, CheckpointFolder, StateTree}, comm::spmd, dtensor::DeviceMesh};
    /// let root = std::env::temp_dir().join(format!("isoshard-continue-{}", std::process::id()));
    /// # let also = root.clone();
    /// spmd(1, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut folder = CheckpointFolder::new(&root);
    ///     folder.save(&mesh, 7, &StateTree::new())?;
    ///     folder.save(&mesh, 8, &StateTree::new())?;
    ///     let mut folder = CheckpointFolder::new(&root).replace_steps();
    ///     folder.continue_run(&Checkpoint::open(folder.dir_of(7))?);
    ///     folder.save(&mesh, 8, &StateTree::new()) // step 8 once more
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn continue_run(&mut self, checkpoint: &Checkpoint) {
        self.run = Run::Of(checkpoint.run());
    }

    /// Chooses the answer to a save that is asked for while another one is being written.
    ///
    /// ```
    /// use isoshard::checkpoint::{CheckpointFolder, WhileSaving};
    /// let folder = CheckpointFolder::new("checkpoints").while_saving(WhileSaving::Refuse);
    /// assert!(format!("{folder:?}").contains("while_saving: Refuse"));
    /// ```
    pub fn while_saving(mut self, answer: WhileSaving) -> CheckpointFolder {
        self.while_saving = answer;
        self
    }

    /// Saves the state of a step and waits until the checkpoint is whole ([`save`](crate::checkpoint::save())).
    ///
    /// ```
    /// use isoshard::{checkpoint::{CheckpointFolder, StateTree}, comm::spmd, dtensor::DeviceMesh};
    /// let root = std::env::temp_dir().join(format!("isoshard-sync-{}", std::process::id()));
    /// # let also = root.clone();
    /// spmd(1, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut folder = CheckpointFolder::new(&root);
    ///     folder.save(&mesh, 7, &StateTree::new())?;
    ///     let refused = folder.save(&mesh, 7, &StateTree::new()).unwrap_err().to_string();
    ///     assert!(refused.contains("a checkpoint is saved to a new folder"), "{refused}");
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`save`](crate::checkpoint::save()), and those of an earlier [`CheckpointFolder::save_async`]. Refuses a
    /// folder with checkpoints of another run.
    pub fn save(&mut self, mesh: &DeviceMesh, step: u64, state: &StateTree) -> Result<()> {
        self.admit(mesh)?;
        let mut job = self.start(mesh, step, state)?;
        write(mesh, &mut job)?;
        let busy = mesh.rank().busy(BUSY);
        let done = self.removal(step).commit(&mut job, &SaveNews::of_written());
        drop(busy);
        let all = mesh.agree(VERB, done.map(|()| Vec::new()));
        self.has_saved(&all);
        all.map(drop)
    }

    /// Starts to save the state of a step, and returns when each rank has begun. The checkpoint becomes visible when all
    /// ranks have written; a failure is the result of the next call of this folder, on every rank.
    ///
    /// Dropping the folder waits for the rank's own files, and for a few seconds for those of other ranks.
    ///
    /// ```
    /// use isoshard::{checkpoint::{CheckpointFolder, StateTree}, comm::spmd, dtensor::DeviceMesh};
    /// let root = std::env::temp_dir().join(format!("isoshard-async-{}", std::process::id()));
    /// # let also = root.clone();
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let mut folder = CheckpointFolder::new(&root);
    ///     folder.save_async(&mesh, 7, &StateTree::new())?;
    ///     folder.wait(&mesh)?;
    ///     assert_eq!(folder.steps()?, [7]);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the error of an earlier save. Refuses a step that is saved already, a folder with checkpoints of another
    /// run, and, if [`WhileSaving::Refuse`] is chosen, a save while another is being written.
    pub fn save_async(&mut self, mesh: &DeviceMesh, step: u64, state: &StateTree) -> Result<()> {
        self.admit(mesh)?;
        let job = self.start(mesh, step, state)?;
        let begun =
            BackgroundSave::begin(job, self.removal(step)).map_err(|e| Error::io(VERB, &self.root, e));
        let all = mesh.agree(VERB, begun.map(|save| self.writing = Some(save)).map(|()| Vec::new()));
        if all.is_err() {
            let _ = self.writing.take().map(BackgroundSave::give_up);
        }
        all.map(drop)
    }

    /// Waits until the save that [`CheckpointFolder::save_async`] started has ended. Communicates some bytes per rank.
    ///
    /// ```
    /// use isoshard::{checkpoint::CheckpointFolder, comm::spmd, dtensor::DeviceMesh};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     CheckpointFolder::new("checkpoints").wait(&mesh) // there is no save to wait for
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the save's error, on every rank.
    pub fn wait(&mut self, mesh: &DeviceMesh) -> Result<()> {
        let Some(save) = self.writing.take() else { return mesh.agree(VERB, Ok(Vec::new())).map(drop) };
        let busy = mesh.rank().busy(BUSY);
        let written = save.written();
        drop(busy);
        // No rank waits for the report of one that has failed.
        let all = mesh.agree(VERB, written.map(|()| Vec::new()));
        if all.is_err() {
            let _ = save.give_up();
            return all.map(drop);
        }
        save.all_wrote();
        let busy = mesh.rank().busy(BUSY);
        let committed = save.join();
        drop(busy);
        let all = mesh.agree(VERB, committed.map(|()| Vec::new()));
        self.has_saved(&all);
        all.map(drop)
    }

    /// Returns the steps of the checkpoints that are there, ascending. Communicates nothing.
    ///
    /// ```
    /// use isoshard::checkpoint::CheckpointFolder;
    /// let root = std::env::temp_dir().join(format!("isoshard-steps-{}", std::process::id()));
    /// std::fs::create_dir_all(root.join("step-000000000012")).unwrap();
    /// assert!(CheckpointFolder::new(&root).steps()?.is_empty()); // a folder without an index is no checkpoint
    /// # std::fs::remove_dir_all(root).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        steps_in(&self.root)
    }

    /// Returns the folder of a step's checkpoint.
    ///
    /// ```
    /// use isoshard::checkpoint::CheckpointFolder;
    /// let dir = CheckpointFolder::new("runs/a").dir_of(12);
    /// assert_eq!(dir, std::path::Path::new("runs/a/step-000000000012"));
    /// ```
    pub fn dir_of(&self, step: u64) -> PathBuf {
        self.root.join(step_name(step))
    }

    /// Waits for an earlier save, or refuses another one, and returns the earlier one's error on every rank.
    fn admit(&mut self, mesh: &DeviceMesh) -> Result<()> {
        if self.while_saving == WhileSaving::Refuse {
            let unfinished = self.writing.as_ref().is_some_and(|save| !save.is_finished());
            let all = mesh.agree(VERB, Ok(vec![i64::from(unfinished)]))?;
            if all.iter().any(|words| words[0] == 1) {
                let given = format!(
                    "{} of {} ranks are writing",
                    all.iter().filter(|w| w[0] == 1).count(),
                    all.len()
                );
                return Err(Error::invalid(VERB, "another save is being written", given, "call wait first"));
            }
        }
        self.wait(mesh)
    }

    /// Starts a save of this run, which has its identity then.
    fn start(&mut self, mesh: &DeviceMesh, step: u64, state: &StateTree) -> Result<SaveJob> {
        let (patience, run, replaces) = (self.patience, self.run, self.replaces);
        let order = SaveOrder { patience, run, replaces, family: Some(STEP) };
        let job = start(mesh, &self.dir_of(step), state, &order)?;
        if let Run::New(id) = &mut self.run {
            *id = job.run;
        }
        Ok(job)
    }

    /// Remembers after a save that the run has checkpoints here, so that it need not be alone in the folder any more.
    fn has_saved<T>(&mut self, saved: &Result<T>) {
        if saved.is_ok() {
            self.run = Run::Of(self.run.id());
        }
    }

    fn removal(&self, step: u64) -> Removal {
        Removal { root: self.root.clone(), keep: self.keep, step, run: self.run.id() }
    }
}

/// Waits for this rank's files, and for a few seconds for the other ranks', so that a program which ends does not lose a
/// save that has begun.
impl Drop for CheckpointFolder {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.writing.take().map(BackgroundSave::give_up) {
            eprintln!("isoshard: a checkpoint was not saved: {error}");
        }
    }
}

/// Returns whether this rank is the first of the mesh, which makes and removes folders.
pub(in crate::checkpoint) fn is_first(mesh: &DeviceMesh) -> bool {
    mesh.mesh().ranks().next() == Some(mesh.mesh().rank())
}
