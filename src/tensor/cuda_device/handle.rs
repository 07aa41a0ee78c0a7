//! Handles of a driver's objects, and the errors of its calls.

use std::fmt;

/// A device address.
pub type Address = u64;
/// The driver's name of a stream, an event, a module or a function; 0 names none.
pub type Handle = u64;

/// A failed call of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverError {
    /// The driver's function that failed.
    pub call: &'static str,
    /// The code of the failure, by name if it has one, e.g. `CUDA_ERROR_ILLEGAL_ADDRESS`.
    pub code: String,
    /// True if memory ran out, so that the call may succeed after some is given back.
    pub out_of_memory: bool,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {}", self.call, self.code)
    }
}

/// The result of a driver's call.
pub type DriverResult<T> = std::result::Result<T, DriverError>;
