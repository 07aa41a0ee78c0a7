//! A group's calls, put on its stream.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use smallvec::smallvec;

use super::engine::{Life, Shared};
use super::line::{Flight, Line, lock};
use super::{Communicator, NcclResult};
use crate::comm::calls::Sequence;
use crate::comm::coordinator::Message;
use crate::comm::{Call, Channel, Request, Route, Tensors};
use crate::error::{CallId, Error, Result};
use crate::tensor::cuda::{Address, Gpu, Mark, Spoiler};
use crate::tensor::{DType, Device, Shape, Tensor};

/// One member's end of a group.
#[derive(Debug)]
pub(super) struct NcclChannel {
    pub life: Arc<Life>,
    pub line: Arc<Line>,
}

impl Channel for NcclChannel {
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        let me = self.line.index;
        let (sequence, to_itself) = match call.route {
            Route::Send { to } => (Sequence::Message { from: me, to }, to == me),
            Route::Recv { from } => (Sequence::Message { from, to: me }, from == me),
            _ => (Sequence::Collective, false),
        };
        self.check(&call)?;
        if to_itself {
            return self.to_itself(call);
        }
        let seq = self.line.advance(sequence);
        let id = self.line.call_id(call.name, seq);
        if self.shared().client.first_fault().is_some() {
            return Err(self.shared().given_up(id));
        }
        if self.shared().compared {
            self.shared().client.tell(Message::Came {
                group: self.line.id,
                sequence,
                seq,
                brief: call.to_signature(),
            });
        }
        let gpu = Gpu::get(self.shared().device)?;
        self.shared().serves(&gpu);
        let plan = Plan::new(&call, self, &gpu)?;
        let began = self.put(&gpu, &plan, &call, (sequence, &id))?;
        let done = Arc::new(self.line.side.mark()?);
        let Plan { results, kept, .. } = plan;
        drop(kept);
        let flight = Flight { call: call.name, sequence, seq, began, done: done.clone(), since: None };
        lock(&self.line.flights).push_back(flight);
        let holds_host = call.route == Route::Barrier;
        Ok(Box::new(Flying { shared: self.shared().clone(), id, done, results: results.into(), holds_host }))
    }
}

impl NcclChannel {
    fn shared(&self) -> &Arc<Shared> {
        &self.life.shared
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let here = Device::Cuda(self.shared().device);
        match call.outgoing.iter().find(|x| x.device() != here) {
            Some(x) => Err(Error::invalid(
                call.name,
                "NCCL moves tensors of the rank's own GPU",
                format!("{x} on {} at rank {} on {here}", x.device(), self.shared().rank),
                format!("call to_device({here:?}) first"),
            )),
            None => Ok(()),
        }
    }

    /// Puts what is planned on the group's stream; where the stream comes to it is marked.
    fn put(
        &self,
        gpu: &Gpu,
        plan: &Plan,
        call: &Call<'_>,
        (sequence, id): (Sequence, &CallId),
    ) -> Result<Mark> {
        let (shared, line) = (self.shared(), &self.line);
        line.side.follow(gpu)?;
        let began = line.side.mark()?;
        if plan.moves.is_empty() {
            return Ok(began);
        }
        let moved = line.with(|comm| self.issue(&plan.moves, comm));
        match moved {
            Some(Ok(())) => {}
            Some(Err(e)) => return Err(shared.broken(id.clone(), e.to_string())),
            None => return Err(shared.given_up(id.clone())),
        }
        let late = || Message::Late {
            group: line.id,
            sequence,
            seq: id.seq,
            call: call.name.into(),
            compared: shared.compared,
        };
        shared.ready(line, id, late)?;
        Ok(began)
    }

