//! Losses.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::ops::{CrossEntropy, Max, SumExp};

/// Losses.
impl DTensor {
    /// Returns `-log(softmax(self)[target])` over the last dim: logits `[.., classes]` and targets `[..]` (i64) give
    /// losses `[..]`.
    ///
    /// If the classes are sharded they are not gathered: per row, the ranks reduce one maximum and two sums.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::{DType, Tensor}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let logits = DTensor::zeros(&mesh, DType::F32, [2, 4], "(S1)".parse()?)?; // a sharded vocabulary
    ///     let target = DTensor::distribute(&mesh, &Tensor::from_vec(vec![3i64, 0], [2])?, "(R)".parse()?)?;
    ///     let loss = logits.cross_entropy(&target)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert!(loss.iter().all(|l| (l - 4f32.ln()).abs() < 1e-6)); // four equal classes
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `target` that is not i64 or has another shape, and classes that do not exist.
    pub fn cross_entropy(&self, target: &DTensor) -> Result<DTensor> {
        let (m, s) = {
            let _guard = self.mesh.no_grad();
            let max =
                Max { dims: [self.shape().dim("cross_entropy", -1)?].into_iter().collect(), keep: true };
            let m = DTensor::apply_one(&max, &[self])?.reduce_partial()?;
            let s = DTensor::apply_one(&SumExp, &[self, &m])?.reduce_partial()?;
            (m, s)
        };
        DTensor::apply_one(&CrossEntropy, &[self, target, &m, &s])
    }
}
