//! The traits of an engine, which moves tensors between the members of a group.
//!
//! [`Group`](crate::comm::Group) adds argument checks, reductions and blocking calls to every engine. An engine
//! numbers its calls, compares those of the members ([`Call::agrees`]), gives up after a deadline, and can be
//! aborted.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::fold::{Reduce, fold};
use super::member_place::MemberPlace;
use crate::comm::calls::{BusyWork, Call, Route};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// One rank's end of a transport between ranks: threads, MPI, NCCL, or a dry run.
///
/// ```
/// use isoshard::comm::spmd;
///
/// spmd(2, |rank| {
///     let engine = rank.engine();
///     assert_eq!((engine.rank(), engine.world_len()), (rank.rank(), 2));
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
pub trait Engine: Send + Sync + fmt::Debug {
    /// Returns this rank's number in the world.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the world.
    fn world_len(&self) -> usize;

    /// Returns the time for which a collective waits for its members.
    fn deadline(&self) -> Duration;

    /// Opens the channel of a group. All members open their common groups in the same order; the same ranks and name
    /// always give the same channel. The caller has checked that `ranks` holds this rank and no duplicates.
    ///
    /// # Errors
    /// Returns an error if the transport fails.
    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>>;

    /// Opens the channels of groups that together hold all ranks of the world, one group per `color`. All ranks call
    /// this at once. An engine that opens a group slowly can split the world's channel instead.
    ///
    /// Provided: [`Engine::open`].
    ///
    /// # Errors
    /// Returns an error if the transport fails.
    fn split(&self, part: &[usize], color: usize, name: &str) -> Result<Arc<dyn Channel>> {
        let _ = color;
        self.open(part, name)
    }

    /// Tells the other ranks which work this rank has announced ([`Rank::busy`](crate::comm::Rank::busy)), or with
    /// `None` that it has no announced work any more. Calls that wait for this rank then last longer than the
    /// deadline. Returns at once; calls of one rank do not overlap.
    ///
    /// Provided: nothing, for engines without peers.
    fn announce(&self, work: Option<BusyWork>) {
        let _ = work;
    }

    /// Ends this rank's program: waits for the calls that it has started, and tells the other ranks not to wait for
    /// it any more.
    ///
    /// # Errors
    /// Returns a fault that happened since the last call.
    fn end(&self) -> Result<()>;

    /// Returns the ranks that continue together after others have failed: those that call this before the deadline,
    /// ascending, the same on all of them. Groups that are opened from now on fail only if one of their own members
    /// does.
    ///
    /// Provided: an error, for engines whose transport does not survive the loss of a rank.
    ///
    /// # Errors
    /// Refuses a rank without which the other ranks have continued already.
    fn survivors(&self) -> Result<Vec<usize>> {
        Err(Error::unsupported(
            "survivors",
            "this engine cannot go on without a rank",
            format!("rank {} of {}", self.rank(), self.world_len()),
            "start the program again from a checkpoint",
        ))
    }

    /// Aborts the whole world: all collectives, waiting or later, fail on every rank with `cause`. Only the first
    /// abort counts.
    fn abort(&self, cause: &Error);
}

/// One rank's end of a group. Its calls are numbered in the order in which this rank starts them.
///
/// ```
/// use isoshard::comm::{Call, Lineage, Route, spmd};
/// use isoshard::tensor::{DType, Shape, Tensor};
///
/// spmd(2, |rank| {
///     let channel = rank.engine().open(&[0, 1], "pair")?;
///     let (x, shapes) = (Tensor::from_vec(vec![rank.rank() as f32; 3], [3])?, vec![Shape::from([3]); 2]);
///     let (outgoing, incoming) = (std::slice::from_ref(&x), &shapes[..]);
///     let (route, dtype, lineage) = (Route::Gather, DType::F32, Lineage::NONE);
///     let call = Call { name: "gather", route, op: None, dtype, outgoing, incoming, lineage };
///     let parts = channel.start(call)?.wait()?;
///     assert_eq!((parts[0].to_vec::<f32>()?, parts[1].to_vec::<f32>()?), (vec![0.0; 3], vec![1.0; 3]));
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
pub trait Channel: Send + Sync + fmt::Debug {
    /// Starts a call and returns at once. The request shares the tensors while they are in flight.
    ///
    /// # Errors
    /// Returns a fault that the group has already.
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>>;

