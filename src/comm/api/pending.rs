//! The handle of a collective in flight.

use std::fmt;

use crate::comm::diagnostics::RecordedCall;
use crate::comm::transport::{CallResults, Request};
use crate::error::Result;

type AssembleResult<T> = Box<dyn FnOnce(CallResults) -> Result<T> + Send>;

/// A collective that was started and whose result has not been waited for.
///
/// Several may be in flight at once and be waited for in any order. Dropping one neither blocks nor disturbs other
/// ranks, because this rank's tensors are already on their way.
///
/// ```
/// use isoshard::comm::spmd;
/// use isoshard::tensor::{ReduceOp, Tensor};
/// let sums = spmd(2, |rank| {
///     let world = rank.world();
///     let one = world.all_reduce_async(&Tensor::scalar(1i64), ReduceOp::Sum);
///     let ten = world.all_reduce_async(&Tensor::scalar(10i64), ReduceOp::Sum);
///     // ... compute meanwhile ...
///     Ok((ten.wait()?.item()?, one.wait()?.item()?))
/// })?;
/// assert_eq!(sums, [(20.0, 2.0); 2]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[must_use = "a collective's errors are lost unless it is waited for"]
pub struct Pending<T> {
    state: PendingState<T>,
}

enum PendingState<T> {
    Ready(Result<T>),
    Running { request: Box<dyn Request>, finish: AssembleResult<T>, ticket: RecordedCall },
}

impl<T> Pending<T> {
    /// A result without communication, or an error at the start, which [`Pending::wait`] returns.
    pub(crate) fn ready(result: Result<T>) -> Self {
        Pending { state: PendingState::Ready(result) }
    }

    /// A recorded request, and the function that makes the result from the received tensors.
    pub(crate) fn running(
        request: Result<(Box<dyn Request>, RecordedCall)>,
        finish: impl FnOnce(CallResults) -> Result<T> + Send + 'static,
    ) -> Self {
        match request {
            Ok((request, ticket)) => {
                Pending { state: PendingState::Running { request, finish: Box::new(finish), ticket } }
            }
            Err(error) => Pending::ready(Err(error)),
        }
    }

    /// Returns the same call, whose result is that of `f`.
    pub(crate) fn map<U>(self, f: impl FnOnce(T) -> Result<U> + Send + 'static) -> Pending<U>
    where
        T: 'static,
    {
        let state = match self.state {
            PendingState::Ready(result) => PendingState::Ready(result.and_then(f)),
            PendingState::Running { request, finish, ticket } => {
                PendingState::Running { request, finish: Box::new(|parts| finish(parts).and_then(f)), ticket }
            }
        };
        Pending { state }
    }

    /// Waits for the result and returns it.
    ///
    /// ```
    /// let ranks = isoshard::comm::spmd(2, |rank| rank.world().barrier_async().wait())?;
    /// assert_eq!(ranks, [(), ()]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the collective's error: a [`CommFault`](crate::CommFault) or refused arguments.
    pub fn wait(self) -> Result<T> {
        match self.state {
            PendingState::Ready(result) => result,
            PendingState::Running { request, finish, ticket } => {
                ticket.wait();
                match request.wait() {
                    Ok(parts) => {
                        ticket.complete();
                        finish(parts)
                    }
                    Err(error) => Err(ticket.fail(error)),
                }
            }
        }
    }

    /// Returns true if [`Pending::wait`] would return without waiting for another rank.
    ///
    /// ```
    /// let alone = isoshard::comm::spmd(1, |rank| Ok(rank.world().barrier_async().is_ready()))?;
    /// assert_eq!(alone, [true]); // a group of one never waits
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn is_ready(&self) -> bool {
        match &self.state {
            PendingState::Ready(_) => true,
            PendingState::Running { request, .. } => request.is_ready(),
        }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("is_ready", &self.is_ready()).finish()
    }
}
