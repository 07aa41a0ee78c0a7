//! Batches in the layout of the plan.

use super::Params;
use crate::dtensor::DTensor;
use crate::error::Result;
use crate::placement::Layout;
use crate::tensor::Tensor;

impl Params {
    /// Returns a batch as a distributed tensor: `whole`, which is equal on all ranks, in the plan's
    /// [batch layout](crate::nn::Plan::batch_layout). Each rank keeps its rows; communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let params = Params::new(&mesh, Plan::default().batch("dp"), 7)?;
    ///     let x = params.batch(&Tensor::from_vec(vec![1i64, 2, 3, 4, 5, 6], [3, 2])?)?;
    ///     assert_eq!(x.spec().to_string(), "i64[3, 2]@(dp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`DTensor::distribute`].
    pub fn batch(&self, whole: &Tensor) -> Result<DTensor> {
        DTensor::distribute(&self.mesh, whole, self.batch_layout())
    }

    /// Returns the layout of a batch: [`Plan::batch_layout`](crate::nn::Plan::batch_layout) on the mesh of the parameters.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     assert_eq!(params.batch_layout().to_string(), "(S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn batch_layout(&self) -> Layout {
        self.plan.batch_layout(self.mesh.mesh())
    }
}