    /// Starts a gather whose parts arrive in `into`: one tensor per member of the shape in `call.incoming`, all on the
    /// call's device, contiguous, and held by nothing else. The request yields them, this member's own part among them, or
    /// those of another member, which members then share.
    ///
    /// Provided: [`Channel::start`], after which each part is copied.
    ///
    /// # Errors
    /// Refuses other tensors in `into`. Returns the errors of [`Channel::start`].
    fn gather_into(&self, call: Call<'_>, into: Vec<Tensor>) -> Result<Box<dyn Request>> {
        start_copying(self, None, call, into)
    }

    /// Starts an all-reduce: `call` sends one contiguous tensor to all members, and the request yields the reduction
    /// alone.
    ///
    /// Provided: an exchange, after which every member folds all parts. Each rank sends and receives `(n - 1) * x`
    /// bytes.
    ///
    /// # Errors
    /// Returns the errors of [`Channel::start`].
    fn all_reduce(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        Ok(Box::new(Folding { inner: self.start(call)?, reduce }))
    }

    /// Starts a reduce-scatter: `call` sends a contiguous tensor to each member, and the request yields the reduction
    /// of the tensors that arrive.
    ///
    /// Provided: an exchange, then a fold. Sends and receives the bytes of `call`.
    ///
    /// # Errors
    /// Returns the errors of [`Channel::start`].
    fn reduce_scatter(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        Ok(Box::new(Folding { inner: self.start(call)?, reduce }))
    }

    /// Returns true if [`Channel::all_reduce`] of a large tensor is faster than a reduce-scatter followed by an
    /// all-gather, as it is if ranks share memory.
    fn reduces_well(&self) -> bool {
        false
    }
}

/// The tensors that a call yields. A list of one allocates nothing.
pub type CallResults = SmallVec<[Tensor; 1]>;

/// A call in flight. Dropping it neither blocks nor affects the other members; forgetting it only leaks memory.
pub trait Request: Send {
    /// Waits for the tensors that arrive: n in group order for a [gather] and an [all-to-all], one for a [broadcast]
    /// and a [receive], none for other calls.
    ///
    /// [gather]: crate::comm::Route::Gather
    /// [all-to-all]: crate::comm::Route::AllToAll
    /// [broadcast]: crate::comm::Route::Broadcast
    /// [receive]: crate::comm::Route::Recv
    ///
    /// # Errors
    /// Returns the call's fault, after the engine's deadline at the latest.
    fn wait(self: Box<Self>) -> Result<CallResults>;

    /// Returns true if `wait` would not wait for another rank.
    fn is_ready(&self) -> bool;
}

/// Starts a reduction as an exchange, after which the member folds all parts.
///
/// # Errors
/// Refuses, before any tensor is sent, a reduction that does not fit the call. Returns the errors of [`Channel::start`].
pub(super) fn start_folding(
    channel: &dyn Channel,
    reduce: Reduce,
    call: Call<'_>,
    place: MemberPlace,
) -> Result<Box<dyn Request>> {
    reduce.check(&call, place.index, place.members)?;
    Ok(Box::new(Folding { inner: channel.start(call)?, reduce }))
}

/// Starts a gather as a call after which each part is copied to its place.
///
/// # Errors
/// Returns the errors of [`Channel::gather_into`].
pub(super) fn start_copying(
    channel: &(impl Channel + ?Sized),
    place: Option<MemberPlace>,
    call: Call<'_>,
    mut into: Vec<Tensor>,
) -> Result<Box<dyn Request>> {
    check_places(&call, place, &mut into)?;
    Ok(Box::new(CopyingGather { inner: channel.start(call)?, into }))
}

/// Copies each part of a gather to its place.
///
/// # Errors
/// Refuses a part of another shape or dtype.
pub(super) fn copy_parts(parts: &[Tensor], into: &mut [Tensor]) -> Result<()> {
    for (part, into) in parts.iter().zip(into) {
        if (part.shape(), part.dtype()) != (into.shape(), into.dtype()) {
            let given = format!("{} for {}", part.notation(), into.notation());
            return Err(Error::invalid("gather", "a part has another shape than its place", given, ""));
        }
        let strides = into.shape().strides();
        part.copy_block(into, part.shape(), (0, part.strides()), (0, &strides))?;
    }
    Ok(())
}

