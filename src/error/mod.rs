//! The crate's errors, and the notation in which every message writes tensors.
//!
//! Each variant of [`Error`] says who must act. A message has one form, in lower case: `verb: the broken rule; got the
//! argument; the remedy`. Tensors are written `f32[64, 128]@(dp:S0, tp:R)`: dtype, global shape, and one placement per
//! mesh axis.
//!
//! A sharding error depends only on metadata that all ranks share, so every rank returns the same error at the same call.

mod fault;
mod shared;

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::Path;

pub(crate) use fault::write_busy;
#[doc(inline)]
pub use isoshard_kernels::memory::MemoryFault;
use isoshard_kernels::{MatrixFault, NotFloat};

pub use fault::{BusyRank, CallId, CommFault, Divergence, LastCall, NotFinite, Wait};
pub use shared::SharedError;

use crate::module_path::ModulePath;

/// The result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error, sorted by who must act.
///
/// Clones are cheap, because one cause is reported on every rank. `?` turns the usual errors of the standard library
/// and of `serde_json` into [`Error::Other`]; [`Error::other`] does so for any error, and [`Error::downcast_ref`] gets
/// it back:
///
/// ```
/// use isoshard::{Error, comm::spmd};
/// use std::num::ParseIntError;
///
/// let error = spmd(2, |rank| Ok(["7", "seven"][rank.rank()].parse::<u32>()?)).unwrap_err();
/// assert_eq!(error.to_string(), "rank 1: invalid digit found in string");
/// assert!(matches!(error, Error::Rank { rank: 1, .. }));
/// assert!(error.downcast_ref::<ParseIntError>().is_some());
/// ```
///
/// `Debug` prints what `Display` prints, so that a `main` which returns an error shows the message.
#[non_exhaustive]
#[derive(Clone, PartialEq)]
pub enum Error {
    /// The caller passed a shape, dtype, index or attribute that the function does not accept.
    Invalid(Box<Refusal>),
    /// The operands' layouts do not allow the operation, or strict mode forbids the move that it needs.
    Sharding(Box<Refusal>),
    /// The text names a feature that is not built.
    Unsupported(Box<Refusal>),
    /// A collective did not complete, because ranks disagreed, stalled or failed.
    Comm(Box<CommFault>),
    /// A rank of an SPMD program ended with an error or a panic.
    Rank {
        /// The rank that failed first, numbered in the world.
        rank: usize,
        /// Its error, or its panic message.
        cause: Box<Failure>,
    },
    /// A device has too little memory.
    OutOfMemory(Box<MemoryFault>),
    /// Replicas of a tensor differ between ranks.
    Diverged(Box<Divergence>),
    /// A tensor has an element that is infinite or NaN.
    NotFinite(Box<NotFinite>),
    /// A device, its driver or its compiler failed.
    Device {
        /// The function that failed, or the kernel with its grid and operands.
        verb: String,
        /// The device, e.g. `cuda:0`.
        device: String,
        /// The driver's message.
        reason: String,
    },
    /// Reading or writing a file failed.
    Io {
        /// The function that accessed the file.
        verb: &'static str,
        /// The file's path.
        path: String,
        /// The operating system's error; it is also this error's [source](std::error::Error::source).
        source: SharedError<io::Error>,
    },
    /// An error of another crate or of the program itself; it is also this error's [source](std::error::Error::source).
    Other(SharedError<dyn StdError + Send + Sync>),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Invalid(refusal) | Error::Sharding(refusal) | Error::Unsupported(refusal) => {
                write!(f, "{refusal}")
            }
            Error::Comm(fault) => write!(f, "{fault}"),
            Error::Rank { rank, cause } => write!(f, "rank {rank}: {cause}"),
            Error::OutOfMemory(fault) => write!(f, "{fault}"),
            Error::Diverged(divergence) => write!(f, "{divergence}"),
            Error::NotFinite(found) => write!(f, "{found}"),
            Error::Device { verb, device, reason } => write!(f, "{verb}: {device} failed; got {reason}"),
            Error::Io { verb, path, source } => {
                write!(f, "{verb}: cannot access the file; got {path}: {source}")
            }
            Error::Other(source) => write!(f, "{source}"),
        }
    }
}

