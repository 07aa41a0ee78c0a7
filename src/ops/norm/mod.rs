//! Layer norm and RMS norm over the last dim, with their derivatives and kernels. Group, instance and batch norm are
//! methods of [`DTensor`](crate::dtensor::DTensor) that are composed of other operators.
//!
//! Missing: rows that shard the last dim, which is gathered instead.

pub(super) mod add_norm;
pub(super) mod cpu;
mod cuda;
pub(super) mod layer_norm;
pub(super) mod layer_norm_grad;
pub(super) mod rms_norm;
pub(super) mod rms_norm_grad;
