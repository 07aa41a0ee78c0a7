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
use super::shared_places::SharedPlaces;
use super::slot::SlotOutcome;
use super::world::ThreadWorld;
use crate::base::lock;
use crate::comm::calls::{BusyWork, Call, Route, Sequence};
use crate::comm::transport::engine::{check_places, copy_parts, start_copying};
use crate::comm::transport::member_place::MemberPlace;
use crate::comm::transport::{CallResults, Channel, Engine, Reduce, Request};
use crate::error::{Error, Result};
use crate::tensor::{Shape, Tensor};

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
        self.publish(call, None, GatherForm::AsSent)
    }

    /// The parts of a large gather are copied once for all members, to the places of one of them, unless these take much
    /// of the room that its memory limit leaves: places count as its memory while any member reads them.
    fn gather_into(&self, call: Call<'_>, mut into: Vec<Tensor>) -> Result<Box<dyn Request>> {
        let place = Some(MemberPlace { index: self.member.position, members: self.member.group.ranks.len() });
        if !SharedPlaces::are_worthwhile(&into) {
            return start_copying(self, place, call, into);
        }
        check_places(&call, place, &mut into)?;
        let offered = SharedPlaces::leave_room(&into).then_some(into);
        self.publish(call, None, GatherForm::SideBySide { offered })
    }

    fn all_reduce(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.publish(call, Some(reduce), GatherForm::AsSent)
    }

    fn reduce_scatter(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.publish(call, Some(reduce), GatherForm::AsSent)
    }

    fn reduces_well(&self) -> bool {
        true
    }
}

impl ThreadChannel {
    /// Publishes this member's next call. `reduce` is the fold of a reduction.
    fn publish(&self, call: Call<'_>, reduce: Option<Reduce>, form: GatherForm) -> Result<Box<dyn Request>> {
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
        let (side_by_side, mut offered) = match form {
            GatherForm::AsSent => (false, None),
            GatherForm::SideBySide { offered } => (true, offered),
        };
        let call = member.group.publish(sequence, position, &call, reduce.as_ref(), &mut offered)?;
        let mut request = lock(&member.spare).pop().unwrap_or_default();
        request.0 = Some(InFlightCall { member: member.clone(), call, waits, reduce, side_by_side });
        Ok(request)
    }
}

/// The form in which a member takes what other members send.
enum GatherForm {
    /// The tensors that they sent.
    AsSent,
    /// Copies side by side. A member offers places, to which parts are copied for all members if it is its turn.
    SideBySide { offered: Option<Vec<Tensor>> },
}

/// Returns copies of tensors of one dtype, as parts of one buffer.
fn copies_side_by_side(parts: &[Tensor]) -> Result<CallResults> {
    let mut len = 0;
    let place = |part: &Tensor| {
        let start = len;
        len += part.numel();
        (start, part.shape().clone())
    };
    let ranges: Vec<(usize, Shape)> = parts.iter().map(place).collect();
    let mut places = Tensor::try_uninit(parts[0].dtype(), [len])?.cut(&ranges)?;
    copy_parts(parts, &mut places)?;
    Ok(places.into())
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
    /// True for a gather whose parts are copied side by side.
    side_by_side: bool,
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
        let InFlightCall { member, call, waits, reduce, side_by_side } = self;
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
            (SlotOutcome::Placed(places), _) if *side_by_side => {
                if places.work(|member| contents.part(member, 0)) {
                    group.wake();
                }
                group.wait_for_work(call, || places.is_done())?;
                Ok(places.tensors())
            }
            // The member whose turn it was to bring places has offered none.
            (SlotOutcome::Parts, None) if *side_by_side => copies_side_by_side(&contents.take(position)),
            (SlotOutcome::Parts | SlotOutcome::Placed(_), None) => Ok(contents.take(position)),
            (SlotOutcome::Placed(_), Some(_)) => unreachable!("a reduction has no places"),
        }
    }
}

