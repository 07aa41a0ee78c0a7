//! Waiting without giving up the core, for as long as that is the quicker way.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Ranks that run in this process, in all worlds: with more of them than cores, spinning takes time from the others.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Counts a thread as a running rank while it lives.
pub(crate) struct Running;

impl Running {
    pub(crate) fn enter() -> Running {
        RUNNING.fetch_add(1, Ordering::Relaxed);
        Running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Polls `ready` for a few microseconds where cores are free, only a moment where they are not.
#[cfg(not(any(loom, shuttle)))]
pub(super) fn spin(ready: impl Fn() -> bool) -> bool {
    use std::sync::OnceLock;
    use std::thread::available_parallelism;

    static CORES: OnceLock<usize> = OnceLock::new();
    let cores = *CORES.get_or_init(|| available_parallelism().map_or(1, usize::from));
    let polls = if RUNNING.load(Ordering::Relaxed) <= cores { 600 } else { 20 };
    for _ in 0..polls {
        if ready() {
            return true;
        }
        std::hint::spin_loop();
    }
    ready()
}

/// A model has no time to spin away: one look.
#[cfg(any(loom, shuttle))]
pub(super) fn spin(ready: impl Fn() -> bool) -> bool {
    ready()
}
