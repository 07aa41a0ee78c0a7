//! The thread engine's implementation of the engine traits.
//!
//! Tensors on a device are shared like all others: a kernel that reads one waits, on the device, for the stream of
//! the rank that made it. No data passes through the host, and the host only waits for the calls of its peers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use smallvec::smallvec;

use super::group::{PublishedCall, ThreadGroup};
use super::shared_folds::ReusedResult;
use super::slot::SlotOutcome;
use super::world::ThreadWorld;
use crate::comm::calls::{BusyWork, Call, Route, Sequence};
use crate::comm::lock::lock;
use crate::comm::transport::{CallResults, Channel, Engine, Reduce, Request};
use crate::error::{Error, Result};

/// One rank's end of a world of threads.
#[derive(Debug)]
pub(crate) struct ThreadEngine {
    world: Arc<ThreadWorld>,
    rank: usize,
    /// The number of times that this rank has continued without failed ranks.
    generation: AtomicU64,
}

impl ThreadEngine {
    pub(crate) fn new(world: Arc<ThreadWorld>, rank: usize) -> ThreadEngine {
        ThreadEngine { world, rank, generation: AtomicU64::new(0) }
    }
}

impl Engine for ThreadEngine {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_len(&self) -> usize {
        self.world.status().world_len()
    }

    fn deadline(&self) -> Duration {
        self.world.status().deadline
    }

    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
        let position = ranks.iter().position(|&r| r == self.rank).expect("checked by the caller");
        let group = self.world.group(self.generation.load(Ordering::Relaxed), ranks, name);
        let world = self.world.clone();
        let (spare, reused) = (Mutex::default(), Mutex::default());
        Ok(Arc::new(ThreadChannel {
            member: Arc::new(MemberState { world, group, position, spare, reused }),
        }))
    }

    fn announce(&self, work: Option<BusyWork>) {
        self.world.status().announce(self.rank, work);
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

/// One member's end of a group.
#[derive(Debug)]
struct ThreadChannel {
    member: Arc<MemberState>,
}

/// The state that a channel shares with its requests.
#[derive(Debug)]
struct MemberState {
    world: Arc<ThreadWorld>,
    group: Arc<ThreadGroup>,
    position: usize,
    /// Finished requests, kept for reuse.
    #[expect(clippy::vec_box, reason = "the boxes are what is used again")]
    spare: Mutex<Vec<Box<ThreadRequest>>>,
    reused: Mutex<ReusedResult>,
}

impl Channel for ThreadChannel {
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.publish(call, None)
    }

    fn all_reduce(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.publish(call, Some(reduce))
    }

    fn reduce_scatter(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.publish(call, Some(reduce))
    }

    fn reduces_well(&self) -> bool {
        true
    }
}

impl ThreadChannel {
    fn publish(&self, call: Call<'_>, reduce: Option<Reduce>) -> Result<Box<dyn Request>> {
        let member = &self.member;
        if let Some(reduce) = &reduce {
            reduce.check(&call, member.position, member.group.ranks.len())?;
        }
        let position = match call.route {
            Route::Send { .. } => 0,
            Route::Recv { .. } => 1,
            Route::Gather | Route::AllToAll | Route::Broadcast { .. } | Route::Barrier => member.position,
        };
        let sequence = Sequence::of(call.route, member.position);
        let waits = !matches!(call.route, Route::Send { .. });
        let call = member.group.publish((sequence, position), &call, reduce.as_ref())?;
        let mut request = lock(&member.spare).pop().unwrap_or_default();
        request.0 = Some(InFlightCall { member: member.clone(), call, waits, reduce });
        Ok(request)
    }
}

/// A call that this member has published, or `None` once it was waited for.
#[derive(Debug, Default)]
struct ThreadRequest(Option<InFlightCall>);

/// A published call, whose slot the member leaves when this is dropped.
#[derive(Debug)]
struct InFlightCall {
    member: Arc<MemberState>,
    call: PublishedCall,
    /// False for a send: its message stays in the slot until the receiver takes it.
    waits: bool,
    reduce: Option<Reduce>,
}

impl Request for ThreadRequest {
    fn wait(mut self: Box<Self>) -> Result<CallResults> {
        let in_flight = self.0.take().expect("a request is waited for once");
        lock(&in_flight.member.spare).push(self);
        in_flight.outcome()
    }

    fn is_ready(&self) -> bool {
        let InFlightCall { member, call, waits, .. } = self.0.as_ref().expect("not waited for yet");
        !waits || call.slot.is_open() || member.group.is_given_up()
    }
}

impl InFlightCall {
    fn outcome(&self) -> Result<CallResults> {
        let InFlightCall { member, call, waits, reduce } = self;
        if !waits {
            return Ok(CallResults::new());
        }
        let (group, position) = (&member.group, call.position);
        group.wait(call, |cycle| member.world.fail_others_in(cycle, group))?;
        let contents = &*call.slot.contents();
        match (&contents.outcome, reduce) {
            (SlotOutcome::Whole(result), _) => Ok(smallvec![result.clone()]),
            (SlotOutcome::Shared(folds), _) => {
                if folds.work(position, |member, part| contents.part(member, part)) {
                    group.wake();
                }
                group.wait_for_work(call, || folds.is_done(position))?;
                Ok(smallvec![folds.result(position)])
            }
            (SlotOutcome::Parts, Some(reduce)) => {
                let of = |at: usize| contents.part(at, position);
                Ok(smallvec![lock(&member.reused).fold(reduce, &of)?])
            }
            (SlotOutcome::Parts, None) => Ok(contents.take(position)),
        }
    }
}

impl Drop for InFlightCall {
    fn drop(&mut self) {
        self.member.group.leave(&self.call);
    }
}
