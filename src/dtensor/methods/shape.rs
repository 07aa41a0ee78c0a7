//! Methods that change only the shape of a tensor. They return views if strides and layouts allow.
//!
//! A negative dim counts from the last. A method communicates nothing if each rank's shard of the result is in its
//! shard of the operand; otherwise the operand is redistributed to the layout that costs least.

use crate::dtensor::tensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{Cat, Expand, Permute, Reshape, Slice, Split};
use crate::tensor::Shape;

/// Methods that change only the shape.
impl DTensor {
    /// Returns the same elements, in row-major order, with another shape.
    ///
    /// A dim that stays outermost in its group keeps its shards: then nothing is communicated.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec((0..12).map(|i| i as f32).collect(), [4, 3])?, "(S0)".parse()?)?;
    ///     let y = x.reshape([2, 2, 3])?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 2, 3]@(dp:S0)");
    ///     assert_eq!(mesh.received_bytes(), 0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a shape with another number of elements.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<DTensor> {
        DTensor::apply_one(&Reshape { shape: shape.into() }, &[self])
    }

    /// Returns the dims in another order: dim `d` of the result is dim `order[d]` of this tensor. Shards follow their
    /// dim; communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 3, 2], "(S0)".parse()?)?;
    ///     assert_eq!(x.permute(&[2, 0, 1])?.spec().to_string(), "f32[2, 4, 3]@(dp:S1)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `order` that is not a permutation of the dims.
    pub fn permute(&self, order: &[usize]) -> Result<DTensor> {
        DTensor::apply_one(&Permute { order: order.iter().copied().collect() }, &[self])
    }

    /// Swaps two dims. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?, "(S0)".parse()?)?;
    ///     let y = x.transpose(0, 1)?;
    ///     assert_eq!(y.layout().to_string(), "(S1)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 3.0, 2.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have.
    pub fn transpose(&self, a: isize, b: isize) -> Result<DTensor> {
        let (a, b) = (self.shape().dim("transpose", a)?, self.shape().dim("transpose", b)?);
        DTensor::apply_one(&Permute::swap(self.shape().len(), a, b), &[self])
    }

    /// Repeats dims of extent 1, and adds new leading dims, to reach `shape`, without copying. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0], [2, 1])?, "(S0)".parse()?)?;
    ///     let y = x.expand([2, 3])?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a shape to which this tensor's shape does not broadcast.
    pub fn expand(&self, shape: impl Into<Shape>) -> Result<DTensor> {
        let shape = shape.into();
        if shape == *self.shape() { Ok(self.clone()) } else { DTensor::apply_one(&Expand { shape }, &[self]) }
    }

    /// Inserts a dim of extent 1 before `dim`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4], "(S0)".parse()?)?;
    ///     assert_eq!(x.unsqueeze(0)?.spec().to_string(), "f32[1, 4]@(dp:S1)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `dim` greater than the number of dims.
    pub fn unsqueeze(&self, dim: usize) -> Result<DTensor> {
        if dim > self.shape().len() {
            return Err(Error::invalid(
                "unsqueeze",
                "no such dim",
                format!("dim {dim} of {}", self.spec()),
                "",
            ));
        }
        let mut shape = self.shape().to_vec();
        shape.insert(dim, 1);
        self.reshape(shape)
    }

    /// Removes a dim of extent 1.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 1], "(S0)".parse()?)?;
    ///     assert_eq!(x.squeeze(-1)?.spec().to_string(), "f32[4]@(dp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, or whose extent is not 1.
    pub fn squeeze(&self, dim: isize) -> Result<DTensor> {
        let dim = self.shape().dim("squeeze", dim)?;
        let mut shape = self.shape().to_vec();
        if shape.remove(dim) != 1 {
            return Err(Error::invalid(
                "squeeze",
                "the dim's extent is not 1",
                format!("dim {dim} of {}", self.spec()),
                "",
            ));
        }
        self.reshape(shape)
    }

    /// Returns the indices `start..start + len` of `dim`. Communicates nothing if the ranks hold `dim` whole;
    /// otherwise the operand is redistributed to a layout in which they do.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?, "(S0)".parse()?)?;
    ///     let y = x.slice(1, 1, 2)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 2]@(dp:S0)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [2.0, 3.0, 5.0, 6.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and a range that exceeds its extent.
    pub fn slice(&self, dim: isize, start: usize, len: usize) -> Result<DTensor> {
        DTensor::apply_one(&Slice { dim: self.shape().dim("slice", dim)?, start, len }, &[self])
    }

    /// Splits this tensor along `dim` into tensors of these lengths. Communicates as [`DTensor::slice`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?, "(S0)".parse()?)?;
    ///     let parts = x.split(1, &[2, 1])?;
    ///     assert_eq!(parts[0].full_tensor()?.to_vec::<f32>()?, [1.0, 2.0, 4.0, 5.0]);
    ///     assert_eq!(parts[1].full_tensor()?.to_vec::<f32>()?, [3.0, 6.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses lengths whose sum is not the dim's extent.
    pub fn split(&self, dim: isize, lens: &[usize]) -> Result<Vec<DTensor>> {
        let op = Split { dim: self.shape().dim("split", dim)?, lens: lens.iter().copied().collect() };
        Ok(DTensor::apply(&op, &[self])?.into())
    }

    /// Concatenates tensors along `dim`. Communicates nothing if all have one layout in which `dim` is not sharded;
    /// otherwise the operands that do not fit are redistributed.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0], [2, 1])?, "(S0)".parse()?)?;
    ///     let y = DTensor::cat(&[&x, &x, &x], 1)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 3]@(dp:S0)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an empty list, different dtypes, and extents of other dims that differ.
    pub fn cat(parts: &[&DTensor], dim: isize) -> Result<DTensor> {
        let first = parts.first().ok_or_else(|| Error::invalid("cat", "wants operands", "none", ""))?;
        DTensor::apply_one(&Cat { dim: first.shape().dim("cat", dim)? }, parts)
    }
}
