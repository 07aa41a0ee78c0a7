//! The watchdog's work: it sees what is late or broken, and gives up what is in flight when the world is given up.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::group::NcclGroup;
use super::world::NcclWorld;
use super::{Communicator, Progress};
use crate::comm::coordinator::FirstFault;
use crate::comm::deadline::end_after;
use crate::comm::lock::lock;
use crate::comm::transport::coordinated::CallNumber;

/// The pauses between its looks while calls are in flight, and while none are.
const GLANCE: Duration = Duration::from_millis(2);
const IDLE_GLANCE: Duration = Duration::from_millis(20);

/// Watches until the rank's program is over, then ends the communicators.
pub(super) fn watch(world: &NcclWorld) {
    if world.driver.bind().is_err() {
        // Then the rank's own calls fail, with the driver's words.
        return;
    }
    let mut idle = true;
    loop {
        let pause = if idle { IDLE_GLANCE } else { GLANCE };
        if let Some(first_fault) = world.membership.wait_for_fault(pause) {
            return give_up(world, &first_fault);
        }
        let groups = world.groups.all();
        let trouble = groups.iter().find_map(|group| Some((group, look(world, group)?)));
        if let Some((group, trouble)) = trouble {
            return give_up(world, &trouble.report(group));
        }
        idle = groups.iter().all(|group| lock(&group.in_flight).is_empty());
        if idle && world.membership.is_over() {
            return finish(world, &groups);
        }
    }
}

/// The trouble with a call.
enum Trouble {
    Late(CallNumber),
    Broken(CallNumber, String),
}

impl Trouble {
    /// Tells the coordinator, and returns the first fault.
    fn report(self, group: &NcclGroup) -> FirstFault {
        match self {
            Trouble::Late(call) => group.state.report_late(&call, call.name),
            Trouble::Broken(call, reason) => group.state.report_broken(&call, reason),
        }
    }
}

/// The trouble in a group, if there is any.
fn look(world: &NcclWorld, group: &NcclGroup) -> Option<Trouble> {
    let mut in_flight = lock(&group.in_flight);
    while let Some(first) = in_flight.front_mut() {
        if first.done.is_done().unwrap_or(false) {
            in_flight.pop_front();
            continue;
        }
        if first.since.is_none() && first.began.is_done().unwrap_or(false) {
            first.since = Some(Instant::now());
        }
        if first.since.is_some_and(|since| since.elapsed() >= world.membership.deadline) {
            return Some(Trouble::Late(first.number));
        }
        break;
    }
    let error = group.glance(&*world.nccl).err()?;
    let call = in_flight.front().map_or(CallNumber::CONNECT, |first| first.number);
    Some(Trouble::Broken(call, error.to_string()))
}

/// Gives up all that is in flight: nobody reads what it leaves behind.
fn give_up(world: &NcclWorld, first_fault: &FirstFault) {
    let groups = world.groups.all();
    let first = groups.iter().find_map(|group| Some(group.state.call_id(&group.first_in_flight()?)));
    let id = first.unwrap_or_else(|| world.membership.world_id("read"));
    world.poison(first_fault.at(id).into());
    for group in groups {
        if let Some(comm) = group.take() {
            // What cannot even be aborted is past help.
            let _ = world.nccl.abort(comm);
        }
        lock(&group.in_flight).clear();
    }
}

/// Ends the communicators in peace; what does not end within the deadline is aborted.
fn finish(world: &NcclWorld, groups: &[Arc<NcclGroup>]) {
    let comms: Vec<Communicator> = groups.iter().filter_map(|group| group.take()).collect();
    for &comm in &comms {
        let _ = world.nccl.finalize(comm);
    }
    let end = end_after(world.membership.deadline);
    for comm in comms {
        loop {
            match world.nccl.progress(comm) {
                Ok(Progress::Ready) => {
                    let _ = world.nccl.destroy(comm);
                    break;
                }
                Ok(Progress::Underway) if Instant::now() < end => thread::sleep(GLANCE),
                _ => {
                    let _ = world.nccl.abort(comm);
                    break;
                }
            }
        }
    }
}
