//! The removal of older checkpoints.

use std::fs;
use std::path::PathBuf;
use std::time::SystemTime;

use crate::checkpoint::format::run_id::RunId;
use crate::checkpoint::format::runs::steps_of;
use crate::checkpoint::format::steps::{STEP, step_name};
use crate::checkpoint::saving::save_job::{SaveJob, SaveNews};
use crate::error::{Error, Result};
use crate::files::{REMOVED, draw_number, remove_remains};

/// The removal of a run's older checkpoints after a save.
pub(in crate::checkpoint) struct Removal {
    pub root: PathBuf,
    pub keep: Option<usize>,
    pub step: u64,
    pub run: Option<RunId>,
}

impl Removal {
    /// On the first rank, makes the checkpoint visible, then removes those before the kept ones.
    pub fn commit(self, job: &mut SaveJob, news: &SaveNews) -> Result<()> {
        let first = job.commit.is_some();
        job.commit(news)?;
        if !first {
            return Ok(());
        }
        self.remove().map_err(|e| {
            let rule = format!("step {} is saved, but older files cannot be removed", self.step);
            Error::invalid("keep", rule, e.to_string(), "remove them, or give the permission")
        })
    }

    fn remove(&self) -> Result<()> {
        let failed = |e: std::io::Error| Error::io("keep", &self.root, e);
        // The checkpoint that was just made has the file system's time.
        let saved = fs::metadata(self.root.join(step_name(self.step))).and_then(|data| data.modified());
        let now = saved.unwrap_or(SystemTime::UNIX_EPOCH);
        remove_remains(&self.root, &|name| name.starts_with(STEP), now).map_err(failed)?;
        let Some(keep) = self.keep else { return Ok(()) };
        let older = steps_of(&self.root, self.run)?.into_iter().filter(|&step| step < self.step);
        let older: Vec<u64> = older.collect();
        let remove = (older.len() + 1).saturating_sub(keep);
        for step in &older[..remove.min(older.len())] {
            let dir = self.root.join(step_name(*step));
            // Renamed first: a checkpoint that is half removed is not taken for one.
            let number = draw_number().map_err(failed)?;
            let removed = self.root.join(format!(".{}.{number:016x}.{REMOVED}", step_name(*step)));
            fs::rename(&dir, &removed)
                .and_then(|()| fs::remove_dir_all(&removed))
                .map_err(|e| Error::io("keep", &dir, e))?;
        }
        Ok(())
    }
}
