//! A save that a thread of this rank writes while the program goes on.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};

use super::removal::Removal;
use crate::checkpoint::saving::save_job::{SaveJob, SaveNews};
use crate::error::{Error, Result};

/// A save that a thread of this rank writes.
#[derive(Debug)]
pub(in crate::checkpoint) struct BackgroundSave {
    /// Returns the job, because a save that failed keeps its files until no rank writes any more.
    thread: JoinHandle<(SaveJob, Result<()>)>,
    /// Receives the outcome of this rank's own part.
    written: Receiver<Result<()>>,
    /// Tells the thread what the program knows of the other ranks.
    news: Arc<SaveNews>,
}

impl BackgroundSave {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns an error if the system refuses it.
    pub fn begin(mut job: SaveJob, removal: Removal) -> std::io::Result<BackgroundSave> {
        let (send, written) = mpsc::channel();
        let news = Arc::new(SaveNews::default());
        let told = news.clone();
        let thread = thread::Builder::new().name("isoshard-save".into()).spawn(move || {
            let own = job.write();
            // A program that ends does not receive this; the thread's result tells the same.
            let _ = send.send(own.clone());
            let outcome = own.and_then(|()| removal.commit(&mut job, &told));
            (job, outcome)
        })?;
        Ok(BackgroundSave { thread, written, news })
    }

    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until this rank's files are written.
    pub fn written(&self) -> Result<()> {
        self.written.recv().unwrap_or_else(|_| Err(Error::other("the thread that writes ended")))
    }

    /// Tells the thread that the files of all ranks are written.
    pub fn all_wrote(&self) {
        self.news.all_wrote.store(true, Ordering::Relaxed);
    }

    /// Waits until the save has ended on this rank, and removes what a save that failed has written.
    pub fn join(self) -> Result<()> {
        match self.thread.join() {
            Ok((_, outcome)) => outcome,
            Err(_) => Err(Error::other("the thread that writes a checkpoint panicked")),
        }
    }

    /// Waits until this rank's files are written, and for other ranks' reports for a short while. Removes what a save that
    /// fails has written.
    pub fn give_up(self) -> Result<()> {
        self.news.given_up.store(true, Ordering::Relaxed);
        self.join()
    }
}
