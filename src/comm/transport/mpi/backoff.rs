//! The way in which a rank waits for messages.

use std::thread;
use std::time::{Duration, Instant};

/// A wait that spins, then yields the core, then sleeps in growing steps.
#[derive(Debug)]
pub(super) struct WaitBackoff {
    polls: u32,
    spins: u32,
    /// The time for which it yields before it sleeps.
    awake: Duration,
    waited: Duration,
    last: Instant,
    sleep_time: Duration,
}

impl WaitBackoff {
    /// Starts a wait for messages of this many bytes.
    pub fn new(len_bytes: usize, crowded: bool) -> WaitBackoff {
        const SPINS: u32 = 3000;
        const CROWDED_SPINS: u32 = 20;
        const AWAKE: Duration = Duration::from_millis(2);
        // Messages may arrive slowly but steadily, and MPI moves them only while it is called: do not sleep
        // meanwhile.
        let moving = Duration::from_nanos(len_bytes as u64);
        WaitBackoff {
            polls: 0,
            spins: if crowded { CROWDED_SPINS } else { SPINS },
            awake: AWAKE + moving,
            waited: Duration::ZERO,
            last: Instant::now(),
            sleep_time: Duration::from_micros(20),
        }
    }

    /// Returns true if the wait has lasted longer than some microseconds, so that reading the clock costs little.
    pub fn is_long(&self) -> bool {
        self.polls > self.spins
    }

    /// Returns the time waited, without the time for which the whole process was stopped.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    pub fn pause(&mut self) {
        const LAPSE: Duration = Duration::from_millis(100);
        const LONGEST_SLEEP: Duration = Duration::from_millis(1);
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
            thread::sleep(self.sleep_time);
            self.sleep_time = (self.sleep_time * 2).min(LONGEST_SLEEP);
        }
    }
}
