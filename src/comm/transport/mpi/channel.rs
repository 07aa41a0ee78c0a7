//! A group's calls as messages.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::smallvec;

use super::calls::MpiResult;
use super::engine::Shared;
use super::flight::{Crash, Flight};
use super::line::{Line, lock};
use super::watch::Patience;
use crate::comm::calls::CallSignature;
use crate::comm::calls::Sequence;
use crate::comm::coordinator::Message;
use crate::comm::{Call, Channel, Request, Route, Tensors};
use crate::error::{CallId, Error, Result};
use crate::tensor::{Device, Tensor};

/// One member's end of a group.
#[derive(Debug)]
pub(super) struct MpiChannel {
    pub shared: Arc<Shared>,
    pub line: Arc<Line>,
}

impl Channel for MpiChannel {
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        let me = self.line.index;
        let (sequence, to_itself) = match call.route {
            Route::Send { to } => (Sequence::Message { from: me, to }, to == me),
            Route::Recv { from } => (Sequence::Message { from, to: me }, from == me),
            _ => (Sequence::Collective, false),
        };
        check(&call)?;
        if to_itself {
            return self.to_itself(call);
        }
        let seq = self.line.advance(sequence);
        if self.shared.is_given_up() {
            return Err(self.shared.given_up(self.line.call_id(call.name, seq), call.signature()));
        }
        let brief = call.to_signature();
        if self.shared.seat.compared {
            self.shared.note(Message::Came { group: self.line.id, sequence, seq, brief: brief.clone() });
        }
        let id = || self.line.call_id(call.name, seq);
        let mut trip = self.plan(&call)?;
        let Some(port) = self.shared.port() else { return Err(over(id())) };
        let posted = self.post(&call, (sequence, seq), &mut trip, &port);
        drop(port);
        if let Err(e) = posted {
            return Err(self.shared.broken(id(), e.to_string()));
        }
        if let Route::Send { .. } = call.route {
            // It lies there until it is fetched: its memory is the engine's until then.
            self.shared.leave(trip.flight);
            return Ok(Box::new(Sent));
        }
        self.shared.flying.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Flying { channel: self.again(), call: brief, sequence, seq, trip: RefCell::new(trip) }))
    }
}

/// A call's messages, and what it gives.
#[derive(Debug, Default)]
struct Trip {
    flight: Flight,
    /// What comes from this member itself, and its place among the results.
    own: Option<(usize, Tensor)>,
    outgoing: Vec<Tensor>,
}

impl MpiChannel {
    fn again(&self) -> MpiChannel {
        MpiChannel { shared: self.shared.clone(), line: self.line.clone() }
    }

    /// What is sent, side by side in memory.
    fn plan(&self, call: &Call<'_>) -> Result<Trip> {
        let me = self.line.index;
        let outgoing: Result<Vec<Tensor>> = call.outgoing.iter().map(Tensor::contiguous).collect();
        let outgoing = outgoing?;
        let own = match call.route {
            Route::Gather => Some((me, call.outgoing[0].clone())),
            Route::AllToAll => Some((me, call.outgoing[me].clone())),
            Route::Broadcast { root } if root == me => Some((0, outgoing[0].clone())),
            _ => None,
        };
        Ok(Trip { flight: Flight::default(), own, outgoing })
    }

    /// Starts all messages: what is received first, so that what comes finds its place.
    fn post(
        &self,
        call: &Call<'_>,
        (sequence, seq): (Sequence, u64),
        trip: &mut Trip,
        port: &super::calls::Port<'_>,
    ) -> MpiResult<()> {
        let (mpi, me, n) = (&self.shared.seat.mpi, self.line.index, self.line.ranks.len());
        let rank = |i: usize| self.line.ranks[i];
        // Each begins with its neighbour, so that not all send to one.
        let others = || (1..n).map(|k| (me + k) % n);
        let Trip { flight, outgoing, .. } = trip;
        let tag = self.line.tag(sequence, seq, call, None);
        let room = |i: usize| Tensor::stale(call.dtype, call.incoming[i].clone());
        match call.route {
            Route::Gather => {
                let from = (0..n).filter(|&i| i != me);
                from.into_iter().try_for_each(|i| flight.receive(mpi, port, room(i), rank(i), tag))?;
                others().try_for_each(|i| flight.send(mpi, port, outgoing[0].clone(), rank(i), tag))
            }
            Route::AllToAll => {
                for i in (0..n).filter(|&i| i != me) {
                    let tag = self.line.tag(sequence, seq, call, Some(&call.incoming[i]));
                    flight.receive(mpi, port, room(i), rank(i), tag)?;
                }
                for i in others() {
                    let tag = self.line.tag(sequence, seq, call, Some(call.outgoing[i].shape()));
                    flight.send(mpi, port, outgoing[i].clone(), rank(i), tag)?;
                }
                Ok(())
            }
            Route::Broadcast { root } if root == me => {
                others().try_for_each(|i| flight.send(mpi, port, outgoing[0].clone(), rank(i), tag))
            }
            Route::Broadcast { root } => flight.receive(mpi, port, room(0), rank(root), tag),
            Route::Send { to } => flight.send(mpi, port, outgoing[0].clone(), rank(to), tag),
            Route::Recv { from } => flight.receive(mpi, port, room(0), rank(from), tag),
            Route::Barrier => {
                others().try_for_each(|i| flight.receive_nothing(port, rank(i), tag))?;
                others().try_for_each(|i| flight.send_nothing(port, rank(i), tag))
            }
        }
    }