/// Checks that a member's call has as many tensors and shapes as its route takes, and that the member at its other end
/// exists: engines index by these.
///
/// # Errors
/// Refuses other calls, in their names.
pub(super) fn check_lists(call: &Call<'_>, place: MemberPlace) -> Result<()> {
    let MemberPlace { index, members } = place;
    let (peer, sent, shapes) = match call.route {
        Route::Gather => (0, 1, members),
        Route::AllToAll => (0, members, members),
        Route::Broadcast { root } => (root, usize::from(root == index), 1),
        Route::Send { to } => (to, 1, 1),
        Route::Recv { from } => (from, 0, 1),
        Route::Barrier => (0, 0, 0),
    };
    if peer >= members {
        let given = format!("member {peer} of {members}");
        return Err(Error::invalid(call.name, "the group has no such member", given, ""));
    }
    if (call.outgoing.len(), call.incoming.len()) == (sent, shapes) {
        return Ok(());
    }
    let given = format!("{} tensors and {} shapes", call.outgoing.len(), call.incoming.len());
    let rule = format!("the call sends {sent} tensors and has {shapes} shapes");
    Err(Error::invalid(call.name, rule, given, ""))
}

/// Checks that each part of a gather fits the tensor in `into` in which it arrives: transports write to its memory without
/// looking at it again. `place` is this member's, if it is known.
///
/// # Errors
/// Refuses, in the call's name, other lists, and tensors that are not the parts'.
pub(super) fn check_places(call: &Call<'_>, place: Option<MemberPlace>, into: &mut [Tensor]) -> Result<()> {
    let refuse = |rule, given| Err(Error::invalid(call.name, rule, given, ""));
    let members = place.map_or(into.len(), |place| place.members);
    let lens = [call.outgoing.len(), call.incoming.len(), into.len()];
    if call.route != Route::Gather || lens != [1, members, members] {
        let [sent, shapes, places] = lens;
        let given = format!("{sent} tensors, {shapes} shapes and {places} places of {members} members");
        return refuse("a gather sends one tensor, and has a shape and a place per member", given);
    }
    let (own, device) = (&call.outgoing[0], call.outgoing[0].device());
    if own.dtype() != call.dtype || place.is_some_and(|place| *own.shape() != call.incoming[place.index]) {
        return refuse("the tensor sent is not this member's part", own.notation());
    }
    let wrong = into.iter_mut().zip(call.incoming).find_map(|(x, shape)| {
        let fits = x.shape() == shape && (x.dtype(), x.device()) == (call.dtype, device);
        (!fits || !x.is_unique())
            .then(|| format!("{} on {} for {}{shape}", x.notation(), x.device(), call.dtype))
    });
    match wrong {
        Some(given) => refuse(
            "a place has another shape, dtype or device than its part, is not contiguous, or is shared",
            given,
        ),
        None => Ok(()),
    }
}

/// A gather whose parts are copied to where they are wanted once they have arrived.
struct CopyingGather {
    inner: Box<dyn Request>,
    into: Vec<Tensor>,
}

impl Request for CopyingGather {
    fn wait(self: Box<Self>) -> Result<CallResults> {
        let CopyingGather { inner, mut into } = *self;
        copy_parts(&inner.wait()?, &mut into)?;
        Ok(into.into())
    }

    fn is_ready(&self) -> bool {
        self.inner.is_ready()
    }
}

/// An exchange whose parts are folded once they have arrived.
struct Folding {
    inner: Box<dyn Request>,
    reduce: Reduce,
}

impl Request for Folding {
    fn wait(self: Box<Self>) -> Result<CallResults> {
        let parts = self.inner.wait()?;
        Ok(smallvec![fold(&self.reduce, &parts)?])
    }

    fn is_ready(&self) -> bool {
        self.inner.is_ready()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Group, spmd};
    use crate::tensor::{DType, FoldOrder, ReduceOp, Shape};

    /// An engine with only the required methods, over another engine.
    #[derive(Debug)]
    struct ExchangeOnly<T: ?Sized>(Arc<T>);

