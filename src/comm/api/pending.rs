//! A collective in flight.

use std::fmt;

use crate::comm::diagnostics::RecordedCall;
use crate::comm::transport::{Request, Tensors};
use crate::error::Result;

type AssembleResult<T> = Box<dyn FnOnce(Tensors) -> Result<T> + Send>;

/// The result of a collective that was started and not yet waited for.
///
/// Several may be in flight and be waited for in any order. Dropping one neither blocks nor disturbs the other
/// ranks: this rank's contribution is out already.
#[must_use = "a collective's errors are lost unless it is waited for"]
pub struct Pending<T> {
    state: PendingState<T>,
}

enum PendingState<T> {
    Ready(Result<T>),
    Running { request: Box<dyn Request>, finish: AssembleResult<T>, ticket: RecordedCall },
}

impl<T> Pending<T> {
    /// A result that is there, or a failure to start: reported by [`Pending::wait`].
    pub(crate) fn ready(result: Result<T>) -> Self {
        Pending { state: PendingState::Ready(result) }
    }

    /// A recorded request, and what makes the result from the tensors that come.
    pub(crate) fn running(
        request: Result<(Box<dyn Request>, RecordedCall)>,
        finish: impl FnOnce(Tensors) -> Result<T> + Send + 'static,
    ) -> Self {
        match request {
            Ok((request, ticket)) => {
                Pending { state: PendingState::Running { request, finish: Box::new(finish), ticket } }
            }
            Err(error) => Pending::ready(Err(error)),
        }
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// Those of the collective: [`CommFault`](crate::CommFault)s, and refused arguments.
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

    /// True where [`Pending::wait`] would not wait for another rank.
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
