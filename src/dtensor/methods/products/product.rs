//! Products: matrix products and contractions of named dims.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::ops::Matmul;

/// Products.
impl DTensor {
    /// Returns the matrix product over the last two dims. The other dims are batch dims, which must be equal; an
    /// operand of two dims has none.
    ///
    /// Communicates nothing if the rows of the first operand (`S0` times `R`), the columns of the second (`R` times
    /// `S1`) or the batch are sharded. If the summed dim is sharded (`S1` times `S0`), the result is `Partial`, and
    /// the operator that reads it reduces it if necessary. In exact mode this requires that no shard boundary cuts a leaf
    /// of the reduction tree (at most 32 indices); otherwise the operands are redistributed.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2, 64], "(S1)", 0.5)?;
    ///     let w = DTensor::full(&mesh, DType::F32, [64, 3], "(S0)", 2.0)?;
    ///     let y = x.matmul(&w)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 3]@(dp:P(sum))");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [64.0; 6]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses operands with fewer than two dims, and extents that do not match.
    pub fn matmul(&self, other: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Matmul::for_dims(self.shape().len(), other.shape().len())?, &[self, other])
    }

    /// Returns the product over named dims. A dim that the result lacks is summed over.
    ///
    /// Layouts and communication are as for [`DTensor::matmul`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec((0..8).map(|i| i as f32).collect(), [2, 2, 2])?, "(S0)")?;
    ///     let w = DTensor::full(&mesh, x.dtype(), [3, 2], "(R)", 1.0)?;
    ///     let y = x.einsum("b t k, n k -> b t n", &w)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 2, 3]@(dp:S0)");
    ///     assert_eq!(y.slice(2, 0, 1)?.full_tensor()?.to_vec::<f32>()?, [1.0, 5.0, 9.0, 13.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a signature that cannot be read, and extents that do not match it.
    pub fn einsum(&self, signature: &str, other: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Matmul::new(signature)?, &[self, other])
    }
}