    /// A message of this rank to itself, which MPI has no part in.
    fn to_itself(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        let me = self.line.index;
        let sends = matches!(call.route, Route::Send { .. });
        // The two ends are counted apart; no message between two members is from one to the same.
        let to = if sends { me } else { usize::MAX };
        let seq = self.line.advance(Sequence::Message { from: me, to });
        if sends {
            lock(&self.line.own).insert(seq, call.outgoing[0].clone());
        }
        Ok(Box::new(Own { channel: self.again(), seq, sends, call: call.to_signature() }))
    }
}

fn check(call: &Call<'_>) -> Result<()> {
    match call.outgoing.iter().find(|x| x.device() != Device::Cpu) {
        Some(x) => Err(Error::unsupported(
            call.name,
            "MPI moves what lies in the CPU's memory",
            format!("{x} on {}", x.device()),
            "run ranks with GPUs over NCCL, or call to_device(Device::Cpu) first",
        )),
        None => Ok(()),
    }
}

fn over(id: CallId) -> Error {
    let given = id.to_string();
    Error::invalid(
        "mpi",
        "the world is over",
        given,
        "wait for what was started before the rank's program ends",
    )
}

/// A call under way.
struct Flying {
    channel: MpiChannel,
    call: CallSignature,
    sequence: Sequence,
    seq: u64,
    trip: RefCell<Trip>,
}

impl Flying {
    fn id(&self) -> CallId {
        self.channel.line.call_id(self.call.name.clone(), self.seq)
    }

    fn test(&self) -> Result<bool> {
        let Some(port) = self.channel.shared.port() else { return Err(over(self.id())) };
        let tested = self.trip.borrow_mut().flight.test(&port);
        drop(port);
        tested.map_err(|crash| {
            let reason = match crash {
                Crash::Mpi(e) => e.to_string(),
                Crash::Length { got, wanted } => format!("{got} bytes have come instead of {wanted}"),
            };
            self.channel.shared.broken(self.id(), reason)
        })
    }

    /// Tells the coordinator that the deadline has passed.
    fn late(&self) -> Error {
        let shared = &self.channel.shared;
        let (group, sequence, seq, call) =
            (self.channel.line.id, self.sequence, self.seq, self.call.name.clone());
        shared.tell(Message::Late { group, sequence, seq, call, compared: shared.seat.compared });
        shared.given_up(self.id(), self.call.view())
    }
}

impl Request for Flying {
    fn wait(self: Box<Self>) -> Result<Tensors> {
        let shared = &self.channel.shared;
        let mut patience = Patience::new(self.trip.borrow().flight.len_bytes(), shared.seat.crowded);
        while !self.trip.borrow().flight.is_done() && !self.test()? {
            if shared.is_given_up() {
                return Err(shared.given_up(self.id(), self.call.view()));
            }
            let was_long = patience.is_long();
            patience.pause();
            if patience.is_long() && !was_long {
                // Something may be wrong: the coordinator has to know what this rank has brought.
                shared.flush();
            }
            if patience.waited() >= shared.seat.deadline && !self.test()? {
                return Err(self.late());
            }
        }
        let Trip { flight, own, .. } = self.trip.take();
        let mut results = flight.into_results();
        if let Some((at, own)) = own {
            results.insert(at, own);
        }
        Ok(results.into())
    }

    fn is_ready(&self) -> bool {
        self.trip.borrow().flight.is_done()
            || self.channel.shared.is_given_up()
            || self.test().unwrap_or(true)
    }
}

impl Drop for Flying {
    fn drop(&mut self) {
        let shared = &self.channel.shared;
        shared.flying.fetch_sub(1, Ordering::Relaxed);
        shared.leave(self.trip.take().flight);
    }
}

/// A message that the engine looks after.
struct Sent;

impl Request for Sent {
    fn wait(self: Box<Self>) -> Result<Tensors> {
        Ok(Tensors::new())
    }

    fn is_ready(&self) -> bool {
        true
    }
}

/// A message of a rank to itself.
struct Own {
    channel: MpiChannel,
    seq: u64,
    sends: bool,
    call: CallSignature,
}

impl Request for Own {
    fn wait(self: Box<Self>) -> Result<Tensors> {
        if self.sends {
            return Ok(Tensors::new());
        }
        let x = lock(&self.channel.line.own).remove(&self.seq);
        let rank = self.channel.shared.rank();
        let reason = match x {
            Some(x) if x.dtype() == self.call.dtype && *x.shape() == self.call.incoming[0] => {
                return Ok(smallvec![x]);
            }
            Some(x) => format!("rank {rank} sent itself {x} and expects {}", self.call.view()),
            None => format!("rank {rank} waits for itself with {}", self.call.view()),
        };
        let id = self.channel.line.call_id(self.call.name.clone(), self.seq);
        Err(self.channel.shared.broken(id, reason))
    }

    fn is_ready(&self) -> bool {
        true
    }
}
