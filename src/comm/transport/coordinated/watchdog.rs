//! The thread per rank that watches what is in flight.

use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use super::membership::Membership;
use crate::comm::lock::lock;
use crate::error::{Error, Result};

/// A rank's watchdog. Dropped, it leaves its thread to finish by itself.
#[derive(Debug)]
pub(in crate::comm::transport) struct Watchdog {
    membership: Arc<Membership>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Watchdog {
    /// Starts `watch`, which goes on until [`Membership::is_over`], or the world is given up.
    ///
    /// # Errors
    /// Refuses, in the name of `engine`, if the system has no thread for it; the other ranks are told.
    pub fn start(
        engine: &'static str,
        membership: &Arc<Membership>,
        watch: impl FnOnce() + Send + 'static,
    ) -> Result<Watchdog> {
        let thread = Builder::new().name(format!("watch of rank {}", membership.rank)).spawn(watch);
        let thread = thread.map_err(|e| {
            let given = format!("rank {}: {e}", membership.rank);
            let rule = "the system refuses a thread for a rank's watch";
            membership.refuse(Error::unsupported(engine, rule, given, "use fewer ranks"))
        })?;
        Ok(Watchdog { membership: membership.clone(), thread: Mutex::new(Some(thread)) })
    }

    /// Ends the rank's part in the world, and waits for the thread.
    pub fn stop(&self) {
        self.membership.end();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // Its panics would be our own bugs, and there is nothing left to do for it.
            let _ = thread.join();
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.membership.end();
    }
}
