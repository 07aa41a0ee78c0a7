//! Handles of drivers and their libraries, and their answers when they refuse.

use std::fmt;

/// A device address.
pub type Address = u64;
/// A stream, an event, a module or a function, as its driver names it; 0 is none.
pub type Handle = u64;

/// The driver's refusal: its own code and words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverError {
    /// The driver's function that failed.
    pub call: &'static str,
    /// Its code, by name where it has one, e.g. `CUDA_ERROR_ILLEGAL_ADDRESS`.
    pub code: String,
    /// True where memory ran out, which may be cured by giving some back.
    pub out_of_memory: bool,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {}", self.call, self.code)
    }
}

/// The result of a driver's call.
pub type DriverResult<T> = std::result::Result<T, DriverError>;
