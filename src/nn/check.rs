//! Looking after a model's parameters and gradients while it trains.

use super::params::Params;
use crate::dtensor::{DTensor, Gradients, check_finite, check_replicas};
use crate::error::Result;

impl Params {
    /// Compares the replicas of all parameters over the ranks that hold them, bit by bit: [`check_replicas`]. Sends 16 bytes a
    /// parameter to each of those ranks.
    ///
    /// # Errors
    /// [`Error::Diverged`](crate::Error::Diverged), alike on all ranks, with the parameter's path; a fault of communication.
    pub fn check_replicas(&self) -> Result<()> {
        let values: Vec<(&str, &DTensor)> = self.ids().map(|id| (self.path(id), self.value(id))).collect();
        check_replicas(&values)
    }

    /// Looks for gradients that are infinite or no number: [`check_finite`]. Reads them all, and sends 24 bytes to each rank.
    ///
    /// # Errors
    /// [`Error::NotFinite`](crate::Error::NotFinite), alike on all ranks, with the parameter's path and `step`; a fault of
    /// communication.
    pub fn check_gradients(&self, grads: &Gradients, step: u64) -> Result<()> {
        let grad = |id| Some((self.path(id), grads.get(self.value(id))?));
        check_finite(&self.ids().filter_map(grad).collect::<Vec<_>>(), step)
    }
}
