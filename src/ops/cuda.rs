//! Call an operator's CUDA kernel directly on local tensors: the counterpart of [`cpu`](super::cpu), built on the
//! launches of [`tensor::cuda`](crate::tensor::cuda).

pub use super::attention::cuda::{CudaAttention, CudaAttentionDropout};
