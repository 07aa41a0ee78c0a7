//! The thread per rank that watches the calls in flight.

use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use super::membership::Membership;
use crate::base::lock;
use crate::error::{Error, Result};

/// A rank's watchdog thread. Dropping this value lets the thread end by itself.
#[derive(Debug)]
pub(in crate::comm::transport) struct Watchdog {
    membership: Arc<Membership>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Watchdog {
    /// Starts a thread with `watch`, which runs until [`Membership::is_over`] or until the world is given up.
    ///
    /// # Errors
    /// Returns an error of `engine` if the system has no thread left, and tells the other ranks.
    pub fn start(
        engine: &'static str,
        membership: &Arc<Membership>,
        watch: impl FnOnce() + Send + 'static,
    ) -> Result<Watchdog> {
        let thread = Builder::new().name(format!("watch of rank {}", membership.rank)).spawn(watch);
        let thread = thread.map_err(|e| {
            let given = format!("rank {}: {e}", membership.rank);
            let rule = "the system refuses a thread for the watchdog of a rank";
            membership.refuse(Error::unsupported(engine, rule, given, "use fewer ranks"))
        })?;
        Ok(Watchdog { membership: membership.clone(), thread: Mutex::new(Some(thread)) })
    }

    /// Ends the rank's part in the world, and waits for the thread.
    pub fn stop(&self) {
        self.membership.end();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // A panic there is a bug of this crate, and there is nothing left to do about it.
            let _ = thread.join();
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.membership.end();
    }
}
