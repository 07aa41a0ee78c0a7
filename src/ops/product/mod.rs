//! Products over named dims, and linear maps with a bias and a function as one operator. The kernels are the products of
//! [`tensor::cpu`](crate::tensor::cpu) and their CUDA counterparts.

pub(crate) mod activation;
mod linear;
mod matmul;

pub(crate) use activation::Activation;
pub use linear::Linear;
pub use matmul::Matmul;

use super::Sample;

/// Returns the samples of the family's operators.
pub(super) fn samples() -> Vec<Sample> {
    [linear::samples(), matmul::samples()].concat()
}
