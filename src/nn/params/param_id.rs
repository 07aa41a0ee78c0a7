//! The ids of parameters.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The id of one parameter of one [`Params`](crate::nn::Params), which other `Params` refuse.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId {
    pub(in crate::nn) index: usize,
    pub(in crate::nn) model: ModelNumber,
}

/// The number of a [`Params`](crate::nn::Params) in this process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::nn) struct ModelNumber(u64);

impl ModelNumber {
    pub(in crate::nn) fn next() -> ModelNumber {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        ModelNumber(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl ParamId {
    /// Returns the number of parameters that were declared before this one: the same on every rank.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     params.root().param("first", [2], Init::Ones)?;
    ///     assert_eq!(params.root().param("second", [2], Init::Ones)?.index(), 1);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn index(self) -> usize {
        self.index
    }
}

/// Prints the index alone.
impl fmt::Debug for ParamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ParamId({})", self.index)
    }
}
