//! The NCCL library that a world uses.

use std::sync::Arc;

use super::Nccl;
use crate::error::Result;

/// A loaded NCCL library, with the options of its use. Clones share it.
///
/// [`Spmd::nccl`](crate::comm::Spmd::nccl) and [`Process::nccl`](crate::comm::Process::nccl) take it.
///
/// ```
/// use isoshard::comm::{Spmd, nccl::Library};
/// use isoshard::tensor::{Device, cuda};
///
/// if let (Ok(library), true) = (Library::load(), cuda::is_available()) {
///     // One rank per GPU.
///     let ranks = cuda::devices_len();
///     Spmd::new(ranks).on(Device::Cuda).nccl(library).run(|rank| rank.world().barrier())?;
/// }
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Library {
    pub(super) nccl: Arc<dyn Nccl>,
    pub(super) compared: bool,
}

impl Library {
    /// Loads `libnccl.so.2` or `libnccl.so` from the loader's path, or the file that `ISOSHARD_NCCL` names.
    ///
    /// # Errors
    /// Returns an error if the library is not found or is older than 2.18, or if the program was built without the
    /// feature `nccl`.
    ///
    /// ```
    /// use isoshard::comm::nccl::Library;
    ///
    /// match Library::load() {
    ///     Ok(library) => assert!(library.name().starts_with("NCCL 2.")),
    ///     Err(e) => assert!(e.to_string().starts_with("nccl: ")),
    /// }
    /// ```
    pub fn load() -> Result<Library> {
        load().map(Library::of)
    }

    /// Uses another implementation of NCCL's functions. Tests do.
    pub fn of(nccl: Arc<dyn Nccl>) -> Library {
        Library { nccl, compared: true }
    }

    /// Turns the [comparison of calls](super) on or off. It is on by default.
    ///
    /// ```
    /// use isoshard::comm::nccl::Library;
    ///
    /// // Without the comparison there are fewer messages, and a wrong call hangs until the deadline.
    /// let library = Library::load().map(|library| library.compared(false));
    /// # let _ = library;
    /// ```
    pub fn compared(mut self, compared: bool) -> Library {
        self.compared = compared;
        self
    }

    /// Returns the library's name and version, e.g. `NCCL 2.18.3`.
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
