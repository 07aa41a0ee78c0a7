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

/// The time to look before parking if ranks have a core each: about the time that it takes to wake a parked rank.
#[cfg(not(any(loom, shuttle)))]
const PATIENCE: std::time::Duration = std::time::Duration::from_micros(60);

/// Polls `ready` for a moment; if ranks have a core each, then looks for some microseconds more, letting others run in
/// between: another program may have left one core to two ranks, and polling would keep the one from what the other waits for.
#[cfg(not(any(loom, shuttle)))]
pub(super) fn spin(ready: impl Fn() -> bool) -> bool {
    use std::sync::OnceLock;
    use std::thread::{available_parallelism, yield_now};
    use std::time::Instant;

    static CORES: OnceLock<usize> = OnceLock::new();
    let cores = *CORES.get_or_init(|| available_parallelism().map_or(1, usize::from));
    let polls = if RUNNING.load(Ordering::Relaxed) <= cores { 150 } else { 20 };
    for _ in 0..polls {
        if ready() {
            return true;
        }
        std::hint::spin_loop();
    }
    let start = Instant::now();
    while polls > 20 && start.elapsed() < PATIENCE {
        if ready() {
            return true;
        }
        yield_now();
    }
    ready()
}

/// A model has no time to spin away: one look.
#[cfg(any(loom, shuttle))]
pub(super) fn spin(ready: impl Fn() -> bool) -> bool {
    ready()
}
