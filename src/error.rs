//! Errors, and the one notation in which the crate writes shapes and layouts.
//!
//! An [`Error`] says *who must act*. Its text has one form, `verb: the rule that broke; what was given; what to
//! do`, in lower case, with numbers beside what they count. Tensors are written `f32[64, 128]@(dp:S0, tp:R)`
//! everywhere: in errors, in `Debug`, in the documentation.
//!
//! A sharding error is computed from facts that all ranks share, so all ranks fail alike, at the same call.

mod fault;

use std::fmt;

pub use fault::{CallId, CommFault, Divergence, LastCall, NotFinite, Wait};

/// The result of every fallible function here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, sorted by who must act.
///
/// Cloning is cheap enough for the failure path: one cause is reported on every rank.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// The caller passed a shape, dtype, index or attribute that the function cannot take.
    #[error("{0}")]
    Invalid(Box<Refusal>),
    /// The layouts of the operands do not allow the operation, or would need a move that was forbidden.
    #[error("{0}")]
    Sharding(Box<Refusal>),
    /// The feature is not built; the text names it.
    #[error("{0}")]
    Unsupported(Box<Refusal>),
    /// A collective did not complete, because ranks disagreed, stalled or failed.
    #[error("{0}")]
    Comm(Box<CommFault>),
    /// A rank of an SPMD program ended with an error or a panic.
    #[error("rank {rank}: {cause}")]
    Rank {
        /// The rank that failed first, numbered in the world.
        rank: usize,
        /// Its error, or its panic message.
        cause: Box<Failure>,
    },
    /// A device's memory does not suffice.
    #[error("{0}")]
    OutOfMemory(Box<MemoryFault>),
    /// Ranks that should hold the same elements hold others.
    #[error("{0}")]
    Diverged(Box<Divergence>),
    /// An element is infinite or no number.
    #[error("{0}")]
    NotFinite(Box<NotFinite>),
    /// A device, its driver or its compiler failed.
    #[error("{verb}: {device} failed; got {reason}")]
    Device {
        /// What was being done: the function, or the kernel with its grid and operands.
        verb: String,
        /// The device, e.g. `cuda:0`.
        device: String,
        /// The driver's words.
        reason: String,
    },
    /// Reading or writing a file failed.
    #[error("{verb}: cannot access the file; got {path}: {reason}")]
    Io {
        /// The function that wanted the file.
        verb: &'static str,
        /// The file's path.
        path: String,
        /// The operating system's reason.
        reason: String,
    },
}

/// Why a call was refused: `verb: rule; given; remedy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The function or operator that refused.
    pub verb: String,
    /// The rule that was broken.
    pub rule: String,
    /// What was given, in the crate's notation. Printed after "got".
    pub given: String,
    /// What to do instead; may be empty.
    pub remedy: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.verb, self.rule)?;
        if !self.given.is_empty() {
            write!(f, "; got {}", self.given)?;
        }
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}

/// Why a device had no memory for a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryFault {
    /// The device, e.g. `cuda:0`.
    pub device: String,
    /// What was wanted, e.g. `f32[64, 128]`.
    pub wanted: String,
    /// Its size in bytes.
    pub wanted_bytes: usize,
    /// Bytes of live tensors, of all ranks on the device.
    pub live_bytes: usize,
    /// Bytes kept for reuse by this rank and by the others.
    pub kept_bytes: usize,
    /// The limit that was reached: one that was set, or the device's size.
    pub limit_bytes: usize,
}

impl fmt::Display for MemoryFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryFault { device, wanted, wanted_bytes, live_bytes, kept_bytes, limit_bytes } = self;
        write!(
            f,
            "memory: {device} has no room; got {wanted} of {wanted_bytes} bytes, {live_bytes} bytes of live tensors, \
             {kept_bytes} bytes kept for reuse, {limit_bytes} bytes in all; keep fewer tensors, or shard them further"
        )
    }
}

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Failure {
    /// The program returned an error.
    #[error("{0}")]
    Error(Error),
    /// The program panicked, with this message.
    #[error("panicked: {0}")]
    Panic(String),
    /// The rank was still running when the others had ended and the deadline had passed.
    #[error("still running {0:.1} s after the other ranks ended; it was left behind")]
    Stuck(f64),
}

impl Error {
    /// An [`Error::Invalid`]: the caller's arguments break `rule`.
    pub fn invalid(
        verb: impl Into<String>,
        rule: impl Into<String>,
        given: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Error {
        Error::Invalid(Refusal::boxed(verb, rule, given, remedy))
    }

    /// An [`Error::Sharding`]: the operands' layouts break `rule`.
    pub fn sharding(
        verb: impl Into<String>,
        rule: impl Into<String>,
        given: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Error {
        Error::Sharding(Refusal::boxed(verb, rule, given, remedy))
    }

    /// An [`Error::Unsupported`]: `rule` names the feature that is not built.
    pub fn unsupported(
        verb: impl Into<String>,
        rule: impl Into<String>,
        given: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Error {
        Error::Unsupported(Refusal::boxed(verb, rule, given, remedy))
    }

    /// A refusal, or a lack of memory, that also names the `place` where it was met: a parameter's path, a site of a model.
    /// Other errors stay.
    pub(crate) fn at(mut self, place: &str) -> Error {
        match &mut self {
            Error::Invalid(refusal) | Error::Sharding(refusal) | Error::Unsupported(refusal) => {
                refusal.given.push_str(if refusal.given.is_empty() { "it at " } else { " at " });
                refusal.given.push_str(place);
            }
            Error::OutOfMemory(fault) => {
                fault.wanted.push_str(" at ");
                fault.wanted.push_str(place);
            }
            _ => {}
        }
        self
    }

    /// True where the error only reports that another rank failed: such an error is never the first cause.
    pub fn is_echo(&self) -> bool {
        match self {
            Error::Comm(fault) => matches!(**fault, CommFault::PeerFailed { .. }),
            _ => false,
        }
    }
}

impl From<CommFault> for Error {
    fn from(fault: CommFault) -> Self {
        Error::Comm(Box::new(fault))
    }
}

impl Refusal {
    fn boxed(
        verb: impl Into<String>,
        rule: impl Into<String>,
        given: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Box<Refusal> {
        Box::new(Refusal { verb: verb.into(), rule: rule.into(), given: given.into(), remedy: remedy.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_form() {
        let e = Error::invalid("matmul", "inner extents differ", "f32[2, 3], f32[4, 5]", "transpose one");
        assert_eq!(e.to_string(), "matmul: inner extents differ; got f32[2, 3], f32[4, 5]; transpose one");
        let e = Error::unsupported("pool", "not built", "", "");
        assert_eq!(e.to_string(), "pool: not built");
        assert_eq!(e.at("h.0").to_string(), "pool: not built; got it at h.0");
        assert!(std::mem::size_of::<Error>() <= 72, "errors travel in every Result");
    }
}
