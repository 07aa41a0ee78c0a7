//! Layer norm and RMS norm over the last dim, with their derivatives and kernels. Group, instance and batch norm are
//! methods of [`DTensor`](crate::dtensor::DTensor) that are composed of other operators.
//!
//! Missing: rows that shard the last dim, which is gathered instead.

mod add_norm;
pub(super) mod cpu;
mod cuda;
mod layer_norm;
mod layer_norm_grad;
mod rms_norm;
mod rms_norm_grad;

pub use add_norm::{AddLayerNorm, AddRmsNorm};
pub use layer_norm::LayerNorm;
pub use layer_norm_grad::LayerNormGrad;
pub use rms_norm::RmsNorm;
pub use rms_norm_grad::RmsNormGrad;

use super::Sample;

/// Returns the samples of the family's operators.
pub(super) fn samples() -> Vec<Sample> {
    [
        add_norm::samples(),
        layer_norm::samples(),
        layer_norm_grad::samples(),
        rms_norm::samples(),
        rms_norm_grad::samples(),
    ]
    .concat()
}
