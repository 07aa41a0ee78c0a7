//! Reductions over dims.
//!
//! A sharded dim that is reduced gives a `Partial` result, which the operator that reads it reduces if necessary. A
//! negative dim counts from the last.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::ops::{Argmax, Max, Min, Sum};
use crate::tensor::Dims;

/// Reductions.
impl DTensor {
    /// Returns the sum over `dims`; with `keep`, they stay with extent 1.
    ///
    /// If a summed dim is sharded, the result is `Partial` along that axis and nothing is communicated until it is
    /// reduced.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.sum(&[-1], true)?.spec().to_string(), "f32[2, 1]@(dp:S0)");
    ///     let columns = x.sum(&[0], false)?;
    ///     assert_eq!(columns.layout().to_string(), "(P(sum))");
    ///     assert_eq!(columns.full_tensor()?.to_vec::<f32>()?, [5.0, 7.0, 9.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and dims that repeat.
    pub fn sum(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        DTensor::apply_one(&Sum { dims: self.dims("sum", dims)?, keep }, &[self])
    }

    /// Returns the sum of all elements, with shape `[]`. The result is `Partial` if the tensor is sharded.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.sum_all()?.full_tensor()?.item()?, 6.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if an operand has to be redistributed and communication fails.
    pub fn sum_all(&self) -> Result<DTensor> {
        DTensor::apply_one(&Sum { dims: (0..self.shape().len()).collect(), keep: false }, &[self])
    }

    /// Returns the mean over `dims`: the [sum](DTensor::sum) divided by the global number of elements. With `keep`,
    /// the dims stay with extent 1.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 6.0], [2, 2])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.mean(&[0], false)?.full_tensor()?.to_vec::<f32>()?, [2.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and dims that repeat.
    pub fn mean(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        let count: usize = self.dims("mean", dims)?.iter().map(|&d| self.shape()[d]).product();
        self.sum(dims, keep)?.mul_scalar(1.0 / count as f64)
    }

    /// Returns the mean of all elements, with shape `[]`. If the tensor is sharded, exact mode all-reduces one number per
    /// finished node of the sum before the division.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 6.0], [4])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.mean_all()?.full_tensor()?.item()?, 3.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes that are not floating-point.
    pub fn mean_all(&self) -> Result<DTensor> {
        self.sum_all()?.mul_scalar(1.0 / self.shape().numel() as f64)
    }

    /// Returns the maximum over `dims`; NaN wins. With `keep`, the dims stay with extent 1. The gradient is shared
    /// evenly among equal maxima. If a reduced dim is sharded, the result is `Partial(max)`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 5.0, 7.0, 3.0], [2, 2])?, "(S0)".parse()?)?;
    ///     let max = x.max(&[0], false)?;
    ///     assert_eq!(max.layout().to_string(), "(P(max))");
    ///     assert_eq!(max.full_tensor()?.to_vec::<f32>()?, [7.0, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and a maximum over no elements.
    pub fn max(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        DTensor::apply_one(&Max { dims: self.dims("max", dims)?, keep }, &[self])
    }

    /// Returns the minimum over `dims`; NaN wins. With `keep`, the dims stay with extent 1. The gradient is shared
    /// evenly among equal minima. If a reduced dim is sharded, the result is `Partial(min)`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 5.0, 7.0, 3.0], [2, 2])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.min(&[1], true)?.full_tensor()?.to_vec::<f32>()?, [1.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and a minimum over no elements.
    pub fn min(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        DTensor::apply_one(&Min { dims: self.dims("min", dims)?, keep }, &[self])
    }

    /// Returns the first index of the maximum along `dim`, as i64. Communicates nothing if the ranks hold `dim`
    /// whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 5.0, 7.0, 3.0], [2, 2])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.argmax(-1)?.full_tensor()?.to_vec::<i64>()?, [1, 0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and a dim of extent 0.
    pub fn argmax(&self, dim: isize) -> Result<DTensor> {
        DTensor::apply_one(&Argmax { dim: self.shape().dim("argmax", dim)? }, &[self])
    }

    /// Resolves negative dims, and sorts.
    pub(super) fn dims(&self, verb: &str, dims: &[isize]) -> Result<Dims> {
        let mut dims: Dims = dims.iter().map(|&d| self.shape().dim(verb, d)).collect::<Result<_>>()?;
        dims.sort_unstable();
        Ok(dims)
    }
}
