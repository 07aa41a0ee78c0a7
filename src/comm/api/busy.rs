//! Announcements of long work, which other ranks wait for with patience.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::rank::Rank;
use crate::comm::diagnostics::Recorder;
use crate::comm::transport::Engine;

/// The limit of [`Rank::busy`]: one hour.
const DEFAULT_LIMIT: Duration = Duration::from_secs(3600);

impl Rank {
    /// Announces that this rank works on its own for a while, for example on a file, until the guard is dropped. Calls
    /// of other ranks that wait for this rank, directly or through ranks that wait for it, then do not end at the
    /// deadline: their deadline counts anew from the end of the announcement.
    ///
    /// An announcement counts for one hour at most; [`Rank::busy_for`] sets another limit. It does not count while
    /// the thread that made it waits for other ranks, so ranks that are all busy and wait for each other get their
    /// error at the deadline. If this rank fails or ends, the other ranks learn it at once, as always. Announcements
    /// may be nested and made on several threads. If the deadline passes nevertheless, the error says what this rank
    /// is busy with ([`CommFault::Missing`](crate::CommFault::Missing)).
    ///
    /// This communicates nothing. Over NCCL and MPI it queues one message to rank 0's process.
    ///
    /// ```
    /// use isoshard::comm::Spmd;
    /// use std::{thread::sleep, time::Duration};
    /// let short = Duration::from_millis(100);
    /// Spmd::new(2).deadline(short).on_slow(|_| ()).run(move |rank| {
    ///     if rank.rank() == 0 {
    ///         let _busy = rank.busy("writing a file");
    ///         sleep(short * 3);
    ///     }
    ///     rank.world().barrier() // rank 1 waits for longer than the deadline
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn busy(&self, what: &str) -> BusyGuard {
        self.busy_for(what, DEFAULT_LIMIT)
    }

    /// Announces work as [`Rank::busy`] does, with the time after which the announcement no longer counts. However
    /// often ranks announce work, no call waits longer than twice the deadline and the longest of these limits together.
    ///
    /// ```
    /// use isoshard::comm::Spmd;
    /// use std::{thread::sleep, time::Duration};
    /// let short = Duration::from_millis(100);
    /// let run = Spmd::new(2).deadline(short).on_slow(|_| ()).run(move |rank| {
    ///     if rank.rank() == 0 {
    ///         let _busy = rank.busy_for("compiling", short);
    ///         sleep(short * 5);
    ///     }
    ///     rank.world().barrier()
    /// });
    /// let error = run.unwrap_err().to_string();
    /// assert!(error.contains("rank 0 is busy with \"compiling\" for "), "{error}");
    /// assert!(error.contains("longer than its limit of 0.1 s"), "{error}");
    /// ```
    pub fn busy_for(&self, what: &str, limit: Duration) -> BusyGuard {
        let number = self.recorder().announcer.begin(what, limit);
        BusyGuard { recorder: self.recorder().clone(), _engine: self.engine().clone(), number }
    }
}

/// An announcement of [`Rank::busy`], which ends when this value is dropped.
#[must_use = "the announcement ends when this is dropped"]
pub struct BusyGuard {
    recorder: Arc<Recorder>,
    /// Keeps the engine, which tells the other ranks of the end.
    _engine: Arc<dyn Engine>,
    number: u64,
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.recorder.announcer.end(self.number);
    }
}

impl fmt::Debug for BusyGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BusyGuard").field("number", &self.number).finish_non_exhaustive()
    }
}
