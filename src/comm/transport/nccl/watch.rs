//! The watchdog's loop: it finds calls that are late or broken, and aborts all transfers when the world is given up.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::group::NcclGroup;
use super::world::NcclWorld;
use super::{Communicator, Progress};
use crate::base::lock;
use crate::comm::coordinator::FirstFault;
use crate::comm::deadline::end_after;
use crate::comm::transport::coordinated::CallNumber;

/// The pause of the loop while calls are in flight, and while there are none.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Runs until the rank's program has ended, then ends the communicators.
pub(super) fn watch(world: &NcclWorld) {
    if world.driver.bind().is_err() {
        // The rank's own calls fail as well, with the driver's message.
        return;
    }
    let mut idle = true;
    loop {
        let pause = if idle { IDLE_POLL_INTERVAL } else { POLL_INTERVAL };
        if let Some(first_fault) = world.membership.wait_for_fault(pause) {
            return give_up(world, &first_fault);
        }
        let groups = world.groups.all();
        let failure = groups.iter().find_map(|group| Some((group, find_failure(world, group)?)));
        if let Some((group, failure)) = failure
            && let Err(first_fault) = failure.report(group)
        {
            return give_up(world, &first_fault);
        }
        idle = groups.iter().all(|group| lock(&group.in_flight).is_empty());
        if idle && world.membership.is_over() {
            return finish(world, &groups);
        }
    }
}

/// A failure of a call.
enum CallFailure {
    /// A call that has waited for this long.
    Late(CallNumber, Duration),
    Broken(CallNumber, String),
}

impl CallFailure {
    /// Tells the coordinator. Lets a late call wait on if ranks that it waits for are busy.
    ///
    /// # Errors
    /// Returns the first fault.
    fn report(self, group: &NcclGroup) -> Result<(), Box<FirstFault>> {
        match self {
            CallFailure::Late(call, waited) => {
                let time = group.state.report_late(&call, call.name, waited)?;
                // Only this thread removes calls while the world is not given up.
                if let Some(first) = lock(&group.in_flight).front_mut() {
                    first.patience = waited.saturating_add(time);
                }
                Ok(())
            }
            CallFailure::Broken(call, reason) => Err(Box::new(group.state.report_broken(&call, reason))),
        }
    }
}

/// Returns the failure of a group's call, if there is one.
fn find_failure(world: &NcclWorld, group: &NcclGroup) -> Option<CallFailure> {
    let mut in_flight = lock(&group.in_flight);
    while let Some(first) = in_flight.front_mut() {
        if first.done.is_done().unwrap_or(false) {
            in_flight.pop_front();
            continue;
        }
        if first.since.is_none() && first.began.is_done().unwrap_or(false) {
            first.since = Some(Instant::now());
        }
        if let Some(waited) = first.since.map(|since| since.elapsed())
            && waited >= first.patience
        {
            return Some(CallFailure::Late(first.number, waited));
        }
        break;
    }
    let error = group.progress(&*world.nccl).err()?;
    let call = in_flight.front().map_or(CallNumber::CONNECT, |first| first.number);
    Some(CallFailure::Broken(call, error.to_string()))
}

/// Aborts all transfers in flight. Values are poisoned first, so that the program cannot read arbitrary ones.
fn give_up(world: &NcclWorld, first_fault: &FirstFault) {
    let groups = world.groups.all();
    let first = groups.iter().find_map(|group| Some(group.state.call_id(&group.first_in_flight()?)));
    let id = first.unwrap_or_else(|| world.membership.world_id("read"));
    world.poison(first_fault.at(id).into());
    for group in groups {
        if let Some(comm) = group.take() {
            // Nothing can be done if this fails.
            let _ = world.nccl.abort(comm);
        }
        lock(&group.in_flight).clear();
    }
}

/// Ends the communicators, and aborts those that do not end within the deadline.
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
                Ok(Progress::Underway) if Instant::now() < end => thread::sleep(POLL_INTERVAL),
                _ => {
                    let _ = world.nccl.abort(comm);
                    break;
                }
            }
        }
    }
}