    impl Engine for ExchangeOnly<dyn Engine> {
        fn rank(&self) -> usize {
            self.0.rank()
        }
        fn world_len(&self) -> usize {
            self.0.world_len()
        }
        fn deadline(&self) -> Duration {
            self.0.deadline()
        }
        fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
            Ok(Arc::new(ExchangeOnly(self.0.open(ranks, name)?)))
        }
        fn end(&self) -> Result<()> {
            self.0.end()
        }
        fn abort(&self, cause: &Error) {
            self.0.abort(cause);
        }
    }

    impl Channel for ExchangeOnly<dyn Channel> {
        fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
            self.0.start(call)
        }
    }

    #[test]
    fn provided_reductions_have_the_bits_of_an_engines_own() {
        for n in [1, 2, 3, 5] {
            let run = move |rank: crate::comm::Rank| {
                let everyone: Vec<usize> = (0..n).collect();
                let plain = Group::open(&ExchangeOnly(rank.engine().clone()), &everyone, "plain")?;
                for len in [0, 1, 7, 16_383, 16_384, 40_001] {
                    let value = |i: usize| ((i + 1) * (rank.rank() + 3)) as f32 * 0.1;
                    let x = Tensor::from_vec((0..len).map(value).collect(), [len])?;
                    let want = rank.world().all_reduce(&x, ReduceOp::Sum)?.to_vec::<f32>()?;
                    assert_eq!(plain.all_reduce(&x, ReduceOp::Sum)?.to_vec::<f32>()?, want);
                    assert_eq!(plain.all_reduce_async(&x, ReduceOp::Sum).wait()?.to_vec::<f32>()?, want);
                }
                Ok(())
            };
            spmd(n, run).unwrap();
        }
    }

    /// Members with two parts, one and none; three results.
    #[test]
    fn several_parts_of_a_member_in_one_phase_and_in_two() {
        use crate::tensor::FoldStep::{Join, Push};
        let run = |rank: crate::comm::Rank| {
            let plain = Group::open(&ExchangeOnly(rank.engine().clone()), &[0, 1, 2], "plain")?;
            let push = |operand, node| Push { operand, node };
            for (nodes, steps) in [
                (vec![2, 1, 0], vec![push(0, 0), push(0, 1), Join, push(1, 0), Join]),
                (vec![0, 1, 2], vec![push(1, 0), push(2, 0), Join, push(2, 1)]),
            ] {
                let order = Arc::new(FoldOrder::new(nodes, steps));
                for len in [1, 7, 16_383, 40_001] {
                    let reduce = Reduce { op: ReduceOp::Sum, order: order.clone(), shape: [len].into() };
                    let shape = reduce.part_shape(rank.rank());
                    let value = |i: usize| ((i + 1) * (rank.rank() + 3)) as f32 * 0.1;
                    let x = Tensor::from_vec((0..shape.numel()).map(value).collect(), shape)?;
                    let want = rank.world().all_reduce_with(&x, reduce.clone())?;
                    let got = plain.all_reduce_with(&x, reduce.clone())?;
                    assert_eq!([got.shape(), want.shape()], [&reduce.out_shape(); 2]);
                    assert_eq!(got.to_vec::<f32>()?, want.to_vec::<f32>()?);
                }
            }
            Ok(())
        };
        spmd(3, run).unwrap();
    }

    /// For Miri and the sanitizers too (`tests/sanitize.sh`), which watch the memory that ranks share.
    #[test]
    fn ranks_share_tensors_in_every_call() {
        let run = |rank: crate::comm::Rank| {
            let (world, me) = (rank.world(), rank.rank());
            let x = Tensor::from_vec((0..40).map(|i| (i + me) as f32).collect(), [40])?;
            let sum: Vec<f32> = (0..40).map(|i| (3 * i + 3) as f32).collect();
            let shapes = vec![Shape::from([40]); 3];
            for _ in 0..3 {
                let pending = world.all_reduce_async(&x, ReduceOp::Sum);
                let gathered = world.all_gather(&x, &shapes)?;
                assert_eq!(gathered[2].as_slice::<f32>()?[0], 2.0);
                let mut got = pending.wait()?;
                assert_eq!(got.as_slice::<f32>()?, sum);
                got.make_mut::<f32>()?.fill(-1.0);
                let parts = (0..3).map(|i| x.narrow(0, 0, 10 + i)).collect::<Result<Vec<_>>>()?;
                let shard = world.reduce_scatter(parts, ReduceOp::Sum)?;
                assert_eq!(shard.as_slice::<f32>()?, &sum[..10 + me]);
                let root = world.broadcast((me == 1).then_some(&x), 1, DType::F32, &Shape::from([40]))?;
                assert_eq!(root.as_slice::<f32>()?[39], 40.0);
            }
            world.barrier()?;
            Ok(x)
        };
        let own = spmd(3, run).expect("no rank fails");
        assert_eq!(own[1].as_slice::<f32>().expect("f32")[0], 1.0);
    }
}
