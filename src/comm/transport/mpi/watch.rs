//! A rank's watch, and how a rank waits.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::engine::Shared;

/// How often the watch looks where something is under way, and where nothing is.
const GLANCE: Duration = Duration::from_millis(1);
const IDLE_GLANCE: Duration = Duration::from_millis(20);

/// Sends notes, and keeps messages moving that nobody waits for, until the rank's part is over or the world is given up.
pub(super) fn watch(shared: &Shared) {
    let mut pause = IDLE_GLANCE;
    while !shared.over.load(Ordering::Acquire) {
        if shared.seat.client.wait_for_fault(pause).is_some() {
            return;
        }
        let noted = shared.has_notes();
        shared.flush();
        let busy = shared.progress();
        pause = if busy || noted { GLANCE } else { IDLE_GLANCE };
    }
}

/// A wait: spins, then gives way to others, then sleeps in growing steps.
#[derive(Debug)]
pub(super) struct Patience {
    polls: u32,
    spins: u32,
    /// How long it gives way before it sleeps.
    awake: Duration,
    waited: Duration,
    last: Instant,
    nap: Duration,
}

impl Patience {
    /// For messages of this many bytes.
    pub fn new(len_bytes: usize, crowded: bool) -> Patience {
        const SPINS: u32 = 3000;
        const CROWDED_SPINS: u32 = 20;
        const AWAKE: Duration = Duration::from_millis(2);
        // What may be moving all the time, at a slow pace: sleeping would hold it up.
        let moving = Duration::from_nanos(len_bytes as u64);
        Patience {
            polls: 0,
            spins: if crowded { CROWDED_SPINS } else { SPINS },
            awake: AWAKE + moving,
            waited: Duration::ZERO,
            last: Instant::now(),
            nap: Duration::from_micros(20),
        }
    }

    /// True where the clock may be looked at: the wait is no longer a matter of microseconds.
    pub fn is_long(&self) -> bool {
        self.polls > self.spins
    }

    /// How long it has been, not counting when the whole process was stopped.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    pub fn pause(&mut self) {
        const LAPSE: Duration = Duration::from_millis(100);
        const LONGEST_NAP: Duration = Duration::from_millis(1);
        self.polls = self.polls.saturating_add(1);
        if self.polls <= self.spins {
            std::hint::spin_loop();
            return;
        }
        let now = Instant::now();
        self.waited += (now - self.last).min(LAPSE);
        self.last = now;
        if self.waited < self.awake {
            thread::yield_now();
        } else {
            thread::sleep(self.nap);
            self.nap = (self.nap * 2).min(LONGEST_NAP);
        }
    }
}
