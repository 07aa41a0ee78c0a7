//! Checks of a model's parameters and gradients while it trains.

use crate::dtensor::{DTensor, Gradients, check_finite, check_replicas};
use crate::error::Result;
use crate::nn::params::Params;

impl Params {
    /// Compares the replicas of all parameters over the ranks that hold them, bit by bit, with [`check_replicas`].
    /// Sends 16 bytes per parameter to each of those ranks.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[("dp", 2)])?, Plan::default().batch("dp"), 7)?;
    ///     params.root().param("w", [5], Init::Normal { mean: 0.0, std: 1.0 })?;
    ///     params.check_replicas() // both ranks hold the same bits
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Diverged`](crate::Error::Diverged) with the parameter's path, the same on all ranks, if
    /// replicas differ, and an error if a rank fails.
    pub fn check_replicas(&self) -> Result<()> {
        let values: Vec<(&str, &DTensor)> = self.ids().map(|id| (self.path(id), self.value(id))).collect();
        check_replicas(&values)
    }

    /// Looks for gradients that are infinite or NaN, with [`check_finite`]. Reads all gradients, and sends 24 bytes to
    /// each rank.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// let error = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [2], Init::Zeros)?;
    ///     let grads = params.value(w).sqrt()?.sum_all()?.backward()?; // the derivative at 0 is infinite
    ///     params.check_gradients(&grads, 12)
    /// });
    /// let text = error.unwrap_err().to_string();
    /// assert!(text.contains("got w f32[2]@(fsdp:RS(0..1; 1,1)) at rank(s) [0, 1] in step 12"), "{text}");
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::NotFinite`](crate::Error::NotFinite) with the parameter's path and `step`, the same on all
    /// ranks, if there is such a gradient, and an error if a rank fails.
    pub fn check_gradients(&self, grads: &Gradients, step: u64) -> Result<()> {
        let grad = |id| Some((self.path(id), grads.get(self.value(id))?));
        check_finite(&self.ids().filter_map(grad).collect::<Vec<_>>(), step)
    }
}
