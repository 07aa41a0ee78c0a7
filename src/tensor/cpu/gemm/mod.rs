//! Matrix products of tensors.

mod linear;
mod tensors;

pub use linear::linear;
pub use tensors::gemm;