/// Prints the message, as `Display` does.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            // A wrapper that forwards its source keeps the fault reachable, so `is_echo` finds it.
            Error::Comm(fault) => Some(&**fault),
            Error::Rank { cause, .. } => match &**cause {
                Failure::Error(error) => Some(error),
                Failure::Panic(_) | Failure::Stuck(_) => None,
            },
            Error::Io { source, .. } => Some(&**source),
            Error::Other(source) => Some(&**source),
            Error::Invalid(_)
            | Error::Sharding(_)
            | Error::Unsupported(_)
            | Error::OutOfMemory(_)
            | Error::Diverged(_)
            | Error::NotFinite(_)
            | Error::Device { .. } => None,
        }
    }
}

/// The parts of a refusal's message: `verb: rule; got given at place; remedy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The function or operator that refused.
    pub verb: String,
    /// The rule that was broken.
    pub rule: String,
    /// The arguments, in the crate's notation, printed after "got"; may be empty.
    pub given: String,
    /// The path of the module in which the call was refused, or of the parameter or site, printed after "at"; empty outside
    /// all modules.
    pub place: String,
    /// A call or change that would be accepted; may be empty.
    pub remedy: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.verb, self.rule)?;
        match (&self.given[..], &self.place[..]) {
            ("", "") => {}
            (given, "") => write!(f, "; got {given}")?,
            ("", place) => write!(f, "; got it at {place}")?,
            (given, place) => write!(f, "; got {given} at {place}")?,
        }
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}

/// The way a rank's program failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Failure {
    /// The program returned an error.
    #[error("{0}")]
    Error(#[source] Error),
    /// The program panicked with this message.
    #[error("panicked: {0}")]
    Panic(String),
    /// The rank was still running this many seconds after the other ranks had ended, beyond the deadline.
    #[error("still running {0:.1} s after the other ranks ended; it was left behind")]
    Stuck(f64),
}

