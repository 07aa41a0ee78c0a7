//! A folder of numbered checkpoints: saves that do not stop the program, the newest one, and the last ones kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::index::INDEX;
use super::save::{BUSY, PATIENCE, start, write};
use super::save_job::{SaveJob, UNFINISHED};
use super::state_tree::StateTree;
use crate::dtensor::DeviceMesh;
use crate::error::{Error, Result};

const VERB: &str = "save";
/// The end of the name of a checkpoint that is being removed.
const REMOVED: &str = ".removed";

/// The answer to a save that is asked for while another one is being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhileSaving {
    /// Waits until the other one is written.
    #[default]
    Wait,
    /// Refuses the new one; the other one goes on.
    Refuse,
}

/// A folder of checkpoints with the names `step-000000000012`, to which one program saves at a time.
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
///         state.insert("x", DTensor::full(&mesh, DType::F32, [4], step as f64, "(S0)".parse()?)?)?;
///         folder.save_async(&mesh, step, &state)?;
///         // Training goes on here.
///     }
///     folder.wait(&mesh)?;
///     assert_eq!(folder.steps()?, [20, 30]);
///     let (step, newest) = folder.newest(&mesh)?.expect("there are two");
///     assert_eq!((step, newest.tensor(&mesh, "x", "(R)".parse()?)?.local().to_vec::<f32>()?), (30, vec![30.0; 4]));
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(also).unwrap();
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Debug)]
pub struct CheckpointFolder {
    pub(super) root: PathBuf,
    keep: Option<usize>,
    patience: Duration,
    while_saving: WhileSaving,
    writing: Option<BackgroundSave>,
}

/// A save that a thread of this rank writes.
#[derive(Debug)]
struct BackgroundSave {
    thread: JoinHandle<Result<()>>,
    /// Receives the outcome of this rank's own part.
    written: Receiver<Result<()>>,
    /// Tells the thread that other ranks will not report any more, or that the program ends.
    given_up: Arc<AtomicBool>,
    /// On the first rank, the folder in which the save is written.
    aside: Option<PathBuf>,
}

