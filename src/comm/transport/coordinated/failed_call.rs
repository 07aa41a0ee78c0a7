//! Calls that failed when they were started.

use std::sync::Arc;

use super::membership::Membership;
use crate::comm::transport::{CallResults, Request};
use crate::error::{Error, Result};

/// A call that a fault kept from starting. The program gets the fault when it waits, as with a call that fails later.
pub(in crate::comm::transport) struct FailedCall {
    membership: Arc<Membership>,
    error: Error,
}

impl FailedCall {
    /// Keeps a fault between ranks for [`Request::wait`]. Other errors are returned at once.
    pub fn keep(membership: &Arc<Membership>, error: Error) -> Result<Box<dyn Request>> {
        match error {
            Error::Comm(_) => Ok(Box::new(FailedCall { membership: membership.clone(), error })),
            other => Err(other),
        }
    }
}

impl Request for FailedCall {
    fn wait(self: Box<Self>) -> Result<CallResults> {
        self.membership.give(Err(self.error))
    }

    fn is_ready(&self) -> bool {
        true
    }
}