    /// Puts moves on the stream as one.
    fn issue(&self, moves: &[Move], comm: Communicator) -> NcclResult<()> {
        let (nccl, stream) = (&*self.shared().nccl, self.line.side.handle());
        nccl.group_start()?;
        let put = moves.iter().try_for_each(|one| {
            // SAFETY: the addresses are those of tensors that hold as many bytes; their blocks know the stream as a user and
            // are not used otherwise before it is through.
            unsafe {
                match *one {
                    Move::Send { from, bytes, to } => nccl.send(from, bytes, to, comm, stream),
                    Move::Recv { at, bytes, from } => nccl.recv(at, bytes, from, comm, stream),
                    Move::Gather { from, at, bytes } => nccl.all_gather(from, at, bytes, comm, stream),
                    Move::Broadcast { at, bytes, root } => nccl.broadcast(at, bytes, root, comm, stream),
                }
            }
        });
        // A group that was begun is ended, whatever came between.
        put.and(nccl.group_end())
    }

    /// A message of this rank to itself, which NCCL has no part in.
    fn to_itself(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        let me = self.line.index;
        let sends = matches!(call.route, Route::Send { .. });
        // The two ends are counted apart; no message between two members is from one to the same.
        let sequence = if sends {
            Sequence::Message { from: me, to: me }
        } else {
            Sequence::Message { from: me, to: usize::MAX }
        };
        let seq = self.line.advance(sequence);
        let (shared, line) = (self.shared().clone(), self.line.clone());
        if sends {
            lock(&line.own).insert(seq, call.outgoing[0].clone());
        }
        let expects = (call.name, call.dtype, call.incoming[0].clone());
        Ok(Box::new(Own { shared, line, seq, sends, text: call.to_string(), expects }))
    }
}

/// One step of a call.
enum Move {
    Send { from: Address, bytes: usize, to: usize },
    Recv { at: Address, bytes: usize, from: usize },
    Gather { from: Address, at: Address, bytes: usize },
    Broadcast { at: Address, bytes: usize, root: usize },
}

/// What a call moves, and what it gives.
struct Plan {
    moves: Vec<Move>,
    results: Vec<Tensor>,
    /// What is moved is given back after it has been put on the stream, so that the stream counts among its users.
    kept: Vec<Tensor>,
}

/// Makes a plan's tensors.
struct Planner<'a> {
    line: &'a Line,
    gpu: &'a Gpu,
    dtype: DType,
    moves: Vec<Move>,
    kept: Vec<Tensor>,
}

impl Plan {
    fn new(call: &Call<'_>, channel: &NcclChannel, gpu: &Gpu) -> Result<Plan> {
        let line = &*channel.line;
        let (me, n) = (line.index, line.ranks.len());
        let mut p = Planner { line, gpu, dtype: call.dtype, moves: vec![], kept: vec![] };
        let others = || (0..n).filter(move |&i| i != me);
        let outgoing = |i: usize| call.outgoing[i].contiguous();
        let shapes = call.incoming;
        let results = match call.route {
            Route::Gather if line.alone => vec![outgoing(0)?],
            Route::Gather if shapes.iter().all(|s| *s == shapes[0]) => p.gather(&outgoing(0)?, n)?,
            Route::Gather => {
                let own = outgoing(0)?;
                others().try_for_each(|to| p.send(&own, to))?;
                p.receive_all(shapes, own)?
            }
            Route::AllToAll => {
                others().try_for_each(|to| p.send(&outgoing(to)?, to))?;
                p.receive_all(shapes, call.outgoing[me].clone())?
            }
            Route::Broadcast { root } => {
                let x = if root == me { outgoing(0)? } else { gpu.stale(call.dtype, shapes[0].clone())? };
                if x.len_bytes() > 0 && !line.alone {
                    let (at, bytes) = (p.uses(&x)?, x.len_bytes());
                    p.moves.push(Move::Broadcast { at, bytes, root });
                }
                vec![x]
            }
            Route::Send { to } => {
                p.send(&outgoing(0)?, to)?;
                vec![]
            }
            Route::Recv { from } => vec![p.receive(&shapes[0], from)?],
            Route::Barrier if line.alone => vec![],
            Route::Barrier => {
                p.gather(&gpu.zeros(DType::U8, [1])?, n)?;
                vec![]
            }
        };
        Ok(Plan { moves: p.moves, results, kept: p.kept })
    }
}