impl CheckpointFolder {
    /// Names a folder, which the first save makes. It keeps all checkpoints, and waits at most 30 minutes for a slow rank.
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
            writing: None,
        }
    }

    /// Removes older checkpoints after each save, so that the last `n` remain; at least the one just saved.
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

    /// Saves the state of a step and waits until the checkpoint is whole ([`save`](super::save())).
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
    /// Returns the errors of [`save`](super::save()), and those of an earlier [`CheckpointFolder::save_async`].
    pub fn save(&mut self, mesh: &DeviceMesh, step: u64, state: &StateTree) -> Result<()> {
        self.admit(mesh)?;
        let mut job = start(mesh, &self.dir_of(step), state, self.patience)?;
        write(mesh, &mut job)?;
        let busy = mesh.rank().busy(BUSY);
        let done = self.removal(step).commit(job, &AtomicBool::new(false));
        drop(busy);
        mesh.agree(VERB, done.map(|()| Vec::new())).map(drop)
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
    /// Returns the error of an earlier save. Refuses a step that is saved already, and, if
    /// [`WhileSaving::Refuse`] is chosen, a save while another is being written.
    pub fn save_async(&mut self, mesh: &DeviceMesh, step: u64, state: &StateTree) -> Result<()> {
        self.admit(mesh)?;
        let job = start(mesh, &self.dir_of(step), state, self.patience)?;
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
        let written =
            save.written.recv().unwrap_or_else(|_| Err(Error::other("the thread that writes ended")));
        drop(busy);
        // No rank waits for the report of one that has failed.
        let all = mesh.agree(VERB, written.map(|()| Vec::new()));
        if all.is_err() {
            let _ = save.give_up();
            return all.map(drop);
        }
        let busy = mesh.rank().busy(BUSY);
        let committed = save.join();
        drop(busy);
        mesh.agree(VERB, committed.map(|()| Vec::new())).map(drop)
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
            let unfinished = self.writing.as_ref().is_some_and(|save| !save.thread.is_finished());
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

    fn removal(&self, step: u64) -> Removal {
        Removal { root: self.root.clone(), keep: self.keep, step }
    }
}

impl BackgroundSave {
    fn begin(mut job: SaveJob, removal: Removal) -> std::io::Result<BackgroundSave> {
        let (send, written) = mpsc::channel();
        let given_up = Arc::new(AtomicBool::new(false));
        let flag = given_up.clone();
        let aside = job.commit.is_some().then(|| job.aside.clone());
        let thread = thread::Builder::new().name("isoshard-save".into()).spawn(move || {
            let own = job.write();
            // A program that ends does not receive this; the thread's result tells the same.
            let _ = send.send(own.clone());
            own.and_then(|()| removal.commit(job, &flag))
        })?;
        Ok(BackgroundSave { thread, written, given_up, aside })
    }

    /// Waits until the save has ended on this rank.
    fn join(self) -> Result<()> {
        self.thread
            .join()
            .unwrap_or_else(|_| Err(Error::other("the thread that writes a checkpoint panicked")))
    }

    /// Waits until this rank's files are written, and for other ranks' reports for a short while. Removes what a save that
    /// fails has written.
    fn give_up(self) -> Result<()> {
        self.given_up.store(true, Ordering::Relaxed);
        let aside = self.aside.clone();
        let outcome = self.join();
        if let (Some(aside), Err(_)) = (aside, &outcome) {
            let _ = fs::remove_dir_all(aside);
        }
        outcome
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

/// The removal of older checkpoints after a save.
struct Removal {
    root: PathBuf,
    keep: Option<usize>,
    step: u64,
}

impl Removal {
    /// On the first rank, makes the checkpoint visible, then removes those before the kept ones.
    fn commit(self, job: SaveJob, given_up: &AtomicBool) -> Result<()> {
        let first = job.commit.is_some();
        job.commit(given_up)?;
        if !first {
            return Ok(());
        }
        self.remove().map_err(|e| {
            let rule = format!("step {} is saved, but older files cannot be removed", self.step);
            Error::invalid("keep", rule, e.to_string(), "remove them, or give the permission")
        })
    }

    fn remove(&self) -> Result<()> {
        self.remove_left()?;
        let Some(keep) = self.keep else { return Ok(()) };
        let older: Vec<u64> = steps_in(&self.root)?.into_iter().filter(|&step| step < self.step).collect();
        let remove = (older.len() + 1).saturating_sub(keep);
        for step in &older[..remove.min(older.len())] {
            let dir = self.root.join(step_name(*step));
            // Renamed first: a checkpoint that is half removed is not taken for one.
            let removed = self.root.join(format!(".{}{REMOVED}", step_name(*step)));
            fs::rename(&dir, &removed)
                .and_then(|()| fs::remove_dir_all(&removed))
                .map_err(|e| Error::io("keep", &dir, e))?;
        }
        Ok(())
    }

    /// Removes what a program that was killed has left: saves that did not end, and removals.
    fn remove_left(&self) -> Result<()> {
        let failed = |e: std::io::Error| Error::io("keep", &self.root, e);
        for entry in fs::read_dir(&self.root).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(".step-") && (name.ends_with(UNFINISHED) || name.ends_with(REMOVED)) {
                fs::remove_dir_all(entry.path()).map_err(failed)?;
            }
        }
        Ok(())
    }
}

fn step_name(step: u64) -> String {
    format!("step-{step:012}")
}

fn steps_in(root: &Path) -> Result<Vec<u64>> {
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io("checkpoint", root, e)),
    };
    let mut steps = Vec::new();
    for entry in entries {
        let name = entry.map_err(|e| Error::io("checkpoint", root, e))?.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix("step-"));
        let step = digits.and_then(|digits| digits.parse::<u64>().ok());
        // Folders of other forms and without an index are not checkpoints.
        let is_one =
            |step: &u64| name.to_str() == Some(&step_name(*step)) && root.join(&name).join(INDEX).exists();
        steps.extend(step.filter(is_one));
    }
    steps.sort_unstable();
    Ok(steps)
}
