//! Which NCCL, and how it is used.

use std::sync::Arc;

use super::Nccl;
use crate::error::Result;

/// NCCL, found, with what may be chosen about it. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Library {
    pub(super) nccl: Arc<dyn Nccl>,
    pub(super) compared: bool,
}

impl Library {
    /// The system's: `libnccl.so.2` or `libnccl.so` in the loader's path, or the file that `ISOSHARD_NCCL` names.
    ///
    /// # Errors
    /// A library that is not there, or is older than 2.18, by name; a program built without the feature `nccl`.
    pub fn load() -> Result<Library> {
        load().map(Library::of)
    }

    /// Another implementation, for tests.
    pub fn of(nccl: Arc<dyn Nccl>) -> Library {
        Library { nccl, compared: true }
    }

    /// Whether what the members bring to each call is [compared](super). It is, unless said otherwise.
    pub fn compared(mut self, compared: bool) -> Library {
        self.compared = compared;
        self
    }

    /// The library's name and version.
    pub fn name(&self) -> String {
        self.nccl.name()
    }
}

#[cfg(feature = "nccl")]
fn load() -> Result<Arc<dyn Nccl>> {
    super::nvidia::load()
}

#[cfg(not(feature = "nccl"))]
fn load() -> Result<Arc<dyn Nccl>> {
    use crate::error::Error;
    let rule = "this program was built without it";
    Err(Error::unsupported("nccl", rule, "", "build with the feature nccl, or run ranks as threads"))
}
