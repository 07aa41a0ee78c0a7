//! Checkpoints of a run, and going on from one on any mesh.

use isoshard::checkpoint::{Checkpoint, CheckpointFolder, StateTree};
use isoshard::dtensor::DeviceMesh;
use isoshard::nn::Params;
use isoshard::optim::{AdamW, UpdateRule};
use isoshard::rng::Generator;
use isoshard::{Error, Result};
use serde_json::Value;

use crate::args::Args;

/// The folder of a run's checkpoints.
pub struct Saves {
    folder: CheckpointFolder,
    every: usize,
    steps: usize,
}

/// The values that a checkpoint holds; batches follow from the number of steps.
pub struct TrainerState<'a> {
    pub params: &'a mut Params,
    pub optimizer: &'a mut AdamW,
    pub dropout: &'a mut Generator,
    /// The settings that decide which batches a run sees.
    pub settings: &'a str,
}

impl Saves {
    /// Returns the folder of `--save`, or `None` without one.
    ///
    /// # Errors
    /// Refuses a folder with checkpoints of an earlier run, unless the run goes on from them.
    pub fn of(args: &Args, mesh: &DeviceMesh) -> Result<Option<Saves>> {
        let Some(root) = &args.save else { return Ok(None) };
        let folder = match args.resume {
            true => CheckpointFolder::new(root),
            false => CheckpointFolder::begin(mesh, root)?,
        };
        let folder = match args.keep {
            Some(n) => folder.keep(n),
            None => folder,
        };
        Ok(Some(Saves { folder, every: args.save_every, steps: args.steps }))
    }

    /// Refuses a folder with checkpoints of an earlier run, unless the run goes on from them: before any rank is started.
    pub fn refuse_others(args: &Args) -> Result<()> {
        let Some(root) = args.save.as_ref().filter(|_| !args.resume) else { return Ok(()) };
        let folder = CheckpointFolder::new(root);
        let Some(step) = folder.steps()?.pop() else { return Ok(()) };
        let given = folder.dir_of(step).display().to_string();
        let rule = "the folder has checkpoints of an earlier run";
        Err(Error::invalid("save", rule, given, "add --resume, or name another folder"))
    }

    /// Loads the newest checkpoint, and returns the number of its steps; 0 if there is none.
    ///
    /// # Errors
    /// Refuses a checkpoint that is damaged, of another model, or of a run with other batches or more steps.
    pub fn resume(&mut self, mesh: &DeviceMesh, state: TrainerState) -> Result<usize> {
        let Some((step, saved)) = self.folder.newest(mesh)? else { return Ok(0) };
        let settings = text(&saved, "settings")?;
        if settings != state.settings {
            let rule = "the checkpoint is one of a run with other settings";
            let given = format!("{:?} for {settings:?}", state.settings);
            return Err(Error::invalid("resume", rule, given, "give the options of that run"));
        }
        if step as usize > self.steps {
            let given = format!("step {step} of {}", self.steps);
            return Err(Error::invalid("resume", "the checkpoint has more steps", given, "raise --steps"));
        }
        let dropout = text(&saved, "dropout")?.parse()?;
        state.params.load_state(&saved.subtree("model"))?;
        state.optimizer.load_state(state.params, &saved.subtree("optimizer"))?;
        state.dropout.restore(dropout);
        Ok(step as usize)
    }

    /// Starts to save the state after `step` steps, if one is due; training goes on meanwhile.
    pub fn save(&mut self, mesh: &DeviceMesh, step: usize, state: TrainerState) -> Result<()> {
        if !step.is_multiple_of(self.every) && step != self.steps {
            return Ok(());
        }
        let mut tree = StateTree::new();
        tree.insert_tree("model", state.params.state()?)?;
        tree.insert_tree("optimizer", state.optimizer.state(state.params)?)?;
        tree.insert_value("dropout", state.dropout.state().to_string())?;
        tree.insert_value("settings", state.settings)?;
        self.folder.save_async(mesh, step as u64, &tree)
    }

    /// Waits for the last save.
    pub fn finish(&mut self, mesh: &DeviceMesh) -> Result<()> {
        self.folder.wait(mesh)
    }
}

/// Returns a saved value, which is text.
fn text<'a>(saved: &'a Checkpoint, name: &str) -> Result<&'a str> {
    saved.value(name).and_then(Value::as_str).ok_or_else(|| {
        let given = saved.dir().display().to_string();
        Error::invalid("resume", format!("the checkpoint has no {name}"), given, "")
    })
}