impl Drop for InFlightCall {
    fn drop(&mut self) {
        self.member.group.leave(&self.call);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;
    use crate::comm::calls::Lineage;
    use crate::comm::transport::threads::shared_chunks::{CHUNK_BYTES, LARGE_BYTES};
    use crate::comm::{Rank, spmd};
    use crate::tensor::DType;
    use crate::tensor::storage::{pool_stats, set_memory_limit};

    /// The part of `member`: `len` elements, in call `k`.
    fn part(len: usize, member: usize, k: usize) -> Vec<f32> {
        (0..len).map(|i| (i % 1000 + 1000 * member + 10_000 * k) as f32).collect()
    }

    fn places(members: usize, len: usize) -> Result<Vec<Tensor>> {
        let ranges: Vec<_> = (0..members).map(|at| (at * len, Shape::from([len]))).collect();
        Tensor::try_uninit(DType::F32, [members * len])?.cut(&ranges)
    }

    fn address(x: &Tensor) -> Result<usize> {
        Ok(x.as_bytes()?.as_ptr().addr())
    }

    fn is_right(parts: &[Tensor], len: usize, k: usize) -> bool {
        parts.iter().enumerate().all(|(at, x)| x.as_slice::<f32>().is_ok_and(|x| x == part(len, at, k)))
    }

    /// Lengths around the least that is copied once, and parts of several chunks. Results are waited for in reverse order.
    /// Rank 1 drops two calls, one that is its turn to bring places and one that is another's.
    #[test]
    fn large_gathers_are_copied_once_for_all_members() {
        for n in [2, 3, 4] {
            let large = LARGE_BYTES.div_ceil(4 * n);
            let lens = [0, 1, large - 1, large, large + 1, CHUNK_BYTES / 4 * 2, CHUNK_BYTES / 4 * 2 + 3];
            let run = move |rank: Rank| {
                let (group, me) = (rank.world(), rank.rank());
                let start = |(k, &len): (usize, &usize)| -> Result<_> {
                    let x = Tensor::from_vec(part(len, me, k), [len])?;
                    Ok((k, len, group.all_gather_into(&x, places(n, len)?)))
                };
                let started = lens.iter().enumerate().map(start).collect::<Result<Vec<_>>>()?;
                let mut found = vec![];
                for (k, len, pending) in started.into_iter().rev() {
                    if me == 1 && (k == 4 || k == 5) {
                        drop(pending);
                        continue;
                    }
                    let parts = pending.wait()?;
                    assert!(is_right(&parts, len, k), "{n} members, {len} elements, call {k}");
                    let whole = Tensor::joined(parts.iter().enumerate().map(|(at, part)| (at * len, part)));
                    // All results are held until the end, so that no two have one address by chance.
                    found.push((k, whole.expect("parts of one buffer, in order")));
                }
                group.barrier()?;
                found.iter().map(|(k, whole)| Ok((*k, address(whole)?))).collect::<Result<HashMap<_, _>>>()
            };
            let found = spmd(n, run).expect("no rank fails");
            for (k, &len) in lens.iter().enumerate().filter(|(_, len)| **len > 0) {
                let addresses: HashSet<usize> =
                    found.iter().filter_map(|rank| rank.get(&k).copied()).collect();
                let expected = if len >= large { 1 } else { n };
                assert_eq!(addresses.len(), expected, "{n} members, {len} elements");
            }
        }
    }

    /// Members may differ in whether they have places: those that have get copies side by side, the others tensors as they
    /// were sent.
    #[test]
    fn members_without_places_take_tensors() {
        let len = LARGE_BYTES / 4;
        for asks in [[true, false, true], [false, true, false], [true, true, false]] {
            let run = move |rank: Rank| {
                let group = rank.world();
                for k in 0..3 {
                    let x = Tensor::from_vec(part(len, rank.rank(), k), [len])?;
                    let parts = match asks[rank.rank()] {
                        true => group.all_gather_into(&x, places(3, len)?).wait()?,
                        false => group.all_gather(&x, &vec![Shape::from([len]); 3])?,
                    };
                    assert!(is_right(&parts, len, k), "{asks:?}, rank {}, call {k}", rank.rank());
                    let whole = Tensor::joined(parts.iter().enumerate().map(|(at, part)| (at * len, part)));
                    assert_eq!(whole.is_some(), asks[rank.rank()]);
                }
                Ok(())
            };
            spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
        }
    }

    #[test]
    fn a_rank_with_little_room_brings_no_places() {
        let len = LARGE_BYTES / 4;
        let run = move |rank: Rank, room: usize| {
            if rank.rank() == 1 {
                set_memory_limit(pool_stats().live_bytes + room);
            }
            let mut held = vec![];
            for k in 0..3 {
                let x = Tensor::from_vec(part(len, rank.rank(), k), [len])?;
                let parts = rank.world().all_gather_into(&x, places(3, len)?).wait()?;
                assert!(is_right(&parts, len, k), "rank {}, call {k}", rank.rank());
                held.push(parts);
            }
            rank.world().barrier()?;
            // The limit is the thread's, which may be another test's later.
            set_memory_limit(usize::MAX);
            held.iter().map(|parts| address(&parts[0])).collect::<Result<Vec<_>>>()
        };
        // The limited rank's turn is the second call. Its copies of that one's parts fit in any case.
        for (room, shares) in [(24 * LARGE_BYTES, false), (1000 * LARGE_BYTES, true)] {
            let found = spmd(3, move |rank| run(rank, room)).unwrap_or_else(|e| panic!("{e}"));
            let distinct = |k: usize| found.iter().map(|rank| rank[k]).collect::<HashSet<_>>().len();
            assert_eq!([0, 1, 2].map(distinct), [1, if shares { 1 } else { 3 }, 1], "{room} bytes");
        }
    }

    #[test]
    fn places_that_do_not_fit_are_refused() {
        let run = |rank: Rank| {
            let channel = rank.engine().open(&[0, 1], "pair")?;
            let x = Tensor::zeros(DType::F32, [LARGE_BYTES]);
            let shapes = vec![x.shape().clone(); 2];
            let (outgoing, incoming) = (std::slice::from_ref(&x), &shapes[..]);
            let call = Call {
                name: "all_gather",
                route: Route::Gather,
                op: None,
                dtype: DType::F32,
                outgoing,
                incoming,
                lineage: Lineage::NONE,
            };
            let shared = Tensor::zeros(DType::F32, [LARGE_BYTES]);
            for into in [
                places(2, LARGE_BYTES + 1)?,
                places(3, LARGE_BYTES)?,
                vec![shared.clone(), Tensor::zeros(DType::F32, [LARGE_BYTES])],
            ] {
                let refused = channel.gather_into(call, into).err().expect("refused").to_string();
                assert!(refused.starts_with("all_gather: "), "{refused}");
            }
            // Nothing was published: the next call is the first.
            assert!(channel.gather_into(call, places(2, LARGE_BYTES)?)?.wait().is_ok());
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