impl Error {
    /// Returns an [`Error::Invalid`]: the caller's arguments break `rule`.
    ///
    /// ```
    /// let e = isoshard::Error::invalid("pool", "the window exceeds the image", "window 5, f32[3, 3]", "pad it first");
    /// assert_eq!(e.to_string(), "pool: the window exceeds the image; got window 5, f32[3, 3]; pad it first");
    /// ```
    pub fn invalid(
        verb: impl Into<String>,
        rule: impl Into<String>,
        given: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Error {
        Error::Invalid(Refusal::boxed(verb, rule, given, remedy))
    }

    /// Returns an [`Error::Sharding`]: the operands' layouts break `rule`.
    ///
    /// ```
    /// let e = isoshard::Error::sharding("pool", "dim 2 must not be sharded", "f32[1, 8, 8]@(tp:S2)", "");
    /// assert_eq!(e.to_string(), "pool: dim 2 must not be sharded; got f32[1, 8, 8]@(tp:S2)");
    /// ```
    pub fn sharding(
        verb: impl Into<String>,
        rule: impl Into<String>,
        given: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Error {
        Error::Sharding(Refusal::boxed(verb, rule, given, remedy))
    }

    /// Returns an [`Error::Unsupported`]: `rule` names a feature that is not built.
    ///
    /// ```
    /// let e = isoshard::Error::unsupported("pool", "strides other than 1 are not built", "stride 2", "");
    /// assert!(matches!(e, isoshard::Error::Unsupported(refusal) if refusal.given == "stride 2"));
    /// ```
    pub fn unsupported(
        verb: impl Into<String>,
        rule: impl Into<String>,
        given: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Error {
        Error::Unsupported(Refusal::boxed(verb, rule, given, remedy))
    }

    /// Returns an [`Error::Io`]: `verb` failed to read or write the file at `path`.
    ///
    /// ```
    /// use std::{fs, io, path::Path};
    /// let path = Path::new("no/such/corpus.txt");
    /// let e = fs::read_to_string(path).map_err(|e| isoshard::Error::io("corpus", path, e)).unwrap_err();
    /// assert!(e.to_string().starts_with("corpus: cannot access the file; got no/such/corpus.txt: "));
    /// assert_eq!(e.downcast_ref::<io::Error>().unwrap().kind(), io::ErrorKind::NotFound);
    /// ```
    pub fn io(verb: &'static str, path: impl AsRef<Path>, source: io::Error) -> Error {
        Error::Io { verb, path: path.as_ref().display().to_string(), source: SharedError::new(source) }
    }

    /// Returns an [`Error::Other`] that keeps `source`: an error of any type, or a message. An `Error` in a box stays
    /// itself.
    ///
    /// ```
    /// use isoshard::{Error, comm::spmd};
    /// #[derive(Debug, PartialEq)]
    /// struct EmptyCorpus;
    /// impl std::fmt::Display for EmptyCorpus {
    ///     fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
    ///         f.write_str("the corpus is empty")
    ///     }
    /// }
    /// impl std::error::Error for EmptyCorpus {}
    ///
    /// fn read_corpus() -> Result<String, EmptyCorpus> {
    ///     Err(EmptyCorpus)
    /// }
    /// let error = spmd(1, |_| read_corpus().map_err(Error::other)).unwrap_err();
    /// assert_eq!(error.to_string(), "rank 0: the corpus is empty");
    /// assert_eq!(error.downcast_ref(), Some(&EmptyCorpus));
    /// assert_eq!(Error::other("no such token").to_string(), "no such token");
    /// ```
    pub fn other(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        match source.into().downcast::<Error>() {
            Ok(own) => *own,
            Err(source) => Error::Other(source.into()),
        }
    }

    /// Returns the first error of type `E` among this error, its source, the source's source, and so on.
    ///
    /// ```
    /// let error = isoshard::comm::spmd(1, |_| Ok(serde_json::from_str::<u32>("{}")?)).unwrap_err();
    /// assert!(error.downcast_ref::<serde_json::Error>().unwrap().is_data());
    /// assert!(error.downcast_ref::<std::io::Error>().is_none());
    /// ```
    pub fn downcast_ref<E: StdError + 'static>(&self) -> Option<&E> {
        chain(self).find_map(|error| error.downcast_ref())
    }

    /// Adds `place`, the path of a parameter or of a site, to a refusal or to a lack of memory; leaves other errors as they
    /// are. A refusal keeps a place below `place`, which says more.
    pub(crate) fn at(mut self, place: &str) -> Error {
        match &mut self {
            Error::Invalid(refusal) | Error::Sharding(refusal) | Error::Unsupported(refusal) => {
                let is_below = refusal.place.strip_prefix(place).is_some_and(|rest| rest.starts_with('.'));
                if !is_below {
                    refusal.place = place.into();
                }
            }
            Error::OutOfMemory(fault) => {
                fault.wanted.push_str(" at ");
                fault.wanted.push_str(place);
            }
            _ => {}
        }
        self
    }

    /// Names `verb` as the call that refuses: a method gives the refusals of what it is made of in its own name. A refusal of
    /// layouts keeps the name of the operator, whose operands it counts.
    pub(crate) fn called(mut self, verb: &str) -> Error {
        if let Error::Invalid(refusal) | Error::Unsupported(refusal) = &mut self {
            refusal.verb = verb.into();
        }
        self
    }

    /// Returns `true` if the error only reports that another rank failed, also as the source of an [`Error::Other`].
    /// Such an error is never the first cause.
    ///
    /// ```
    /// use isoshard::{CallId, CommFault, Error};
    /// let id = CallId::new("all_reduce", 3, "dp{0, 1}");
    /// let fault = CommFault::PeerFailed { id, rank: 1, cause: "out of luck".into() };
    /// assert!(Error::from(fault.clone()).is_echo() && Error::other(fault).is_echo());
    /// assert!(!Error::other("out of luck").is_echo());
    /// ```
    pub fn is_echo(&self) -> bool {
        match self {
            Error::Comm(fault) => fault.is_echo(),
            Error::Other(source) => {
                let own = |error: &(dyn StdError + 'static)| {
                    let fault = || error.downcast_ref::<CommFault>().map(CommFault::is_echo);
                    error.downcast_ref::<Error>().map(Error::is_echo).or_else(fault)
                };
                chain(&**source).find_map(own).unwrap_or(false)
            }
            _ => false,
        }
    }
}

/// Returns an iterator over an error, its source, the source's source, and so on.
fn chain<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    // An io error's own source skips the error that it wraps.
    std::iter::successors(Some(error), |&error| match error.downcast_ref::<io::Error>() {
        Some(io) => io.get_ref().map(|inner| inner as &(dyn StdError + 'static)),
        None => error.source(),
    })
}

impl From<CommFault> for Error {
    fn from(fault: CommFault) -> Self {
        Error::Comm(Box::new(fault))
    }
}

impl From<MemoryFault> for Error {
    fn from(fault: MemoryFault) -> Self {
        Error::OutOfMemory(Box::new(fault))
    }
}

impl From<NotFloat> for Error {
    fn from(NotFloat { verb, dtype }: NotFloat) -> Self {
        Error::invalid(verb, "wants floating-point elements", dtype.name(), "cast it first")
    }
}

impl From<MatrixFault> for Error {
    fn from(MatrixFault { rule, given }: MatrixFault) -> Self {
        Error::invalid("matrix", rule, given, "")
    }
}

/// Lets `?` turn these errors into [`Error::Other`].
macro_rules! from_foreign {
    ($($foreign:ty),+ $(,)?) => {
        $(impl From<$foreign> for Error {
            fn from(source: $foreign) -> Self {
                Error::other(source)
            }
        })+
    };
}

from_foreign!(
    io::Error,
    fmt::Error,
    serde_json::Error,
    std::env::VarError,
    std::num::ParseFloatError,
    std::num::ParseIntError,
    std::num::TryFromIntError,
    std::str::Utf8Error,
    std::string::FromUtf8Error,
    Box<dyn StdError + Send + Sync>,
);

impl Refusal {
    fn boxed(
        verb: impl Into<String>,
        rule: impl Into<String>,
        given: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Box<Refusal> {
        let place = ModulePath::current().as_str().into();
        Box::new(Refusal {
            verb: verb.into(),
            rule: rule.into(),
            given: given.into(),
            place,
            remedy: remedy.into(),
        })
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
        let scope = ModulePath::new("h.3.attn").enter();
        let e = Error::invalid("slice", "the range leaves the tensor", "0..5", "");
        drop(scope);
        assert_eq!(e.to_string(), "slice: the range leaves the tensor; got 0..5 at h.3.attn");
        assert_eq!(e.clone().at("h.3").to_string(), e.to_string(), "the deepest place is kept");
        assert!(e.at("h.3.attn.q.weight").to_string().ends_with("at h.3.attn.q.weight"));
        assert!(std::mem::size_of::<Error>() <= 72, "errors travel in every Result");
    }

    #[derive(Debug, PartialEq, thiserror::Error)]
    enum OwnError {
        #[error(transparent)]
        Transparent(#[from] Error),
        #[error("while training")]
        Wrapped(#[source] Error),
        #[error("no data")]
        NoData,
    }

    #[test]
    fn other_errors_keep_their_source() {
        let io = Error::from(io::Error::new(io::ErrorKind::TimedOut, "too slow"));
        assert_eq!((io.to_string(), &io), ("too slow".into(), &io.clone()));
        assert_eq!(io.downcast_ref::<io::Error>().expect("kept").kind(), io::ErrorKind::TimedOut);
        assert_eq!(Error::other(OwnError::NoData).downcast_ref(), Some(&OwnError::NoData));
        let refused = Error::invalid("pool", "not built", "", "");
        let boxed: Box<dyn StdError + Send + Sync> = refused.clone().into();
        assert_eq!(Error::from(boxed), refused, "an error of ours is not wrapped");
        let wrapped = Error::other(OwnError::Wrapped(refused.clone()));
        assert_eq!(
            wrapped.source().and_then(StdError::source).map(ToString::to_string),
            Some(refused.to_string())
        );
        let of_rank = Error::Rank { rank: 3, cause: Box::new(Failure::Error(wrapped)) };
        assert_eq!(of_rank.to_string(), "rank 3: while training");
        assert_eq!(of_rank.downcast_ref(), Some(&OwnError::Wrapped(refused)));
    }

    #[test]
    fn an_echo_is_found_behind_the_users_own_errors() {
        let id = CallId::new("barrier", 0, "world{0, 1}");
        let echo = || Error::from(CommFault::PeerFailed { id: id.clone(), rank: 1, cause: "boom".into() });
        let transport = CommFault::Transport { id: id.clone(), rank: 1, reason: "cut".into() };
        let first = Error::from(transport);
        for wrap in [OwnError::Transparent, OwnError::Wrapped] {
            assert!(Error::other(wrap(echo())).is_echo(), "{:?}", wrap(echo()));
            assert!(!Error::other(wrap(first.clone())).is_echo());
        }
        assert!(!Error::other(OwnError::NoData).is_echo());
    }
}
