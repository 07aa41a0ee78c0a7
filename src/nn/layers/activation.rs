//! The activation functions of feed-forward layers.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::ops::Activation;

impl Activation {
    /// Returns the function of each element of `x`. Communicates nothing unless `x` is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::Activation, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4], "(S0)")?;
    ///     assert_eq!(Activation::Silu.apply(&x)?.spec().to_string(), "f32[4]@(tp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses integers and bools; returns an error if a rank fails.
    pub fn apply(self, x: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(self.operator(), &[x])
    }
}
