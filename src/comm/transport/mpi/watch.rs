//! The watchdog's loop: it sends the collected messages to the coordinator, and keeps MPI's messages moving.

use std::time::Duration;

use super::world::MpiWorld;

/// The pause of the loop while messages are in flight, and while there are none.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Runs until the rank's program has ended or the world is given up.
pub(super) fn watch(world: &MpiWorld) {
    let mut pause = IDLE_POLL_INTERVAL;
    while !world.membership.is_over() {
        if world.membership.wait_for_fault(pause).is_some() {
            return;
        }
        let told = world.membership.flush();
        let busy = world.progress();
        pause = if busy || told { POLL_INTERVAL } else { IDLE_POLL_INTERVAL };
    }
}
