//! Activation functions with parameters, made of operators of the pointwise table.

use crate::dtensor::tensor::DTensor;
use crate::error::{Error, Result};

impl DTensor {
    /// Returns [`softplus`](DTensor::softplus) of `beta · x`, divided by `beta`, and `x` itself where `beta · x` is above
    /// `threshold` (20 in PyTorch). Communicates nothing unless this tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f64, 3.0], [2])?, "(S0)".parse()?)?;
    ///     let y = x.softplus_with(2.0, 4.0)?.full_tensor()?.to_f64_vec();
    ///     assert_eq!(y, [2f64.ln() / 2.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `beta` that is 0 or not finite, and dtypes that are not floating-point.
    pub fn softplus_with(&self, beta: f64, threshold: f64) -> Result<DTensor> {
        if beta == 0.0 || !beta.is_finite() {
            let rule = "beta is a finite number other than 0";
            return Err(Error::invalid("softplus_with", rule, beta.to_string(), "choose another beta"));
        }
        let scaled = self.mul_scalar(beta)?;
        let soft = scaled.softplus()?.mul_scalar(1.0 / beta)?;
        scaled.gt(&scaled.full_like(threshold)?)?.select(self, &soft)
    }

    /// Returns `1.0507 · elu(x)` with `alpha` = 1.6733: the scaled exponential linear unit (Klambauer, Unterthiner,
    /// Mayr, Hochreiter 2017). Communicates nothing unless this tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0, -40.0], [2])?, "(S0)".parse()?)?;
    ///     assert_eq!(format!("{:.3?}", x.selu()?.full_tensor()?.to_f64_vec()), "[1.051, -1.758]");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes that are not floating-point.
    pub fn selu(&self) -> Result<DTensor> {
        self.elu(1.6732632423543772)?.mul_scalar(1.0507009873554805)
    }
}
