//! The reductions of losses.

use crate::dtensor::DTensor;
use crate::error::Result;

/// A loss's reduction over its elements.
///
/// ```
/// use isoshard::dtensor::LossReduction;
/// assert_eq!(LossReduction::default(), LossReduction::Mean);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LossReduction {
    /// No reduction: the result has one loss per element, or per row. Communicates nothing.
    None,
    /// The sum divided by the global number of losses, or by their global weight if the loss has weights. A mean over
    /// nothing is NaN. Communicates as [`DTensor::mean_all`] does.
    #[default]
    Mean,
    /// The sum over the global tensor. It is `Partial` if the losses are sharded, and nothing is communicated.
    Sum,
}

impl LossReduction {
    /// Reduces losses of equal weight. Communicates as the variants say.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, LossReduction}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let losses = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 6.0], [3])?, "(S0)")?;
    ///     assert_eq!(LossReduction::Mean.apply(&losses)?.item()?, 3.0);
    ///     assert_eq!(LossReduction::Sum.apply(&losses)?.item()?, 9.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if an operand has to be redistributed and communication fails.
    pub fn apply(self, losses: &DTensor) -> Result<DTensor> {
        match self {
            LossReduction::None => Ok(losses.clone()),
            LossReduction::Mean => losses.mean_all(),
            LossReduction::Sum => losses.sum_all(),
        }
    }
}
