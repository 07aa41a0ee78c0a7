//! The runs whose checkpoints are in a folder.

use std::io::Read;
use std::path::Path;

use super::index::INDEX;
use super::run_id::{Run, RunId};
use super::steps::{folders_in, step_name, steps_in};
use crate::error::{Error, Result};
use crate::tensor::open_regular;

/// The bytes at the start of an index among which the run's identity is; the files' list follows it.
const HEAD_BYTES: u64 = 4096;

/// Returns the run of a step's checkpoint, by the start of its index: indexes may be long, and folders may have many.
///
/// # Errors
/// Refuses an index that does not begin as one.
fn run_of(root: &Path, step: u64) -> Result<Option<RunId>> {
    let path = root.join(step_name(step)).join(INDEX);
    let mut head = Vec::new();
    let read = open_regular(&path).and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head));
    read.map_err(|e| Error::io("checkpoint", &path, e))?;
    let head = String::from_utf8_lossy(&head);
    if !head.starts_with("{\"format\":\"") {
        let rule = "the index is not one that this version writes";
        return Err(Error::invalid("checkpoint", rule, path.display().to_string(), "remove this checkpoint"));
    }
    let before_files = head.split("\"files\":").next().unwrap_or_default();
    Ok(before_files.split("\"run\":\"").nth(1).and_then(|rest| RunId::parse(rest.get(..16)?)))
}

/// Returns the steps of one run, ascending, without those whose index is damaged.
pub(in crate::checkpoint) fn steps_of(root: &Path, run: Option<RunId>) -> Result<Vec<u64>> {
    let is_own = |step: &u64| run_of(root, *step).is_ok_and(|of| of == run);
    Ok(steps_in(root)?.into_iter().filter(is_own).collect())
}

/// Refuses a folder that has checkpoints of other runs than `own`; `None` is a run that has not saved.
pub(in crate::checkpoint) fn refuse_others(root: &Path, own: Option<RunId>) -> Result<()> {
    for step in steps_in(root)?.into_iter().rev() {
        if own.is_none() || !run_of(root, step).is_ok_and(|of| of == own) {
            let given = root.join(step_name(step)).display().to_string();
            let rule = "the folder has checkpoints of another run";
            let remedy = "go on from the newest, or name another folder";
            return Err(Error::invalid("save", rule, given, remedy));
        }
    }
    Ok(())
}

/// A step's folder, and the run to which it belongs.
pub(in crate::checkpoint) type OwnedStep = (u64, Option<RunId>);

/// Returns the newest step of `run`, of those below a step, or `None` if there is none. A new run takes over the only run of
/// the folder. A step whose index is lost or does not begin as one may be any run's: it counts as the run's own, so that
/// its damage is told.
///
/// # Errors
/// Refuses a folder with several runs if it is not known which one goes on.
pub(in crate::checkpoint) fn newest_of(
    root: &Path,
    run: Run,
    below: Option<u64>,
) -> Result<Option<OwnedStep>> {
    let mut steps = folders_in(root)?;
    steps.reverse();
    let own = match run {
        Run::Of(id) | Run::New(id @ Some(_)) => id,
        Run::New(None) => only_run(root, &steps)?,
    };
    let may_be_own = |step: &u64| {
        below.is_none_or(|below| *step < below) && run_of(root, *step).map_or(true, |of| of == own)
    };
    Ok(steps.into_iter().find(may_be_own).map(|step| (step, own)))
}

/// Returns the run of all steps, those without a readable index aside.
fn only_run(root: &Path, steps: &[u64]) -> Result<Option<RunId>> {
    let mut newest: Vec<OwnedStep> = Vec::new();
    for &step in steps {
        let Ok(id) = run_of(root, step) else { continue };
        if newest.iter().all(|(_, other)| *other != id) {
            newest.push((step, id));
        }
    }
    if let [] | [_] = newest[..] {
        return Ok(newest.first().and_then(|(_, id)| *id));
    }
    let one = |(step, id): &OwnedStep| match id {
        Some(id) => format!("{} of run {id}", step_name(*step)),
        None => format!("{} of a run without identity", step_name(*step)),
    };
    let list: Vec<String> = newest.iter().take(4).map(one).collect();
    let given = format!("{} in {}", list.join(", "), root.display());
    let remedy = "open the one to go on from, and pass it to continue_run";
    Err(Error::invalid("checkpoint", "the folder has checkpoints of several runs", given, remedy))
}
