//! A group's calls, on its stream.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::group::{CallOnStream, NcclGroup};
use super::transfers::CallTransfers;
use super::world::NcclWorld;
use crate::base::lock;
use crate::comm::calls::{Call, Route};
use crate::comm::transport::coordinated::{CallNumber, GroupMember, MemberTransport, SelfMessage, Watchdog};
use crate::comm::transport::{CallResults, Request};
use crate::error::{Error, Result};
use crate::tensor::cuda::{Gpu, StreamMark};
use crate::tensor::{Device, Tensor};

/// One member's end of a group.
#[derive(Debug)]
pub(super) struct NcclChannel {
    pub world: Arc<NcclWorld>,
    pub group: Arc<NcclGroup>,
    /// Runs until no channel holds it any more.
    pub _watchdog: Arc<Watchdog>,
}

impl MemberTransport for NcclChannel {
    fn member(&self) -> &GroupMember {
        &self.group.state
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let here = Device::Cuda(self.world.device);
        match call.outgoing.iter().find(|x| x.device() != here) {
            Some(x) => Err(Error::invalid(
                call.name,
                "NCCL moves tensors of the rank's own GPU",
                format!(
                    "{} on {} at rank {} on {here}",
                    x.notation(),
                    x.device(),
                    self.world.membership.rank
                ),
                format!("call to_device({here:?}) first"),
            )),
            None => Ok(()),
        }
    }

    fn begin(&self, call: &Call<'_>, into: Option<Vec<Tensor>>) -> Result<Box<dyn Request>> {
        let NcclChannel { world, group, .. } = self;
        if let Some(message) = SelfMessage::start(&group.state, call) {
            return Ok(Box::new(message));
        }
        let number = group.state.enter(call)?;
        let gpu = Gpu::get(world.device)?;
        world.register_stream(&gpu);
        let transfers = match into {
            Some(into) => CallTransfers::gather_into(call, into, group, &gpu)?,
            None => CallTransfers::new(call, group, &gpu)?,
        };
        let began = self.put(&gpu, &transfers, &number)?;
        let done = Arc::new(group.side.mark()?);
        let results = transfers.into_results();
        let patience = world.membership.deadline;
        let in_flight = CallOnStream { number, began, done: done.clone(), since: None, patience };
        lock(&group.in_flight).push_back(in_flight);
        let holds_host = call.route == Route::Barrier;
        let (world, group, results) = (world.clone(), group.state.clone(), results.into());
        Ok(Box::new(NcclRequest { world, group, number, done, results, holds_host }))
    }
}

impl NcclChannel {
    /// Puts transfers on the group's stream. Returns a mark before them.
    fn put(&self, gpu: &Gpu, transfers: &CallTransfers, number: &CallNumber) -> Result<StreamMark> {
        let NcclChannel { world, group, .. } = self;
        group.side.wait_for_thread(gpu)?;
        let began = group.side.mark()?;
        if transfers.is_empty() {
            return Ok(began);
        }
        match group.with(|comm| transfers.issue(&*world.nccl, comm, group)) {
            Some(Ok(())) => {}
            Some(Err(e)) => return Err(group.state.broken(number, e)),
            None => return Err(group.state.given_up(number, number.name)),
        }
        world.ready(group, number, |waited| group.state.late(number, number.name, waited))?;
        Ok(began)
    }
}

/// A call in flight.
struct NcclRequest {
    world: Arc<NcclWorld>,
    group: Arc<GroupMember>,
    number: CallNumber,
    done: Arc<StreamMark>,
    results: CallResults,
    /// True if the host waits as well.
    holds_host: bool,
}

impl Request for NcclRequest {
    fn wait(self: Box<Self>) -> Result<CallResults> {
        const PAUSE: Duration = Duration::from_micros(50);
        let NcclRequest { world, group, number, done, results, holds_host } = *self;
        loop {
            let is_done = holds_host && done.is_done().unwrap_or(false);
            // Values are poisoned before transfers are given up, so a barrier that is done without poison was
            // completed.
            if is_done && world.poisoned().is_none() {
                break;
            }
            if world.membership.is_given_up() {
                return world.membership.give(Err(group.given_up(&number, number.name)));
            }
            if !holds_host {
                break;
            }
            thread::sleep(PAUSE);
        }
        done.make_thread_wait(&Gpu::get(world.device)?)?;
        Ok(results)
    }

    fn is_ready(&self) -> bool {
        self.done.is_done().unwrap_or(true) || self.world.membership.is_given_up()
    }
}
