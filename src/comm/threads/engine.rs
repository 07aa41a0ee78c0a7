//! The engine's two traits over worlds and hubs.
//!
//! Tensors on a device are passed as all others are, by sharing: a kernel that reads one waits, on the device, for the
//! stream of the rank that made it. Nothing passes through the host, and the host waits for nothing but its peers' calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use smallvec::smallvec;

use super::hub::{By, Hub};
use super::reduction::Reduction;
use super::slot::Slot;
use super::world::World;
use crate::comm::fold::fold;
use crate::comm::{Call, Channel, Engine, Reduce, Request, Route, Tensors};
use crate::error::{Error, Result};
use crate::tensor::Device;

/// From this size on, an all-reduce is folded once, in chunks, by all who wait; below, everyone folds everything.
const SHARED_FOLD_BYTES: usize = 64 << 10;

/// One rank's end of a world of threads.
#[derive(Debug)]
pub(crate) struct ThreadEngine {
    world: Arc<World>,
    rank: usize,
    /// How often this rank has gone on without others.
    generation: AtomicU64,
}

impl ThreadEngine {
    pub(crate) fn new(world: Arc<World>, rank: usize) -> ThreadEngine {
        ThreadEngine { world, rank, generation: AtomicU64::new(0) }
    }
}

impl Engine for ThreadEngine {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_len(&self) -> usize {
        self.world.len()
    }

    fn deadline(&self) -> Duration {
        self.world.deadline
    }

    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
        let position = ranks.iter().position(|&r| r == self.rank).expect("checked by the caller");
        let hub = self.world.hub(self.generation.load(Ordering::Relaxed), ranks, name);
        Ok(Arc::new(ThreadChannel { world: self.world.clone(), hub, position }))
    }

    fn survivors(&self) -> Result<Vec<usize>> {
        let (generation, ranks) = self.world.survivors(self.rank)?;
        self.generation.store(generation, Ordering::Relaxed);
        Ok(ranks)
    }

    fn end(&self) -> Result<()> {
        self.world.end(self.rank);
        Ok(())
    }

    fn abort(&self, cause: &Error) {
        self.world.fail(self.rank, cause.to_string());
    }
}

/// One member's end of a hub.
#[derive(Debug)]
struct ThreadChannel {
    world: Arc<World>,
    hub: Arc<Hub>,
    position: usize,
}

impl ThreadChannel {
    fn meet(&self, call: Call<'_>) -> Result<Meeting> {
        let me = self.position;
        let (by, position) = match call.route {
            Route::Send { to } => (By::Message { from: me, to }, 0),
            Route::Recv { from } => (By::Message { from, to: me }, 1),
            _ => (By::Collective, me),
        };
        let waits = !matches!(call.route, Route::Send { .. });
        let slot = self.hub.publish(&self.world, by, position, &call)?;
        Ok(Meeting { world: self.world.clone(), hub: self.hub.clone(), slot, position, waits })
    }
}

impl Channel for ThreadChannel {
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        Ok(Box::new(self.meet(call)?))
    }

    fn all_reduce(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        Ok(Box::new(Reducing { meeting: self.meet(call)?, reduce }))
    }

    fn reduces_well(&self) -> bool {
        true
    }
}

/// A call that this member has come to.
struct Meeting {
    world: Arc<World>,
    hub: Arc<Hub>,
    slot: Arc<Slot>,
    position: usize,
    /// False for a sender: its message lies there until it is fetched.
    waits: bool,
}

impl Request for Meeting {
    fn wait(self: Box<Self>) -> Result<Tensors> {
        if self.waits {
            self.hub.wait(&self.world, &self.slot, self.position)?;
        }
        Ok(self.slot.take(self.position))
    }

    fn is_ready(&self) -> bool {
        !self.waits || self.slot.is_open() || self.hub.is_given_up(&self.world)
    }
}

/// An all-reduce that this member has come to.
struct Reducing {
    meeting: Meeting,
    reduce: Reduce,
}

impl Request for Reducing {
    fn wait(self: Box<Self>) -> Result<Tensors> {
        let Meeting { world, hub, slot, position, .. } = &self.meeting;
        hub.wait(world, slot, *position)?;
        let call = slot.brought(*position).expect("this member has come");
        if call.device().is_some_and(|device| device != Device::Cpu) {
            // Put on one member's stream, whose result the others' kernels wait for on the device.
            let result = slot.folded.get_or_init(|| fold(&self.reduce, &slot.take(*position)));
            return result.clone().map(|sum| smallvec![sum]);
        }
        let dtype = call.dtype;
        if self.reduce.out_shape().numel() * dtype.size_bytes() < SHARED_FOLD_BYTES {
            return Ok(smallvec![fold(&self.reduce, &slot.take(*position))?]);
        }
        let reduction = slot.reduction.get_or_init(|| Reduction::new(&self.reduce, dtype));
        if reduction.work(slot) {
            hub.wake();
        }
        hub.wait_for_work(world, slot, *position, || reduction.is_done())?;
        Ok(smallvec![reduction.result()])
    }

    fn is_ready(&self) -> bool {
        self.meeting.is_ready()
    }
}
