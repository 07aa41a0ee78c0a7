//! Call an operator's CPU kernel directly on local tensors, without a mesh.
//!
//! The kernels are built on the loops of [`tensor::cpu`](crate::tensor::cpu). Their first argument is the name that
//! errors begin with.
//!
//! ```
//! use isoshard::ops::cpu;
//! use isoshard::tensor::Tensor;
//! let x = Tensor::from_vec(vec![0.0f32, f32::NEG_INFINITY, 1.0, 1.0], [2, 2])?;
//! assert_eq!(cpu::softmax("softmax", &x)?.to_f64_vec(), [1.0, 0.0, 0.5, 0.5]);
//! # Ok::<(), isoshard::Error>(())
//! ```

pub use super::attention::cpu::{CpuAttention, CpuAttentionDropout};
pub use super::dropout::cpu::{dropout, dropout_in_place};

pub use super::norm::cpu::{layer_norm, layer_norm_backward, rms_norm};
pub use super::reduce::cpu::argmax;

pub use super::softmax::cpu::{log_softmax, softmax, softmax_backward};
