//! Softmax and normalisation over a dim.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::ops::{Bits, LayerNorm, LogSoftmax, RmsNorm, Softmax};
use smallvec::SmallVec;

/// Softmax and normalisation.
impl DTensor {
    /// Returns `exp(x) / sum(exp(x))` along `dim`, computed without overflow. Communicates nothing if the ranks hold
    /// `dim` whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 0.0, 9.0, 9.0], [2, 2])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.softmax(-1)?.full_tensor()?.to_vec::<f32>()?, [0.5; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and dtypes that are not floating-point.
    pub fn softmax(&self, dim: isize) -> Result<DTensor> {
        DTensor::apply_one(&Softmax { dim: self.shape().dim("softmax", dim)? }, &[self])
    }

    /// Returns the logarithm of [`DTensor::softmax`], computed without overflow. Communicates as `softmax` does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 0.0, 9.0, 9.0], [2, 2])?, "(S0)".parse()?)?;
    ///     let y = x.log_softmax(-1)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert!(y.iter().all(|v| (v + 2f32.ln()).abs() < 1e-6));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and dtypes that are not floating-point.
    pub fn log_softmax(&self, dim: isize) -> Result<DTensor> {
        DTensor::apply_one(&LogSoftmax { dim: self.shape().dim("log_softmax", dim)? }, &[self])
    }

    /// Applies layer normalisation over the last dim (Ba et al., 2016):
    /// `(x - mean) / sqrt(variance + eps) * weight + bias`. `weight` and `bias` have the shape of the last dim.
    /// Communicates nothing if the ranks hold the last dim whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 3.0, 2.0, 6.0], [2, 2])?, "(S0)".parse()?)?;
    ///     let weight = DTensor::full(&mesh, x.dtype(), [2], 10.0, "(R)".parse()?)?;
    ///     let y = x.layer_norm(&weight, None, 0.0)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [-10.0, 10.0, -10.0, 10.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `weight` or `bias` whose shape is not that of the last dim.
    pub fn layer_norm(&self, weight: &DTensor, bias: Option<&DTensor>, eps: f64) -> Result<DTensor> {
        let op = LayerNorm { eps: Bits(eps), weight: true, bias: bias.is_some() };
        let ins: SmallVec<[&DTensor; 3]> = [self, weight].into_iter().chain(bias).collect();
        Ok(DTensor::apply(&op, &ins)?.remove(0))
    }

    /// Applies root-mean-square normalisation over the last dim (Zhang and Sennrich, 2019):
    /// `x / sqrt(mean(x * x) + eps) * weight`. Communicates nothing if the ranks hold the last dim whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2.0f32, 2.0, 4.0, -4.0], [2, 2])?, "(S0)".parse()?)?;
    ///     let weight = DTensor::full(&mesh, x.dtype(), [2], 3.0, "(R)".parse()?)?;
    ///     let y = x.rms_norm(&weight, 0.0)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [3.0, 3.0, 3.0, -3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `weight` whose shape is not that of the last dim.
    pub fn rms_norm(&self, weight: &DTensor, eps: f64) -> Result<DTensor> {
        Ok(DTensor::apply(&RmsNorm { eps: Bits(eps) }, &[self, weight])?.remove(0))
    }
}
