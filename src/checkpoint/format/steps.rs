//! The names of the checkpoints in a folder.

use std::fs;
use std::path::Path;

use super::index::INDEX;
use crate::error::{Error, Result};

/// The start of the names of checkpoints.
pub(in crate::checkpoint) const STEP: &str = "step-";

pub(in crate::checkpoint) fn step_name(step: u64) -> String {
    format!("{STEP}{step:012}")
}

/// Returns the steps of the checkpoints in a folder, ascending.
pub(in crate::checkpoint) fn steps_in(root: &Path) -> Result<Vec<u64>> {
    let mut steps = folders_in(root)?;
    steps.retain(|&step| root.join(step_name(step)).join(INDEX).exists());
    Ok(steps)
}

/// Returns the steps that have a folder, ascending. A save makes none without an index: such a one has lost it.
pub(in crate::checkpoint) fn folders_in(root: &Path) -> Result<Vec<u64>> {
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io("checkpoint", root, e)),
    };
    let mut steps = Vec::new();
    for entry in entries {
        let name = entry.map_err(|e| Error::io("checkpoint", root, e))?.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(STEP));
        let step = digits.and_then(|digits| digits.parse::<u64>().ok());
        // Folders of other forms are not checkpoints.
        let is_one = |step: &u64| name.to_str() == Some(&step_name(*step)) && root.join(&name).is_dir();
        steps.extend(step.filter(is_one));
    }
    steps.sort_unstable();
    Ok(steps)
}
