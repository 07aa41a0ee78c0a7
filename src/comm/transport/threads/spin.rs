//! Short waits that keep the core.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The ranks that run in this process, in all worlds. If there are more than cores, spinning takes time from other
/// ranks.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Counts a thread as a running rank while this value lives.
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

/// The time to poll before parking if each rank has a core: about as long as waking a parked rank takes.
#[cfg(not(any(loom, shuttle)))]
const YIELD_TIME: std::time::Duration = std::time::Duration::from_micros(60);

/// Polls `ready` for a moment and returns its last value. If each rank has a core, continues for some microseconds
/// and yields between polls: another program may have left one core to two ranks, and one of them may wait for the other.
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
    while polls > 20 && start.elapsed() < YIELD_TIME {
        if ready() {
            return true;
        }
        yield_now();
    }
    ready()
}

/// Polls once: in a model, no time passes.
#[cfg(any(loom, shuttle))]
pub(super) fn spin(ready: impl Fn() -> bool) -> bool {
    ready()
}