impl Planner<'_> {
    fn uses(&mut self, x: &Tensor) -> Result<Address> {
        self.kept.push(x.clone());
        self.line.side.uses(x)
    }

    fn send(&mut self, x: &Tensor, to: usize) -> Result<()> {
        let bytes = x.len_bytes();
        if bytes > 0 {
            let from = self.uses(x)?;
            self.moves.push(Move::Send { from, bytes, to });
        }
        Ok(())
    }

    fn receive(&mut self, shape: &Shape, from: usize) -> Result<Tensor> {
        let x = self.gpu.stale(self.dtype, shape.clone())?;
        let bytes = x.len_bytes();
        if bytes > 0 {
            let at = self.uses(&x)?;
            self.moves.push(Move::Recv { at, bytes, from });
        }
        Ok(x)
    }

    fn receive_all(&mut self, shapes: &[Shape], own: Tensor) -> Result<Vec<Tensor>> {
        let me = self.line.index;
        let one = |(i, shape)| if i == me { Ok(own.clone()) } else { self.receive(shape, i) };
        shapes.iter().enumerate().map(one).collect()
    }

    /// Equal parts of all members side by side: views of one tensor.
    fn gather(&mut self, own: &Tensor, n: usize) -> Result<Vec<Tensor>> {
        let shape: Shape = std::iter::once(n).chain(own.shape().iter().copied()).collect();
        let all = self.gpu.stale(own.dtype(), shape)?;
        let bytes = own.len_bytes();
        if bytes > 0 {
            let (from, at) = (self.uses(own)?, self.uses(&all)?);
            self.moves.push(Move::Gather { from, at, bytes });
        }
        (0..n).map(|i| all.narrow(0, i, 1)?.reshape(own.shape().clone())).collect()
    }
}

impl Shared {
    /// Counts a thread's stream among those that wait for transfers.
    fn serves(&self, gpu: &Gpu) {
        let mut streams = lock(&self.streams);
        if !streams.iter().any(|s| s.is_of(gpu)) {
            streams.push(Spoiler::of(gpu));
        }
    }
}

/// A call under way.
struct Flying {
    shared: Arc<Shared>,
    id: CallId,
    done: Arc<Mark>,
    results: Tensors,
    /// True where the host itself waits.
    holds_host: bool,
}

impl Request for Flying {
    fn wait(self: Box<Self>) -> Result<Tensors> {
        const PAUSE: Duration = Duration::from_micros(50);
        let Flying { shared, id, done, results, holds_host } = *self;
        loop {
            let is_done = holds_host && done.is_done().unwrap_or(false);
            // The watch says that the world is given up before it lets go of what is under way: this was done before.
            if is_done && shared.first_fault.get().is_none() {
                break;
            }
            if shared.client.first_fault().is_some() {
                return Err(shared.given_up(id));
            }
            if !holds_host {
                break;
            }
            thread::sleep(PAUSE);
        }
        done.hold(&Gpu::get(shared.device)?)?;
        Ok(results)
    }

    fn is_ready(&self) -> bool {
        self.done.is_done().unwrap_or(true) || self.shared.client.first_fault().is_some()
    }
}

/// A message of a rank to itself.
struct Own {
    shared: Arc<Shared>,
    line: Arc<Line>,
    seq: u64,
    sends: bool,
    /// The call, as errors show it, and its name, dtype and shape.
    text: String,
    expects: (&'static str, DType, Shape),
}

impl Request for Own {
    fn wait(self: Box<Self>) -> Result<Tensors> {
        if self.sends {
            return Ok(Tensors::new());
        }
        let x = lock(&self.line.own).remove(&self.seq);
        let (name, dtype, shape) = &self.expects;
        let id = || self.line.call_id(*name, self.seq);
        match x {
            Some(x) if x.dtype() == *dtype && x.shape() == shape => Ok(smallvec![x]),
            Some(x) => {
                let reason = format!("rank {} sent itself {x} and expects {}", self.shared.rank, self.text);
                Err(self.shared.broken(id(), reason))
            }
            None => {
                let reason = format!("rank {} waits for itself with {}", self.shared.rank, self.text);
                Err(self.shared.broken(id(), reason))
            }
        }
    }

    fn is_ready(&self) -> bool {
        true
    }
}
