//! Kernels of operators on the CPU, each to be called by itself, over the loops of [`tensor::cpu`](crate::tensor::cpu).

pub use super::attention::cpu::{CpuAttention, CpuAttentionDropout};
pub use super::dropout::cpu::{dropout, dropout_in_place};
pub use super::norm::cpu::{layer_norm, layer_norm_backward, rms_norm, rms_norm_backward};
pub use super::reduce::cpu::argmax;
pub use super::rotary::cpu::Rotation;
pub use super::softmax::cpu::{log_softmax, log_softmax_backward, softmax, softmax_backward};
