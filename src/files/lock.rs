//! The lock beside an unfinished file or folder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::owner::Owner;

/// The age of a lock of another host after which its process counts as dead: ten minutes.
const DEAD_AFTER: Duration = Duration::from_secs(600);
/// The time between two touches of a lock, so that many may fail before others count the process as dead.
const BEAT: Duration = Duration::from_secs(20);
/// A lock has fewer bytes.
const LOCK_BYTES: u64 = 4096;

/// The content of a lock.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LockText {
    pub owner: Owner,
    /// The last touch in seconds since 1970, by the host's clock; for people. Others compare the file's time.
    pub touched: u64,
}

/// A lock that this process holds until it is dropped.
#[derive(Debug)]
pub(super) struct Lock {
    path: PathBuf,
    /// Ends the thread that touches the lock when it is dropped.
    _beats: Option<Sender<()>>,
}

impl Lock {
    /// Makes a lock, which must be new. Until [`Lock::sign`] it is empty, so that it fits on a full disk.
    pub fn make(path: PathBuf) -> io::Result<Lock> {
        OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok(Lock { path, _beats: None })
    }

    /// Returns the time of the file system's clock at which the lock was made.
    pub fn time(&self) -> Option<SystemTime> {
        time_of(&self.path)
    }

    /// Writes this process into the lock. If `beats`, a thread touches the lock from time to time.
    ///
    /// # Errors
    /// Returns an error if the lock cannot be written, or the system refuses the thread.
    pub fn sign(&mut self, beats: bool) -> io::Result<()> {
        let owner = Owner::this();
        touch(&self.path, &owner)?;
        if !beats {
            return Ok(());
        }
        let (stop, stopped) = mpsc::channel::<()>();
        let path = self.path.clone();
        thread::Builder::new().name("isoshard-lock".into()).spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(BEAT) {
                // A touch that fails once is not the end: the next one may succeed.
                let _ = touch(&path, &owner);
            }
        })?;
        self._beats = Some(stop);
        Ok(())
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Writes the lock anew, which sets its time by the file system's clock. A lock that was removed stays so.
pub(super) fn touch(path: &Path, owner: &Owner) -> io::Result<()> {
    let touched = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let text = serde_json::to_vec(&LockText { owner: owner.clone(), touched })?;
    // One write of as many bytes as before, so that a reader sees a whole lock.
    OpenOptions::new().write(true).open(path)?.write_all(&text)
}

/// Returns whether the process that made a lock lives, as far as it can be told; `now` is the file system's time.
pub(super) fn is_alive(path: &Path, now: SystemTime) -> bool {
    let owner = || -> Option<LockText> {
        let mut text = Vec::new();
        File::open(path).ok()?.take(LOCK_BYTES).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    };
    owner().and_then(|text| text.owner.is_alive()).unwrap_or_else(|| is_fresh(path, now))
}

/// Returns whether a file, or a folder or a file in it, was written during the last [`DEAD_AFTER`].
pub(super) fn is_fresh(path: &Path, now: SystemTime) -> bool {
    let entries = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let newest = entries.filter_map(|path| time_of(&path)).chain(time_of(path)).max();
    // A time in the future is that of a clock which goes wrong, not one of a dead process.
    newest.is_some_and(|time| now.duration_since(time).map_or(true, |age| age < DEAD_AFTER))
}

fn time_of(path: &Path) -> Option<SystemTime> {
    fs::symlink_metadata(path).and_then(|data| data.modified()).ok()
}
