//! A group's calls, as messages.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::backoff::WaitBackoff;
use super::group::MpiGroup;
use super::library::{MpiGuard, MpiResult};
use super::transfers::{TransferError, Transfers};
use super::world::MpiWorld;
use crate::comm::calls::CallSignature;
use crate::comm::calls::{Call, Route};
use crate::comm::transport::coordinated::{CallNumber, GroupMember, MemberTransport, SelfMessage};
use crate::comm::transport::{CallResults, Request};
use crate::error::{CallId, Error, Result};
use crate::tensor::{Device, Tensor};

/// One member's end of a group.
#[derive(Clone, Debug)]
pub(super) struct MpiChannel {
    pub world: Arc<MpiWorld>,
    pub group: Arc<MpiGroup>,
}

impl MemberTransport for MpiChannel {
    fn member(&self) -> &GroupMember {
        &self.group.state
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        match call.outgoing.iter().find(|x| x.device() != Device::Cpu) {
            Some(x) => Err(Error::unsupported(
                call.name,
                "MPI moves tensors in the CPU's memory only",
                format!("{} on {}", x.notation(), x.device()),
                "run ranks with GPUs over NCCL, or call to_device(Device::Cpu) first",
            )),
            None => Ok(()),
        }
    }

    fn begin(&self, call: &Call<'_>, mut into: Option<Vec<Tensor>>) -> Result<Box<dyn Request>> {
        let MpiChannel { world, group } = self;
        if let Some(message) = SelfMessage::start(&group.state, call) {
            return Ok(Box::new(message));
        }
        let number = group.state.enter(call)?;
        // Messages are contiguous in memory.
        let outgoing: Result<Vec<Tensor>> = call.outgoing.iter().map(Tensor::contiguous).collect();
        let outgoing = outgoing?;
        let own = match &mut into {
            None => own_part(call, &outgoing, group.state.index),
            Some(into) => {
                let (me, x) = (group.state.index, &outgoing[0]);
                let mut own = into.remove(me);
                x.copy_block(&mut own, &[x.numel()], (0, &[1]), (0, &[1]))?;
                Some((me, own))
            }
        };
        let Some(guard) = world.guard() else { return Err(over(group.state.call_id(&number))) };
        let mut transfers = Transfers::default();
        let posted = self.post(call, number, &outgoing, into, &mut transfers, &guard);
        drop(guard);
        if let Err(e) = posted {
            return Err(group.state.broken(&number, e));
        }
        if let Route::Send { .. } = call.route {
            // The engine keeps the message's memory until the receiver has it.
            world.abandon(transfers);
            return Ok(Box::new(SentMessage));
        }
        let (channel, transfers) = (self.clone(), RefCell::new(transfers));
        world.in_flight.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(MpiRequest { channel, call: call.to_signature(), number, transfers, own }))
    }
}

impl MpiChannel {
    /// Starts all messages of a call, receives first, so that messages that arrive find their memory. The parts of a gather
    /// arrive in `into`, which has one tensor per other member.
    fn post(
        &self,
        call: &Call<'_>,
        number: CallNumber,
        outgoing: &[Tensor],
        into: Option<Vec<Tensor>>,
        transfers: &mut Transfers,
        guard: &MpiGuard<'_>,
    ) -> MpiResult<()> {
        let (mpi, me, n) = (&self.world.mpi, self.group.state.index, self.group.state.ranks.len());
        let rank = |i: usize| self.group.state.ranks[i];
        // Each member sends to its neighbour first, so that not all send to one member.
        let others = || (1..n).map(|k| (me + k) % n);
        let tag = self.group.tag(call, number, None);
        let room = |i: usize| Tensor::uninit(call.dtype, call.incoming[i].clone());
        match call.route {
            Route::Gather => {
                let from = (0..n).filter(|&i| i != me);
                let rooms: Vec<Tensor> = into.unwrap_or_else(|| from.clone().map(room).collect());
                from.zip(rooms)
                    .try_for_each(|(i, room)| transfers.receive(mpi, guard, room, rank(i), tag))?;
                others().try_for_each(|i| transfers.send(mpi, guard, outgoing[0].clone(), rank(i), tag))
            }
            Route::AllToAll => {
                for i in (0..n).filter(|&i| i != me) {
                    let tag = self.group.tag(call, number, Some(&call.incoming[i]));
                    transfers.receive(mpi, guard, room(i), rank(i), tag)?;
                }
                for i in others() {
                    let tag = self.group.tag(call, number, Some(call.outgoing[i].shape()));
                    transfers.send(mpi, guard, outgoing[i].clone(), rank(i), tag)?;
                }
                Ok(())
            }
            Route::Broadcast { root } if root == me => {
                others().try_for_each(|i| transfers.send(mpi, guard, outgoing[0].clone(), rank(i), tag))
            }
            Route::Broadcast { root } => transfers.receive(mpi, guard, room(0), rank(root), tag),
            Route::Send { to } => transfers.send(mpi, guard, outgoing[0].clone(), rank(to), tag),
            Route::Recv { from } => transfers.receive(mpi, guard, room(0), rank(from), tag),
            Route::Barrier => {
                others().try_for_each(|i| transfers.receive_nothing(guard, rank(i), tag))?;
                others().try_for_each(|i| transfers.send_nothing(guard, rank(i), tag))
            }
        }
    }
}

