//! Reading and writing elements by index.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::ops::{Embedding, Gather, ScatterAdd};

/// Reading and writing by index.
impl DTensor {
    /// Returns the rows of this table, `[rows, width]`, that `index` (i64) names: shape `[index shape.., width]`.
    ///
    /// If the table's rows are sharded, each rank looks up the rows that it holds and the result is `Partial`; the
    /// table is not gathered.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let table = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 0.5, 1.0, 1.5, 2.0, 2.5], [3, 2])?, "(R)".parse()?)?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0], [2])?, "(S0)".parse()?)?;
    ///     let rows = table.embedding(&index)?;
    ///     assert_eq!(rows.spec().to_string(), "f32[2, 2]@(dp:S0)");
    ///     assert_eq!(rows.full_tensor()?.to_vec::<f32>()?, [2.0, 2.5, 0.0, 0.5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64, and indices outside the table.
    pub fn embedding(&self, index: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Embedding, &[self, index])
    }

    /// Returns the elements along `dim` that `index` (i64) names. `index` has the result's shape; its extents of the
    /// other dims are those of this tensor.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?, "(S0)".parse()?)?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0], [2, 1])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.gather(1, &index)?.full_tensor()?.to_vec::<f32>()?, [3.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64, indices outside the dim, and other extents that differ.
    pub fn gather(&self, dim: isize, index: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Gather { dim: self.shape().dim("gather", dim)? }, &[self, index])
    }

    /// Returns zeros with extent `extent` along `dim`, with each of these elements added at the index that `index`
    /// (i64) names. It is the transpose of [`DTensor::gather`] and computes its gradient.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 4.0], [3])?, "(R)".parse()?)?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0, 2], [3])?, "(R)".parse()?)?;
    ///     assert_eq!(x.scatter_add(0, &index, 3)?.full_tensor()?.to_vec::<f32>()?, [2.0, 0.0, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64 or has another shape, and indices outside `extent`.
    pub fn scatter_add(&self, dim: isize, index: &DTensor, extent: usize) -> Result<DTensor> {
        DTensor::apply_one(&ScatterAdd { dim: self.shape().dim("scatter_add", dim)?, extent }, &[index, self])
    }
}
