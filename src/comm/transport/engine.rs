//! The traits of an engine: one asynchronous exchange between the members of a group.
//!
//! Everything else (argument checks, reductions, blocking calls) stands above it, once. An engine keeps sequence
//! numbers and a deadline, compares what the members brought ([`Call::agrees`]) and can be aborted.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::fold::{Reduce, fold};
use crate::comm::calls::Call;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// One rank's end of a way for ranks to talk: threads, MPI, NCCL, or a dry run.
pub trait Engine: Send + Sync + fmt::Debug {
    /// This rank, numbered in the world.
    fn rank(&self) -> usize;

    /// The number of ranks in the world.
    fn world_len(&self) -> usize;

    /// The time for which a collective waits for its members.
    fn deadline(&self) -> Duration;

    /// Opens the channel of a group. All members open it, in the same order among the groups they share; the same
    /// ranks and name are the same channel. The caller has checked that `ranks` holds this rank and no duplicates.
    ///
    /// # Errors
    /// Those of the engine's transport.
    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>>;

    /// As [`Engine::open`], by all ranks of the world at once, each for its own part: `color` is the same on its members and
    /// another in every other part. Some engines open so what they open slowly otherwise.
    ///
    /// # Errors
    /// Those of the engine's transport.
    fn split(&self, part: &[usize], color: usize, name: &str) -> Result<Arc<dyn Channel>> {
        let _ = color;
        self.open(part, name)
    }

    /// Ends this rank's part in the world: the calls that it has started are waited for, and no rank need wait for it any
    /// more.
    ///
    /// # Errors
    /// A fault that happened since the last call.
    fn end(&self) -> Result<()>;

    /// The ranks that go on together after others have failed: those that call this before the deadline, in ascending order,
    /// the same on all of them. Groups opened from now on heed failures of their own members alone.
    ///
    /// Provided: a refusal, by engines whose transport does not outlive a rank.
    ///
    /// # Errors
    /// Refuses a rank without which the others have gone on already.
    fn survivors(&self) -> Result<Vec<usize>> {
        Err(Error::unsupported(
            "survivors",
            "this engine cannot go on without a rank",
            format!("rank {} of {}", self.rank(), self.world_len()),
            "start the program again from a checkpoint",
        ))
    }

    /// Gives up the whole world: collectives that wait, and all later ones, fail on every rank with `cause`. Only
    /// the first abort counts.
    fn abort(&self, cause: &Error);
}

/// One rank's end of a group. Calls are numbered in the order in which this rank starts them.
pub trait Channel: Send + Sync + fmt::Debug {
    /// Starts a call and returns at once. The request shares the tensors while they are in flight.
    ///
    /// # Errors
    /// A fault of the group that is known already.
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>>;

    /// Starts an all-reduce: `call` routes one contiguous tensor to all; the request yields the reduction alone.
    ///
    /// Provided: an exchange, and every member folds everything. Sends and receives `(n - 1) * x` bytes per rank.
    ///
    /// # Errors
    /// As [`Channel::start`].
    fn all_reduce(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        Ok(Box::new(Folding { inner: self.start(call)?, reduce }))
    }

    /// Starts a reduce-scatter: `call` routes a contiguous tensor to each; the request yields the reduction of what comes
    /// here.
    ///
    /// Provided: an exchange, then a fold. Sends and receives what `call` does.
    ///
    /// # Errors
    /// As [`Channel::start`].
    fn reduce_scatter(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        Ok(Box::new(Folding { inner: self.start(call)?, reduce }))
    }

    /// True if [`Channel::all_reduce`] of a large tensor is better than a reduce-scatter followed by an
    /// all-gather, as it is if ranks share memory.
    fn reduces_well(&self) -> bool {
        false
    }
}

/// The tensors that a call yields. A list of one takes no memory of its own.
pub type Tensors = SmallVec<[Tensor; 1]>;

/// A call in flight. Dropping it neither blocks nor disturbs the other members; forgetting it leaks memory only.
pub trait Request: Send {
    /// The tensors that arrived: n in group order for a [gather] and an [all-to-all], one for a [broadcast] and a
    /// [receive], none for the others.
    ///
    /// [gather]: crate::comm::Route::Gather
    /// [all-to-all]: crate::comm::Route::AllToAll
    /// [broadcast]: crate::comm::Route::Broadcast
    /// [receive]: crate::comm::Route::Recv
    ///
    /// # Errors
    /// The call's fault, after the engine's deadline at the latest.
    fn wait(self: Box<Self>) -> Result<Tensors>;

    /// True if `wait` would not wait for another rank.
    fn is_ready(&self) -> bool;
}

/// An exchange whose parts are folded once they have come.
struct Folding {
    inner: Box<dyn Request>,
    reduce: Reduce,
}

impl Request for Folding {
    fn wait(self: Box<Self>) -> Result<Tensors> {
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
    use crate::tensor::{FoldOrder, ReduceOp};

    /// An engine that can do no more than exchange, over one that can.
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

    /// Members with two parts, one and none; three of them make two results.
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
}