/// Returns the tensor that this member sends itself, and its position among the results.
fn own_part(call: &Call<'_>, outgoing: &[Tensor], me: usize) -> Option<(usize, Tensor)> {
    match call.route {
        Route::Gather => Some((me, call.outgoing[0].clone())),
        Route::AllToAll => Some((me, call.outgoing[me].clone())),
        Route::Broadcast { root } if root == me => Some((0, outgoing[0].clone())),
        Route::Broadcast { .. } | Route::Send { .. } | Route::Recv { .. } | Route::Barrier => None,
    }
}

fn over(id: CallId) -> Error {
    let given = id.to_string();
    Error::invalid(
        "mpi",
        "the program of this rank has ended",
        given,
        "wait for all requests before the program ends",
    )
}

/// A call in flight.
struct MpiRequest {
    channel: MpiChannel,
    call: CallSignature,
    number: CallNumber,
    transfers: RefCell<Transfers>,
    own: Option<(usize, Tensor)>,
}

impl MpiRequest {
    fn test(&self) -> Result<bool> {
        let MpiChannel { world, group } = &self.channel;
        let Some(guard) = world.guard() else { return Err(over(group.state.call_id(&self.number))) };
        let tested = self.transfers.borrow_mut().test(&guard);
        drop(guard);
        tested.map_err(|e| {
            let reason = match e {
                TransferError::Mpi(e) => e.to_string(),
                TransferError::Length { got, wanted } => {
                    format!("{got} bytes have come instead of {wanted}")
                }
            };
            group.state.broken(&self.number, reason)
        })
    }

    fn outcome(&mut self) -> Result<CallResults> {
        let MpiChannel { world, group } = &self.channel;
        let membership = &world.membership;
        let mut backoff = WaitBackoff::new(self.transfers.borrow().len_bytes(), world.crowded);
        let mut patience = membership.deadline;
        while !self.transfers.borrow().is_done() && !self.test()? {
            if membership.is_given_up() {
                return Err(group.state.given_up(&self.number, self.call.view()));
            }
            let was_long = backoff.is_long();
            backoff.pause();
            if backoff.is_long() && !was_long {
                // Something may be wrong, so the coordinator has to know this rank's call.
                membership.flush();
            }
            if backoff.waited() >= patience && !self.test()? {
                let waited = backoff.waited();
                patience = waited + group.state.late(&self.number, self.call.view(), waited)?;
            }
        }
        let mut results = self.transfers.take().into_results();
        if let Some((at, own)) = self.own.take() {
            results.insert(at, own);
        }
        Ok(results.into())
    }
}

impl Request for MpiRequest {
    fn wait(mut self: Box<Self>) -> Result<CallResults> {
        let outcome = self.outcome();
        self.channel.world.membership.give(outcome)
    }

    fn is_ready(&self) -> bool {
        self.transfers.borrow().is_done()
            || self.channel.world.membership.is_given_up()
            || self.test().unwrap_or(true)
    }
}

impl Drop for MpiRequest {
    fn drop(&mut self) {
        let world = &self.channel.world;
        world.in_flight.fetch_sub(1, Ordering::Relaxed);
        world.abandon(self.transfers.take());
    }
}

/// A sent message, which the engine keeps until it is received.
struct SentMessage;

impl Request for SentMessage {
    fn wait(self: Box<Self>) -> Result<CallResults> {
        Ok(CallResults::new())
    }

    fn is_ready(&self) -> bool {
        true
    }
}
