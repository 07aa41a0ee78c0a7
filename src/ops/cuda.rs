//! Kernels of operators on a CUDA device: the twin of [`cpu`](super::cpu), over the launches of
//! [`tensor::cuda`](crate::tensor::cuda).

pub use super::attention::cuda::{CudaAttention, CudaAttentionDropout};
