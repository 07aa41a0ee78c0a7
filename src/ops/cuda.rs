//! Call an operator's CUDA kernel directly on local tensors: the counterpart of [`cpu`](super::cpu), built on the
//! launches of [`tensor::cuda`](crate::tensor::cuda).
//!
//! ```
//! use isoshard::{ops::cuda::CudaAttention, tensor::{DType, Device, Tensor, cuda}};
//! let kernel = CudaAttention::causal("attention", 0, 0.5);
//! if cuda::is_available() {
//!     let q = Tensor::zeros(DType::F32, [1, 2, 5, 4]).to_device(Device::Cuda(0))?;
//!     let (out, _log_sum) = kernel.forward(&q, &q, &q)?;
//!     assert_eq!(out.shape(), q.shape());
//! }
//! # Ok::<(), isoshard::Error>(())
//! ```

pub use super::attention::cuda::{CudaAttention, CudaAttentionDropout};
