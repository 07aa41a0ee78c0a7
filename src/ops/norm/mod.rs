//! Layer norm and RMS norm over the last dim, with their derivatives and kernels.

pub(super) mod cpu;
mod cuda;
pub(super) mod layer_norm;
pub(super) mod layer_norm_grad;
pub(super) mod rms_norm;
pub(super) mod rms_norm_grad;
