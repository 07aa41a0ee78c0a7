//! The engine's two traits over worlds and hubs.
//!
//! Tensors on a device are passed as all others are, by sharing: a kernel that reads one waits, on the device, for the
//! stream of the rank that made it. Nothing passes through the host, and the host waits for nothing but its peers' calls.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use smallvec::smallvec;

use super::hub::{By, Hub, Place};
use super::reduction::Kept;
use super::slot::Outcome;
use super::world::World;
use crate::comm::{Call, Channel, Engine, Reduce, Request, Route, Tensors};
use crate::error::{Error, Result};

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
        let world = self.world.clone();
        let (spare, kept) = (Mutex::default(), Mutex::default());
        Ok(Arc::new(ThreadChannel { end: Arc::new(End { world, hub, position, spare, kept }) }))
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
    end: Arc<End>,
}

/// What a channel shares with its requests.
#[derive(Debug)]
struct End {
    world: Arc<World>,
    hub: Arc<Hub>,
    position: usize,
    /// Requests that were waited for, to be used again.
    #[expect(clippy::vec_box, reason = "the boxes are what is used again")]
    spare: Mutex<Vec<Box<Meeting>>>,
    kept: Mutex<Kept>,
}

impl Channel for ThreadChannel {
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.meet(call, None)
    }

    fn all_reduce(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.meet(call, Some(reduce))
    }

    fn reduce_scatter(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.meet(call, Some(reduce))
    }

    fn reduces_well(&self) -> bool {
        true
    }
}

impl ThreadChannel {
    fn meet(&self, call: Call<'_>, reduce: Option<Reduce>) -> Result<Box<dyn Request>> {
        let end = &self.end;
        let me = end.position;
        let at = match call.route {
            Route::Send { to } => (By::Message { from: me, to }, 0),
            Route::Recv { from } => (By::Message { from, to: me }, 1),
            _ => (By::Collective, me),
        };
        let waits = !matches!(call.route, Route::Send { .. });
        let place = end.hub.publish(&end.world, at, &call, reduce.as_ref())?;
        let mut meeting = lock(&end.spare).pop().unwrap_or_default();
        meeting.0 = Some(Stay { end: end.clone(), place, waits, reduce });
        Ok(meeting)
    }
}

/// A call that this member has come to; nothing once it was waited for.
#[derive(Debug, Default)]
struct Meeting(Option<Stay>);

/// A member's time at a slot, which it leaves when this is dropped.
#[derive(Debug)]
struct Stay {
    end: Arc<End>,
    place: Place,
    /// False for a sender: its message lies there until it is fetched.
    waits: bool,
    reduce: Option<Reduce>,
}

impl Request for Meeting {
    fn wait(mut self: Box<Self>) -> Result<Tensors> {
        let stay = self.0.take().expect("a request is waited for once");
        lock(&stay.end.spare).push(self);
        stay.outcome()
    }

    fn is_ready(&self) -> bool {
        let Stay { end, place, waits, .. } = self.0.as_ref().expect("not waited for yet");
        !waits || place.slot.is_open() || end.hub.is_given_up(&end.world)
    }
}

impl Stay {
    fn outcome(&self) -> Result<Tensors> {
        let Stay { end, place, waits, reduce } = self;
        if !waits {
            return Ok(Tensors::new());
        }
        end.hub.wait(&end.world, place)?;
        let contents = &*place.slot.contents();
        match (&contents.outcome, reduce) {
            (Outcome::Whole(result), _) => Ok(smallvec![result.clone()?]),
            (Outcome::Folds(folds), _) => {
                if folds.work(place.position, contents) {
                    end.hub.wake();
                }
                end.hub.wait_for_work(&end.world, place, || folds.is_done(place.position))?;
                Ok(smallvec![folds.result(place.position)])
            }
            (Outcome::Parts, Some(reduce)) => {
                let of = |at: usize| contents.part(at, place.position);
                Ok(smallvec![lock(&end.kept).fold(reduce, &of)?])
            }
            (Outcome::Parts, None) => Ok(contents.take(place.position)),
        }
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.end.hub.leave(&self.place);
    }
}

/// These locks are a rank's own: nobody waits for them.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
