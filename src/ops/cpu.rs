//! Kernels of operators on the CPU, each to be called by itself, over the loops of [`tensor::cpu`](crate::tensor::cpu).

pub use super::attention::cpu::{AttentionDropout, CausalAttention};
