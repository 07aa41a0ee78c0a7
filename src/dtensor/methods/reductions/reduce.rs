//! Reductions over dims.
//!
//! A sharded dim that is reduced gives a `Partial` result, which the operator that reads it reduces if necessary. A
//! negative dim counts from the last.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::ops::{Argmax, FirstIndex, Max, Min, Prod, Sum, WideSum, accumulator};
use crate::placement::Placement;
use crate::tensor::{Dims, Shape};

/// Reductions.
impl DTensor {
    /// Returns the sum over `dims`; with `keep`, they stay with extent 1. Integers and bools are summed in i64.
    ///
    /// If a summed dim is sharded, the result is `Partial` along that axis and nothing is communicated until it is
    /// reduced.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?, "(S0)")?;
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
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.sum_all()?.item()?, 6.0);
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

    /// Returns the mean over `dims`: the [sum](DTensor::sum) times the reciprocal of the global number of elements. With
    /// `keep`, the dims stay with extent 1. It is infinite if the sum overflows, as in PyTorch.
    ///
    /// f16 and bf16 are summed, reduced over ranks and multiplied in f32, and rounded once. If a reduced dim is
    /// sharded, exact mode reduces the sums over ranks before the division: one number per result and finished node. In
    /// fast mode the result is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 6.0], [2, 2])?, "(S0)")?;
    ///     assert_eq!(x.mean(&[0], false)?.full_tensor()?.to_vec::<f32>()?, [2.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, dims that repeat, and dtypes that are not floating-point.
    pub fn mean(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        self.dtype().expect_float("mean")?;
        self.mean_over(self.dims("mean", dims)?, keep)?.cast(self.dtype())
    }

    /// Returns the mean of all elements, with shape `[]`. If the tensor is sharded, exact mode all-reduces one number per
    /// finished node of the sum before the division.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 6.0], [4])?, "(S0)")?;
    ///     assert_eq!(x.mean_all()?.item()?, 3.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes that are not floating-point.
    pub fn mean_all(&self) -> Result<DTensor> {
        self.dtype().expect_float("mean")?;
        self.mean_over((0..self.shape().len()).collect(), false)?.cast(self.dtype())
    }

    /// Returns the mean in the dtype that sums are accumulated in.
    pub(in crate::dtensor::methods) fn mean_over(&self, dims: Dims, keep: bool) -> Result<DTensor> {
        let count: usize = dims.iter().map(|&d| self.shape()[d]).product();
        let sum = if accumulator(self.dtype()) == self.dtype() {
            DTensor::apply_one(&Sum { dims, keep }, &[self])?
        } else {
            DTensor::apply_one(&WideSum { dims, keep }, &[self])?
        };
        sum.mul_scalar(1.0 / count as f64)
    }

    /// Returns the maximum over `dims`; NaN wins. With `keep`, the dims stay with extent 1. The gradient is shared
    /// evenly among equal maxima. If a reduced dim is sharded, the result is `Partial(max)`,
    /// and nothing is communicated until it is reduced.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 5.0, 7.0, 3.0], [2, 2])?, "(S0)")?;
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
    /// evenly among equal minima. If a reduced dim is sharded, the result is `Partial(min)`,
    /// and nothing is communicated until it is reduced.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 5.0, 7.0, 3.0], [2, 2])?, "(S0)")?;
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

    /// Returns the first index of the maximum along `dim`, as i64. NaN counts as largest, and zeros of both signs are
    /// equal.
    ///
    /// Communicates nothing if the ranks hold `dim` whole. If it is sharded it is not gathered: ranks reduce the maximum,
    /// and the result is `Partial(min)`, one index per result.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 5.0, 7.0, 3.0], [2, 2])?, "(S0)")?;
    ///     assert_eq!(x.argmax(-1)?.full_tensor()?.to_vec::<i64>()?, [1, 0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and a dim of extent 0.
    pub fn argmax(&self, dim: isize) -> Result<DTensor> {
        let at = self.shape().dim("argmax", dim)?;
        if self.shape()[at] == 0 || !self.cuts(at) {
            return DTensor::apply_one(&Argmax { dim: at }, &[self]);
        }
        Ok(self.max_with_index(dim, false)?.1)
    }

    /// Returns the first index of the minimum along `dim`, as i64. NaN counts as smallest, and zeros of both signs are
    /// equal. Communicates as [`DTensor::argmax`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![9i64, 4, 7, 4], [4])?, "(S0)")?;
    ///     assert_eq!(x.argmin(0)?.full_tensor()?.to_vec::<i64>()?, [1]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and a dim of extent 0.
    pub fn argmin(&self, dim: isize) -> Result<DTensor> {
        self.shape().dim("argmin", dim)?;
        Ok(self.min_with_index(dim, false)?.1)
    }

    /// Returns the maximum along `dim` and its first index (i64). With `keep`, the dim stays with extent 1.
    ///
    /// The gradient of the maximum is shared evenly among equal maxima, as by [`DTensor::max`]. Communicates as
    /// [`DTensor::argmax`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 5.0, 7.0, 3.0], [2, 2])?, "(S1)")?;
    ///     let (max, index) = x.max_with_index(1, false)?;
    ///     assert_eq!(max.full_tensor()?.to_vec::<f32>()?, [5.0, 7.0]);
    ///     assert_eq!(index.full_tensor()?.to_vec::<i64>()?, [1, 0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and a dim of extent 0.
    pub fn max_with_index(&self, dim: isize, keep: bool) -> Result<(DTensor, DTensor)> {
        self.with_index(self.max(&[dim], true)?, dim, keep)
    }

    /// Returns the minimum along `dim` and its first index (i64). With `keep`, the dim stays with extent 1.
    ///
    /// The gradient of the minimum is shared evenly among equal minima, as by [`DTensor::min`]. Communicates as
    /// [`DTensor::argmin`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![3.0f32, 5.0, 2.0], [3])?, "(S0)")?;
    ///     let (min, index) = x.min_with_index(0, true)?;
    ///     assert_eq!((min.item()?, index.item()?), (2.0, 2.0));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and a dim of extent 0.
    pub fn min_with_index(&self, dim: isize, keep: bool) -> Result<(DTensor, DTensor)> {
        self.with_index(self.min(&[dim], true)?, dim, keep)
    }

    /// Returns the product over `dims`; with `keep`, they stay with extent 1. Integers and bools are multiplied in i64.
    ///
    /// The gradient is right at zeros. A sharded dim of `dims` is gathered first; other shards stay.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2.0f32, 0.0, 3.0], [3])?, "(R)")?.requires_grad()?;
    ///     let mut y = x.prod(&[0], false)?;
    ///     assert_eq!(y.item()?, 0.0);
    ///     assert_eq!(y.backward()?.get(&x).expect("a leaf").full_tensor()?.to_vec::<f32>()?, [0.0, 6.0, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and dims that repeat.
    pub fn prod(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        DTensor::apply_one(&Prod { dims: self.dims("prod", dims)?, keep }, &[self])
    }

    /// Returns an extreme, of extent 1 along `dim`, and its first index.
    fn with_index(&self, extreme: DTensor, dim: isize, keep: bool) -> Result<(DTensor, DTensor)> {
        let dim = self.shape().dim("index", dim)?;
        let extreme = extreme.reduce_partial()?;
        let index = DTensor::apply_one(&FirstIndex { dim }, &[&self.detach(), &extreme.detach()])?;
        if keep {
            return Ok((extreme, index));
        }
        let shape: Shape = (0..self.shape().len()).filter(|&d| d != dim).map(|d| self.shape()[d]).collect();
        Ok((extreme.reshape(shape.clone())?, index.reshape(shape)?))
    }

    /// Returns true if a mesh axis shards `dim`.
    pub(in crate::dtensor::methods) fn cuts(&self, dim: usize) -> bool {
        self.layout().placements().iter().any(|placement| match placement {
            Placement::Shard(d) => *d == dim,
            Placement::RaggedShard { dims, .. } => dim < *dims,
            Placement::Replicate | Placement::Partial(_) => false,
        })
    }

    /// Resolves negative dims, and sorts.
    pub(in crate::dtensor::methods) fn dims(&self, verb: &str, dims: &[isize]) -> Result<Dims> {
        let mut dims: Dims = dims.iter().map(|&d| self.shape().dim(verb, d)).collect::<Result<_>>()?;
        dims.sort_unstable();
        Ok(dims)
    }
}
