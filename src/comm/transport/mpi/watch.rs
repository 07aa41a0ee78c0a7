//! The watchdog's work: it sends what the coordinator is told in passing, and keeps messages moving.

use std::time::Duration;

use super::world::MpiWorld;

/// How often it looks while something is in flight, and while nothing is.
const GLANCE: Duration = Duration::from_millis(1);
const IDLE_GLANCE: Duration = Duration::from_millis(20);

/// Watches until the rank's part is over or the world is given up.
pub(super) fn watch(world: &MpiWorld) {
    let mut pause = IDLE_GLANCE;
    while !world.membership.is_over() {
        if world.membership.wait_for_fault(pause).is_some() {
            return;
        }
        let told = world.membership.flush();
        let busy = world.progress();
        pause = if busy || told { GLANCE } else { IDLE_GLANCE };
    }
}
