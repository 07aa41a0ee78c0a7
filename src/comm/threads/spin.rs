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

/// How long to poll where cores are free: longer than it takes to wake a parked thread. Else two ranks that met once while
/// one was parked would each wait for the other's waking, and park, ever after.
#[cfg(not(any(loom, shuttle)))]
const PATIENCE: std::time::Duration = std::time::Duration::from_micros(60);

/// Polls `ready` for some microseconds where cores are free, only a moment where they are not.
#[cfg(not(any(loom, shuttle)))]
pub(super) fn spin(ready: impl Fn() -> bool) -> bool {
    use std::sync::OnceLock;
    use std::thread::available_parallelism;
    use std::time::Instant;

    const POLLS: usize = 20;
    static CORES: OnceLock<usize> = OnceLock::new();
    let poll = || {
        (0..POLLS).any(|_| {
            let is_ready = ready();
            std::hint::spin_loop();
            is_ready
        })
    };
    if poll() {
        return true;
    }
    let cores = *CORES.get_or_init(|| available_parallelism().map_or(1, usize::from));
    let start = Instant::now();
    while RUNNING.load(Ordering::Relaxed) <= cores && start.elapsed() < PATIENCE {
        if poll() {
            return true;
        }
    }
    ready()
}

/// A model has no time to spin away: one look.
#[cfg(any(loom, shuttle))]
pub(super) fn spin(ready: impl Fn() -> bool) -> bool {
    ready()
}
